"""Forked children of a process that records: they never hold the lock, write nothing, and are told so."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import dualform
from dualform import forked
from dualform.errors import RecordingError
from training import network, samples, sgd

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]
INPUTS, LABELS = samples()


class Recorded:
    """A recording that is under way."""

    def __init__(self, path, **settings):
        self.model = network()
        self.optimizer = sgd(self.model)
        self.recorder = dualform.record(self.model, self.optimizer, path, **settings)

    def backward(self):
        self.recorder.batch(sample_id=range(len(LABELS)))
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(INPUTS), LABELS).backward()

    def step(self):
        self.backward()
        self.optimizer.step()


def persistent_loader(collate=None):
    """A loader with a forked worker that lives as long as the loader."""
    return DataLoader(
        list(range(8)),
        batch_size=4,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
        collate_fn=collate or torch.tensor,
    )


@pytest.mark.parametrize("settings", [{"resume": True}, {"overwrite": True}], ids=["resume", "overwrite"])
def test_a_persistent_worker_does_not_keep_the_folder_locked(tmp_path, settings):
    run = Recorded(tmp_path / "run")
    loader = persistent_loader()
    with run.recorder:
        for _ in loader:  # the worker is forked while the folder is locked
            run.step()
    [worker] = loader._iterator._workers
    assert worker.is_alive()
    with dualform.record(run.model, run.optimizer, tmp_path / "run", **settings):
        pass
    dualform.build_totals(tmp_path / "run", "sample_id") if "resume" in settings else None
    assert worker.is_alive()


def test_a_child_does_not_keep_the_lock_of_a_parent_that_was_killed(tmp_path):
    code = (
        "import os, signal, sys, time, torch, dualform\n"
        "model = torch.nn.Linear(2, 2)\n"
        "recorder = dualform.record(model, torch.optim.SGD(model.parameters()), sys.argv[1])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, env=environment
    )
    child = int(parent.stdout.readline())
    assert parent.wait(60) == -signal.SIGKILL
    try:
        os.kill(child, 0)  # it is alive
        model = nn.Linear(2, 2)
        dualform.record(model, torch.optim.SGD(model.parameters()), tmp_path / "run", overwrite=True).close()
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


def used_in_a_child(work):
    """What a forked child says after it has done something: an exception's name and message, and how long it took."""
    context = multiprocessing.get_context("fork")
    told, telling = context.Pipe(duplex=False)

    def child():
        began = time.monotonic()
        try:
            work()
            said = "nothing was raised"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        telling.send((said, time.monotonic() - began))

    process = context.Process(target=child)
    process.start()
    try:
        assert told.poll(60), "the child hangs"
        return told.recv()
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("settings", [{}, {"totals": ["sample_id"]}], ids=["slots", "totals"])
def test_a_recorder_refuses_to_work_in_a_child(tmp_path, settings):
    run = Recorded(tmp_path / "run", **settings)
    recorder = run.recorder
    run.step()
    run.backward()
    for work in (
        lambda: recorder.batch(sample_id=range(12)),
        lambda: recorder.log(loss=1.0),
        run.optimizer.step,
        recorder.seal,
        recorder.close,
        lambda: recorder.__exit__(None, None, None),
    ):
        said, seconds = used_in_a_child(work)
        assert said.startswith("RecordingError: the recorder of ")
        assert f"belongs to process {os.getpid()} and was used in process" in said
        assert "Use it in the process that called dualform.record()" in said
        assert 'start that by the method "spawn" or "forkserver"' in said
        assert seconds < 5
    run.optimizer.step()
    recorder.close()
    assert dualform.open(tmp_path / "run").end_step == 2
    assert dualform.open(tmp_path / "run").verify().passed


def test_batch_in_a_worker_is_an_error_that_says_so(tmp_path):
    run = Recorded(tmp_path / "run")

    def collate(ids):
        run.recorder.batch(sample_id=ids)
        return torch.tensor(ids)

    with (
        run.recorder,
        pytest.raises(RecordingError, match=r"belongs to process \d+ and was used in process \d+, a forked child"),
    ):
        for _ in persistent_loader(collate):
            run.step()


