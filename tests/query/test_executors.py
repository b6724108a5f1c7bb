"""Wherever the tasks of a question run, its answer has the same bits."""

import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

import dualform
from dualform import errors
from dualform.query import scan as scanning
from dualform.query import search
from dualform.query.answer import Answer
from dualform.query.executors import Processes, Runner, runner_of
from dualform.query.scorer import Scorer
from dualform.query.sending import Packer, run_packed
from dualform.store.files import files_at
from training import samples, sgd, train

INPUTS, _ = samples()
NAMES = ["threads", "shuffled", "processes"]
CONDITIONS = [None, pl.col("label") != 1, "task = 'late'", pl.col("step") % 3 == 0]
GROUPINGS = ["label", "sample_id", ["task", "label"]]


class Shuffled(Executor):
    """Gets tasks as other processes do, and ends them in any order."""

    def __init__(self, seed=0):
        self._random = random.Random(seed)
        self._waiting = []
        self.order = []

    def submit(self, function, /, *arguments):
        future = _Lazy(self)
        self._waiting.append((future, function, arguments))
        return future

    def run_until(self, wanted):
        while not wanted.done():
            place = self._random.randrange(len(self._waiting))
            future, function, arguments = self._waiting.pop(place)
            self.order.append(place)
            if future.set_running_or_notify_cancel():
                future.set_result(function(*arguments))


class _Lazy(Future):
    def __init__(self, executor):
        super().__init__()
        self._executor = executor

    def result(self, timeout=None):
        self._executor.run_until(self)
        return super().result(timeout)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Recordings of several chunks; keys that slots share are stored once."""
    folder = tmp_path_factory.mktemp("executors")
    options = {"steps": 12, "chunk_bytes": 2000}
    return {
        "sgd": train(folder / "sgd", optimizer=sgd, **options),
        "adam": train(folder / "adam", optimizer=adam, **options),
        "float32": train(folder / "float32", precision=torch.float32, dtype="float32", **options),
        "rows": train(folder / "rows", keep="rows", **options),
    }


@pytest.fixture(scope="module")
def runners():
    """A place to run tasks by name; the processes are the same for all tests."""
    found = {name: runner_of(name) for name in ("threads",)}
    found["shuffled"] = runner_of(Shuffled())
    found["processes"] = Runner(Processes(2))
    yield found
    for runner in found.values():
        runner.backend.close()


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch):
    """Each piece is a task, and nothing is found by an index, which would round differently."""
    monkeypatch.setattr(scanning, "TASK_BYTES", 1)
    monkeypatch.setattr(search, "USE_INDEX", False)


def opened(run, runner=None):
    return dualform.open(run.path, run.model, executor=runner)


@st.composite
def questions(draw):
    """A question as (what it is called, a function from a dual to its answer)."""
    inputs = INPUTS[draw(st.lists(st.integers(0, 11), min_size=1, max_size=4))]
    where = draw(st.sampled_from(CONDITIONS))
    by = draw(st.sampled_from(GROUPINGS))
    k = draw(st.integers(1, 70))
    layer = draw(st.sampled_from(["0", "2", None]))
    kind = draw(st.sampled_from(["attend", "contributions", "whitened", "sketch", "kernel"]))
    ask = draw(st.sampled_from(["top", "top by", "top per", "total", "absolute", "scores"]))

    def answer(dual):
        with_dtype = inputs.to(next(dual._model.parameters()).dtype)
        if kind in ("attend", "contributions"):
            return getattr(dual, kind)(with_dtype)[layer or "2"]
        found = dual.influence(with_dtype, method=kind, segments=2)
        return found if layer is None else found[layer]

    calls = {
        "top": lambda found: found.top(k, where=where),
        "top by": lambda found: found.top(k, by=by, where=where, lowest=True),
        "top per": lambda found: found.top(k, per=by, where=where, absolute=True),
        "total": lambda found: found.total(by, where=where),
        "absolute": lambda found: found.total(by, where=where, absolute=True),
        "scores": lambda found: pl.DataFrame({"sum": found.reduce(AddUp(), where=where).total}),
    }
    return f"{kind} {layer} {ask} {k} {by} {where}", lambda dual: calls[ask](answer(dual))


class AddUp:
    """A reducer of one's own, whose sum depends on the order."""

    def __init__(self):
        self.total = np.zeros(1)

    def empty(self):
        return AddUp()

    def add(self, tile):
        self.total = self.total + tile.scores.double().sum().item()

    def merge(self, other):
        self.total = self.total + other.total


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(question=questions(), kind=st.sampled_from(["sgd", "adam", "float32"]))
def test_no_executor_changes_a_bit(runs, runners, name, question, kind):
    told, ask = question
    expected = ask(opened(runs[kind]))
    found = ask(opened(runs[kind], runners[name]))
    try:
        assert_frame_equal(found, expected, check_exact=True)
    except AssertionError as error:
        raise AssertionError(f"{kind}: {told}: {error}") from None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["sgd", "adam", "rows"])
