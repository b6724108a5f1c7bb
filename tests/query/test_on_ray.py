"""Ray gives the same bits, on this machine alone."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal

import dualform
from dualform import errors
from dualform.query import scan as scanning
from dualform.query import search
from dualform.query.answer import Answer
from dualform.query.executors import Runner
from dualform.query.scorer import Scorer
from training import samples, train

ray = pytest.importorskip("ray", reason="Ray is not installed")
# Ray opens files and sockets that it leaves to the garbage collector, and has deprecations of its own
pytestmark = pytest.mark.filterwarnings("ignore")
INPUTS, _ = samples()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("ray") / "run", steps=12, chunk_bytes=2000)


@pytest.fixture(scope="module")
def runner():
    """Ray, started once, with the address of no cluster."""
    from dualform.query.on_ray import OnRay

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        here = Path(__file__).parent
        places = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(places))
        runner = Runner(OnRay())
    yield runner
    session = ray._private.worker._global_node.get_session_dir_path()
    runner.backend.close()
    assert not running(session)
    shutil.rmtree(session, ignore_errors=True)


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch):
    monkeypatch.setattr(scanning, "TASK_BYTES", 1)
    monkeypatch.setattr(search, "USE_INDEX", False)


def running(session):
    """The processes of a Ray session."""
    lines = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in lines.splitlines() if session in line]


QUESTIONS = {
    "attention": lambda dual: dual.attend(INPUTS)["0"].top(7, where=pl.col("label") != 1),
    "attention per label": lambda dual: dual.attend(INPUTS)["0"].top(3, per="label", absolute=True),
    "contributions": lambda dual: dual.contributions(INPUTS).top(5, by="sample_id"),
    "influence": lambda dual: dual.influence(INPUTS, segments=2).top(5),
    "influence of slots": lambda dual: dual.influence(INPUTS, segments=2)["2"].total(["task", "label"]),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_ray_changes_no_bit(run, runner, question):
    ask = QUESTIONS[question]
    found = ask(dualform.open(run.path, run.model, executor=runner))
    assert_frame_equal(found, ask(dualform.open(run.path, run.model)), check_exact=True)


class KillsItself(Scorer):
    """Kills its process at some slots, once."""

    value = "one"

    def __init__(self, store, layer, end, death: Path):
        super().__init__(store, layer, end, 1, torch.float64)
        self.death = death

    def score(self, queries, run, low, high):
        if run.chunk_number == 2 and self.death.exists():
            self.death.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return run.keys(self.dtype, low, high).vectors().sum(1).expand(1, -1)


def test_a_lost_worker_is_replaced(run, runner, tmp_path):
    store = run.dual.store
    scorer = KillsItself(store, store.layer("0")[1], store.end_step, tmp_path / "death")
    expected = Answer(scorer, {"query": 1}).total("label")
    (tmp_path / "death").touch()
    found = Answer(scorer, {"query": 1}, executor=runner).total("label")
    assert not (tmp_path / "death").exists()
    assert_frame_equal(found, expected, check_exact=True)


class Refuses(Scorer):
    value = "none"

    def score(self, queries, run, low, high):
        raise errors.NotRecordedError("nothing of the kind")


def test_an_error_is_the_one_that_the_task_raised(run, runner):
    store = run.dual.store
    scorer = Refuses(store, store.layer("0")[1], store.end_step, 1, torch.float64)
    with pytest.raises(errors.NotRecordedError, match=r"^nothing of the kind$"):
        Answer(scorer, {"query": 1}, executor=runner).total("label")


def test_tasks_that_no_machine_has_memory_for_are_refused(runner, monkeypatch):
    from dualform.query import on_ray

    monkeypatch.setattr(on_ray, "TASK_BYTES", 1 << 60)
    with pytest.raises(errors.QuestionError, match="no machine of the cluster offers"):
        on_ray.OnRay()


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss")
def test_nobody_else_can_connect(runner):
    listening = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    session = ray._private.worker._global_node.get_session_dir_path()
    table = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    own = {line.split()[0] for line in table.splitlines() if session in line} | {str(os.getpid())}
    addresses = [
        line.split()[3] for line in listening.splitlines() if any(f"pid={process}," in line for process in own)
    ]
    assert len(addresses) > 2
    here = ("127.0.0.1:", "[::1]:", "[::ffff:127.0.0.1]:")
    assert all(address.startswith(here) for address in addresses), addresses