def content(folder):
    """The size, time and inode of each file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.stat()
        found[str(path)] = about.st_size, about.st_mtime_ns, about.st_ino
    return found


@pytest.mark.parametrize("leave", [sys.exit, os._exit], ids=["sys.exit", "os._exit"])
def test_a_child_that_ends_within_the_with_block_changes_nothing(tmp_path, leave):
    """sys.exit() leaves the with block by an exception and runs what is to be done at the end of a process."""
    run = Recorded(tmp_path / "run", chunk_bytes=2000)
    run.step()
    run.recorder.seal()
    run.step()  # one that is yet to be written
    before = content(tmp_path / "run")
    child = os.fork()
    if child == 0:
        code = 3
        try:
            with run.recorder:
                leave(5)
        except SystemExit as error:
            # As the interpreter ends, without the rest of the test session
            run.recorder._finalizer()
            code = error.code
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 5
    assert content(tmp_path / "run") == before
    with pytest.raises(dualform.errors.StoreExistsError, match="another recorder"):  # it is still locked
        dualform.build_totals(tmp_path / "run", "sample_id")
    run.step()
    run.recorder.close()
    assert dualform.open(tmp_path / "run").end_step == 3
    assert dualform.open(tmp_path / "run").verify().passed


def test_the_end_of_a_child_process_changes_nothing(tmp_path):
    code = (
        "import os, sys, torch, dualform\n"
        "model = torch.nn.Linear(2, 2)\n"
        "recorder = dualform.record(model, torch.optim.SGD(model.parameters()), sys.argv[1])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(dualform.open(sys.argv[1]).info()['ended'])\n"
        "recorder.close()\n"
        "print(dualform.open(sys.argv[1]).info()['ended'])\n"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["not yet, or killed: what is sealed is here", "closed"]


# Polars in forked children


def questions(path):
    """What a child may ask: each opens a recording anew, or uses what its parent has opened."""
    dual = dualform.open(path, network())
    answer = dual.attend(INPUTS[:1])["2"]
    return {
        "open": lambda: dualform.open(path),
        "build_totals": lambda: dualform.build_totals(path, "label"),
        "rows": lambda: dual.rows,
        "attend": lambda: dual.attend(INPUTS[:1]),
        "top": lambda: answer.top(1, by="sample_id"),
        "total": lambda: answer.total("sample_id"),
        "verify": dual.verify,
        "masked": lambda: dual.masked(drop="sample_id = 1"),
    }


def test_a_child_of_a_process_that_used_polars_is_refused_at_once(tmp_path):
    run = Recorded(tmp_path / "run")
    with run.recorder:
        run.step()
    work = questions(tmp_path / "run")
    work["record"] = lambda: Recorded(tmp_path / "new")
    work["resume"] = lambda: dualform.record(run.model, run.optimizer, tmp_path / "run", resume=True)
    for name, ask in work.items():
        said, seconds = used_in_a_child(ask)
        assert said.startswith("ForkedError: process "), (name, said)
        assert "was forked from one that had used Polars" in said
        assert '"spawn" or "forkserver"' in said
        assert seconds < 5
    assert not (tmp_path / "new").exists()
    assert dualform.open(tmp_path / "run").verify().passed


RECORD_IN_A_CHILD = """
import os, sys, torch
{parent}
child = os.fork()
if child == 0:
    status = 1
    try:
        import dualform
        from dualform.errors import ForkedError
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dualform.record(model, optimizer, sys.argv[1]) as recorder:
            recorder.batch(sample_id=[0, 1])
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
        assert dualform.open(sys.argv[1]).verify().passed
        status = 0
    except ForkedError:
        status = 2
    finally:
        os._exit(status)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
WORKS, REFUSED = "0", "2"


@pytest.mark.parametrize(
    ("parent", "expected"),
    [
        ("", WORKS),
        ("import polars", WORKS),
        ("import dualform.record, dualform.query.dual", WORKS),
        ("import polars; polars.Series([1]).unique()", REFUSED),
        ("import dualform, polars; polars.Series([1]).unique()", REFUSED),
        ("import polars, dualform; polars.Series([1]).unique()", REFUSED),
    ],
)
@pytest.mark.parametrize("threads", ["1", "4"])
def test_a_child_is_refused_only_where_it_would_hang(tmp_path, parent, expected, threads):
    """Polars' threads must have begun in the parent: importing it begins none. They may be the user's, from before dualform was imported."""
    code = RECORD_IN_A_CHILD.format(parent=parent)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "POLARS_MAX_THREADS": threads}
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize(("is_used", "expected"), [(False, "nothing was raised"), (True, "ForkedError")])
def test_where_threads_have_no_names_what_dualform_has_used_counts(monkeypatch, tmp_path, is_used, expected):
    monkeypatch.setattr(forked, "TASKS", tmp_path / "absent")
    monkeypatch.setattr(forked._Checked, "is_used", is_used)
    said, _ = used_in_a_child(forked.require_polars)
    assert said.startswith(expected)