def test_sums_over_layers_and_parts(runs, runners, name, kind):
    here = opened(runs[kind]).contributions(INPUTS)
    there = opened(runs[kind], runners[name]).contributions(INPUTS)
    assert_frame_equal(there.top(5, by="sample_id"), here.top(5, by="sample_id"), check_exact=True)
    assert_frame_equal(there["2"].parts(), here["2"].parts(), check_exact=True)


def test_tasks_do_end_in_another_order(runs):
    shuffled = Shuffled(1)
    opened(runs["sgd"], shuffled).attend(INPUTS)["0"].total("label", absolute=True)
    assert any(shuffled.order)


def test_many_blocks_of_queries(runs, runners, monkeypatch):
    monkeypatch.setattr(scanning, "MOST_QUERIES", 5)
    for kind in ("sgd", "adam"):
        here, there = (opened(runs[kind], runner).contributions(INPUTS)["2"] for runner in (None, runners["shuffled"]))
        assert_frame_equal(there.total("sample_id"), here.total("sample_id"), check_exact=True)
        assert_frame_equal(there.top(3, per="label"), here.top(3, per="label"), check_exact=True)


def test_no_slots_match(runs, runners):
    for runner in (None, runners["shuffled"]):
        answer = opened(runs["sgd"], runner).attend(INPUTS)["0"]
        assert not answer.top(3, where="label = 99").height
        assert answer.total("label", where="label = 99")["total"].abs().sum() == 0


def test_a_moment_of_training(runs, runners):
    here, there = (opened(runs["sgd"], runner).at(7) for runner in (None, runners["processes"]))
    assert_frame_equal(
        there.contributions(INPUTS)["0"].top(9), here.contributions(INPUTS)["0"].top(9), check_exact=True
    )


# What is sent


def packed_sizes(run, ask):
    """The sizes of all tasks of a question, and of their results."""
    sizes = []

    class Weighing(Shuffled):
        def submit(self, function, /, content, *shared):
            result = function(content, *shared)
            sizes.append((len(content), len(result)))
            return super().submit(lambda: result)

    ask(opened(run, Weighing()))
    return sizes


def test_no_slots_are_sent(tmp_path):
    run = train(tmp_path / "run", steps=200, rows=64, chunk_bytes=200_000)
    store = run.dual.store
    bytes_of_a_task = 8 * 12 * store.slots("0") // len(store.manifest.chunks)
    for ask in (
        lambda dual: dual.attend(INPUTS)["0"].top(5),
        lambda dual: dual.contributions(INPUTS)["0"].top(5),
        lambda dual: dual.influence(INPUTS, segments=[(0, 200)]).top(5),
    ):
        for content, result in packed_sizes(run, ask):
            assert content < bytes_of_a_task / 4
            assert result < bytes_of_a_task / 4


def test_a_task_has_the_coefficients_of_its_own_steps(runs):
    scorer = opened(runs["sgd"]).contributions(INPUTS)["2"]._scorer
    [*chunks] = scorer.runs()
    part = scorer.part(chunks[1:2])
    for name, coefficients in part.coefficients.items():
        assert len(coefficients.updates.steps) < len(scorer.coefficients[name].updates.steps)
        assert np.array_equal(coefficients.of_blocks(chunks[1]), scorer.coefficients[name].of_blocks(chunks[1]))


def test_a_worker_reads_no_row_tables(runs, monkeypatch):
    def refuse(self):
        raise AssertionError("rows were read")

    dual = opened(runs["sgd"])
    tasks = []

    class Keeping(Shuffled):
        def submit(self, function, /, *arguments):
            tasks.append(arguments)
            return super().submit(function, *arguments)

    opened(runs["sgd"], Keeping()).contributions(INPUTS)["2"].total("label")
    from dualform.query import sending
    from dualform.store.reader import Store

    sending._STORES.clear()
    sending._SCORERS.clear()
    monkeypatch.setattr(Store, "rows", property(refuse))
    monkeypatch.setattr(Store, "updates", property(refuse))
    assert len(tasks) == len(list(dual.store.chunks("2")))
    for arguments in tasks:
        run_packed(*arguments)


def test_a_relative_path_is_sent_as_an_absolute_one(runs, monkeypatch):
    monkeypatch.chdir(runs["sgd"].path.parent)
    files = pickle.loads(pickle.dumps(files_at("sgd")))
    monkeypatch.chdir("/")
    assert files.size("manifest.json")


def test_a_recording_that_has_grown_or_changed(tmp_path):
    run = train(tmp_path / "run", steps=6, chunk_bytes=2000)
    asked = opened(run, Shuffled())
    expected = run.dual.attend(INPUTS)["0"].top(3)
    assert_frame_equal(asked.attend(INPUTS)["0"].top(3), expected, check_exact=True)
    train(tmp_path / "other", steps=6, chunk_bytes=2000)
    run.path.rename(tmp_path / "gone")
    (tmp_path / "other").rename(run.path)
    from dualform.query import sending

    sending._STORES.clear()
    with pytest.raises(errors.StoreChangedError, match=r"is not the one that was asked about.*Open it again\."):
        asked.attend(INPUTS)["0"].top(3)


def test_what_cannot_be_sent_is_refused(runs):
    class Local(AddUp):
        def empty(self):
            return Local()

    answer = opened(runs["sgd"], Shuffled()).attend(INPUTS)["0"]
    with pytest.raises(
        errors.QuestionError, match=r'cannot be sent to another process: .*top level of a module\. executor="threads"'
    ):
        answer.reduce(Local())


def test_unknown_names_are_refused(runs):
    with pytest.raises(errors.QuestionError, match="executor='spark': expected 'threads', 'processes', 'ray'"):
        opened(runs["sgd"], "spark")


def test_ray_is_an_extra(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs Ray: pip install 'dualform\[ray\]'\."):
        opened(runs["sgd"], "ray")


# Processes that die, progress, cancellation


class KillsItself(Scorer):
    """Kills its process at some slots, as often as it is told to."""

    value = "one"

    def __init__(self, store, layer, end, deaths: Path):
        super().__init__(store, layer, end, 1, torch.float64)
        self.deaths = deaths

    def score(self, queries, run, low, high):
        if run.chunk_number == 2:
            for number in range(int(self.deaths.read_text())):
                try:
                    (self.deaths.parent / f"death {number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        return run.keys(self.dtype, low, high).vectors().sum(1).expand(1, -1)


def dying(run, runner, folder, deaths):
    (folder / "deaths").write_text(str(deaths))
    store = run.dual.store
    scorer = KillsItself(store, store.layer("0")[1], store.end_step, folder / "deaths")
    return Answer(scorer, {"query": 1}, executor=runner)


def test_a_process_that_dies_changes_no_answer(runs, runners, tmp_path):
    expected = dying(runs["sgd"], runner_of(None), tmp_path, 0).total("label")
    found = dying(runs["sgd"], runners["processes"], tmp_path, 2).total("label")
    assert (tmp_path / "death 1").exists()
    assert_frame_equal(found, expected, check_exact=True)


def test_a_task_that_kills_every_process_is_given_up(runs, runners, tmp_path):
    with pytest.raises(errors.WorkersLostError, match=r'died 3 times at the same task.*if __name__ == "__main__"'):
        dying(runs["sgd"], runners["processes"], tmp_path, 99).total("label")


def test_a_killed_worker_and_a_question_that_goes_on(runs, runners):
    """Any worker may be killed at any time, from outside."""
    dual = opened(runs["sgd"], runners["processes"])
    expected = opened(runs["sgd"]).contributions(INPUTS)["0"].total("sample_id")
    dual.contributions(INPUTS)["0"].total("sample_id")
    [pool] = runners["processes"].backend._pools
    victim = next(iter(pool._processes))
    killer = threading.Timer(0.05, lambda: os.kill(victim, signal.SIGKILL))
    killer.start()
    for _ in range(10):
        assert_frame_equal(dual.contributions(INPUTS)["0"].total("sample_id"), expected, check_exact=True)
    killer.join()


def test_the_pool_of_someone_else_is_not_replaced(runs, tmp_path):
    import multiprocessing

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert_frame_equal(
            opened(runs["sgd"], pool).attend(INPUTS)["0"].top(3), opened(runs["sgd"]).attend(INPUTS)["0"].top(3)
        )
        with pytest.raises(BrokenProcessPool):
            dying(runs["sgd"], runner_of(pool), tmp_path, 1).total("label")


def test_progress(runs):
    calls = []
    dual = opened(runs["sgd"], Shuffled())
    answer = dual.influence(INPUTS[:1], segments=[(0, 12)], progress=lambda *call: calls.append(call))
    calls.clear()
    answer.total("label")
    assert calls == sorted(calls)
    assert len(calls) == len(dual.store.manifest.chunks)
    assert calls[-1] == ("scoring rows", 60, 60)


def test_an_error_cancels_what_waits(runs):
    class Failing(Shuffled):
        def run_until(self, wanted):
            raise KeyboardInterrupt

    executor = Failing()
    with pytest.raises(KeyboardInterrupt):
        opened(runs["sgd"], executor).attend(INPUTS)["0"].total("label", absolute=True)
    assert [future.cancelled() for future, *_ in executor._waiting][1:] == [True] * (len(executor._waiting) - 1)


SLOW = """
import signal, sys
import torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started without
sys.path[:0] = {path!r}
import dualform
from dualform.query.answer import Answer
from dualform.query.executors import runner_of
from dualform.query import scan
from slow_scorer import Slow

if __name__ == "__main__":
    scan.TASK_BYTES = 1
    store = dualform.open({store!r}).store
    answer = Answer(Slow(store, store.layer("0")[1], store.end_step, 1, torch.float64), {{"query": 1}}, executor=runner_of("processes"))
    answer.total("label")
"""
SLOW_SCORER = """
import os, time
from pathlib import Path
from dualform.query.scorer import Scorer


class Slow(Scorer):
    value = "none"

    def score(self, queries, run, low, high):
        Path(__file__).with_name(f"worker {os.getpid()}").touch()
        time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the signals of POSIX, and /proc")
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(runs, tmp_path, signal_number):
    (tmp_path / "slow_scorer.py").write_text(SLOW_SCORER)
    script = tmp_path / "ask.py"
    script.write_text(textwrap.dedent(SLOW.format(path=[str(tmp_path)], store=str(runs["sgd"].path))))
    asking = subprocess.Popen([sys.executable, str(script)], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        workers = wait_for(lambda: [int(path.name.split()[1]) for path in tmp_path.glob("worker *")])
        asking.send_signal(signal_number)
        asking.wait(timeout=30)
        wait_for(lambda: not any(is_alive(worker) for worker in workers))
    finally:
        if asking.poll() is None:
            asking.kill()
            asking.wait()


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} seconds")


def is_alive(process):
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_results_are_unpacked_with_the_groups_of_the_one_who_asks(runs):
    dual = opened(runs["sgd"])
    answer = dual.attend(INPUTS)["0"]
    groups = answer.groups("label")
    store = dual.store
    task = scanning.Task(
        list(answer._selection(None).pieces())[:1],
        answer._scorer,
        scanning_totals(groups, len(INPUTS)),
        slice(0, len(INPUTS)),
    )
    packer = Packer()
    packed = packer.pack(task)
    result = packer.unpack(run_packed(packed.content, *packed.shared))
    assert result._groups is groups
    assert task.store is store


def scanning_totals(groups, queries):
    from dualform.query.reducers import Totals

    return Totals(groups, queries, False)
