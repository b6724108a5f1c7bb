"""Exceptions at any moment: the store ends with the last finished step, and nothing is left locked or half done."""

import gc
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import dualform
from dualform.errors import RecordingError, UnexplainedError, WriterError
from dualform.record import finished, recording
from dualform.record.curvature import OnlineCurvature
from dualform.record.edits import EditWatch
from dualform.record.steps import StepBuilder
from dualform.record.totals import OnlineTotals
from dualform.store import files
from dualform.totals.fold import Accumulated
from training import SAMPLES, network, samples, sgd

BENCH = Path(__file__).parents[2] / "bench"
INPUTS, LABELS = samples()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


class Loop:
    """A training loop: how many of its steps are finished, and after how many the weights were what."""

    def __init__(self, path, *, optimizer=sgd, **settings):
        self.path, self.model = path, network()
        made = optimizer(self.model)
        self.optimizers = made if isinstance(made, list) else [made]
        self.settings = {"dtype": "float64", **settings}
        self.finished = 0

    def record(self, **settings):
        return dualform.record(self.model, self.optimizers, self.path, **self.settings, **settings)

    def backward(self, recorder):
        recorder.batch(sample_id=range(SAMPLES), label=LABELS)
        self.model.zero_grad()
        F.cross_entropy(self.model(INPUTS), LABELS).backward()

    def train(self, recorder, steps=1):
        for _ in range(steps):
            self.backward(recorder)
            for optimizer in self.optimizers:
                optimizer.step()
            self.finished += 1

    @property
    def dual(self):
        return dualform.open(self.path, self.model)


def assert_whole(loop, steps, *, last_weights=True):
    """The store ends with a step, each update is there once, it verifies, and nobody holds it."""
    assert not [thread for thread in threading.enumerate() if thread.name == "dualform-writer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    dual = loop.dual
    assert dual.end_step == steps
    updates = dual.store.updates
    assert updates.height == updates.select("step", "parameter").unique().height
    assert updates["step"].unique().sort().to_list() == list(range(steps))
    assert max(snapshot.step for snapshot in dual.store.manifest.snapshots) <= steps
    assert (steps in dual.store.snapshot_steps()) == last_weights
    certificate = dual.verify()
    assert certificate.passed, str(certificate)
    assert ("projections" in certificate.compared_with) == (not last_weights)
    loop.record(overwrite=True).close()


def slow_disk(monkeypatch, seconds):
    write = files.write_pieces

    def slow(descriptor, pieces):
        time.sleep(seconds)
        return write(descriptor, pieces)

    monkeypatch.setattr(files, "write_pieces", slow)


def ctrl_c_after(seconds):
    """Send SIGINT to this thread, wherever it waits."""
    timer = threading.Timer(seconds, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    timer.start()


def raise_once(monkeypatch, owner, name, error, *, before=False, at=1):
    """The at-th call of a function raises an exception after its work is done, or before."""
    original, calls = getattr(owner, name), 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == at and before:
            raise error
        found = original(*args, **kwargs)
        if calls == at:
            raise error
        return found

    monkeypatch.setattr(owner, name, wrapped)


# Every line of dualform's own code


def test_a_sample_of_all_lines_in_all_scenarios():
    """bench/interrupts.py at a small scale: 40,000 interrupts in its longest form, about 70 here."""
    done = subprocess.run(
        [sys.executable, BENCH / "interrupts.py", "--part", "1/607"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("interrupts, ") == 24


# Ctrl-C and other exceptions, while steps are handed over


@pytest.mark.parametrize("settings", [{}, {"totals": ["label"]}], ids=["slots", "totals"])
def test_ctrl_c_while_the_training_waits_for_the_disk(tmp_path, monkeypatch, settings):
    slow_disk(monkeypatch, 0.02)
    monkeypatch.setattr(finished, "STRETCH_BYTES", 3000)
    loop = Loop(tmp_path / "run", chunk_bytes=4000, queue_bytes=4000, **settings)
    with pytest.raises(KeyboardInterrupt), loop.record() as recorder:
        ctrl_c_after(0.5)
        loop.train(recorder, 1000)
    assert_whole(loop, loop.finished)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("moment", ["a step is added", "a stretch is folded", "sums are changed"])
def test_totals_are_right_or_not_there(tmp_path, monkeypatch, moment, before, at):
    """On the way into totals, each step is counted once; half a sum is given up."""
    monkeypatch.setattr(finished, "STRETCH_BYTES", 6000)
    loop = Loop(tmp_path / "run", totals=["label"])
    owner, name = {
        "a step is added": (OnlineTotals, "add"),
        "a stretch is folded": (OnlineTotals, "fold"),
        "sums are changed": (Accumulated, "fold"),
    }[moment]
    raise_once(monkeypatch, owner, name, KeyboardInterrupt(), before=before, at=at)
    with pytest.raises(KeyboardInterrupt), loop.record() as recorder:
        loop.train(recorder, 8)
    kept = loop.dual.store.manifest.totals
    if kept is None:
        assert moment == "sums are changed"
        assert "totals are not kept" in loop.dual.info()["ended"]
    else:
        assert kept.step == loop.finished
        found = loop.dual.contributions(INPUTS[:1])["2"].total("label")
        dualform.build_totals(loop.path, "label")
        expected = loop.dual.contributions(INPUTS[:1])["2"].total("label")
        assert found.drop("total").equals(expected.drop("total"))
        torch.testing.assert_close(found["total"].to_torch(), expected["total"].to_torch(), rtol=0, atol=1e-12)
    assert_whole(loop, loop.finished)


def test_totals_that_are_too_large_leave_the_slots(tmp_path):
    loop = Loop(tmp_path / "run", totals=["sample_id"], totals_bytes=100)
    with pytest.raises(RecordingError, match="totals would take"), loop.record() as recorder:
        loop.train(recorder, 3)
    assert_whole(loop, 1)


def test_training_goes_on_without_totals_that_an_exception_has_spoiled(tmp_path, monkeypatch):
    monkeypatch.setattr(finished, "STRETCH_BYTES", 1)
    loop = Loop(tmp_path / "run", totals=["label"])
    raise_once(monkeypatch, Accumulated, "fold", KeyboardInterrupt())
    with loop.record() as recorder:
        loop.train(recorder, 1)
        with pytest.raises(KeyboardInterrupt):
            loop.train(recorder, 1)
        with pytest.warns(UserWarning, match=r"totals .* cannot be carried on.*build_totals"):
            loop.train(recorder, 3)
    assert loop.dual.store.manifest.totals is None
    assert_whole(loop, loop.finished)


@pytest.mark.parametrize("keep", ["slots", "totals"])
def test_an_exception_before_the_first_step_leaves_a_store_that_opens(tmp_path, keep):
    loop = Loop(tmp_path / "run", totals=["label"], keep=keep)
    with pytest.raises(KeyboardInterrupt), loop.record() as recorder:
        loop.backward(recorder)
        raise KeyboardInterrupt
    assert loop.dual.end_step == 0
    with loop.record(resume=True) as recorder:
        loop.train(recorder, 2)
    assert loop.dual.verify().passed


def test_totals_that_are_being_written_are_not_changed(tmp_path, monkeypatch):
    """They are not copied for the writer, so whoever was interrupted in seal() waits before the next sum."""
    slow_disk(monkeypatch, 0.05)
    monkeypatch.setattr(finished, "STRETCH_BYTES", 1)
    loop = Loop(tmp_path / "run", totals=["label"])
    with loop.record() as recorder:
        loop.train(recorder, 2)
        with pytest.raises(KeyboardInterrupt):
            ctrl_c_after(0.02)
            recorder.seal()
        loop.train(recorder, 3)
        assert recorder.seal() == 5
    assert loop.dual.store.manifest.totals.step == 5
    assert_whole(loop, 5)


# While an optimizer updates the weights


def test_ctrl_c_waits_until_the_step_is_finished(tmp_path):
    loop = Loop(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), loop.record() as recorder:
        loop.train(recorder, 2)
        # After the recorder's own hook and before the update
        loop.optimizers[0].register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        loop.train(recorder, 1)
    assert loop.finished == 2  # optimizer.step() raised it, after it had done its work
    assert_whole(loop, 3)


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    loop = Loop(tmp_path / "run")
    came = []

    def interrupt_twice(*_):
        signal.raise_signal(signal.SIGINT)
        came.append("once")
        signal.raise_signal(signal.SIGINT)
        came.append("twice")

    with pytest.raises(KeyboardInterrupt), loop.record() as recorder:
        loop.train(recorder, 2)
        loop.optimizers[0].register_step_pre_hook(interrupt_twice)
        loop.train(recorder, 1)
    assert came == ["once"]
    assert_whole(loop, 2)


def fail_half_way(monkeypatch, kind):
    """From now on, an optimizer updates its first group and then raises an exception."""
    original = kind.step.__wrapped__ if hasattr(kind.step, "__wrapped__") else kind.step

    def half(self, closure=None):
        groups = self.param_groups
        self.param_groups = groups[:1]
        try:
            original(self, closure)
        finally:
            self.param_groups = groups
        raise RuntimeError("out of memory")

    monkeypatch.setattr(kind, "step", torch.optim.Optimizer.profile_hook_step(half))


def in_two_groups(model):
    return torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1, momentum=0.9)


def test_weights_that_were_updated_by_half_are_not_stored(tmp_path, monkeypatch):
    loop = Loop(tmp_path / "run", optimizer=in_two_groups)
    with pytest.raises(RuntimeError, match="out of memory"), loop.record() as recorder:
        loop.train(recorder, 3)
        fail_half_way(monkeypatch, torch.optim.SGD)
        loop.train(recorder, 1)
    monkeypatch.undo()
    assert "RuntimeError; the weights are not stored" in loop.dual.info()["ended"]
    assert_whole(loop, 3, last_weights=False)


def test_whoever_goes_on_with_them_is_told(tmp_path, monkeypatch):
    loop = Loop(tmp_path / "run", optimizer=in_two_groups)
    with (
        pytest.raises(UnexplainedError, match=r"'0\.weight' was changed since the last step"),
        loop.record() as recorder,
    ):
        loop.train(recorder, 3)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError):
            fail_half_way(patch, torch.optim.SGD)
            loop.train(recorder, 1)
        with pytest.raises(RecordingError, match=r"seal\(\): the last optimizer\.step\(\) did not return"):
            recorder.seal()
        loop.train(recorder, 1)
    assert_whole(loop, 3, last_weights=False)


def test_state_that_was_made_by_half_is_told(tmp_path):
    """Adam's first step: its averages are there, and the weights are what they were."""
    loop = Loop(tmp_path / "run", optimizer=adam)
    with pytest.raises(UnexplainedError, match="optimizer state replaced"), loop.record() as recorder:
        loop.backward(recorder)
        for parameter in loop.model.parameters():
            zeros = torch.zeros_like(parameter)
            loop.optimizers[0].state[parameter] = {"step": torch.tensor(1.0), "exp_avg": zeros, "exp_avg_sq": zeros}
        loop.optimizers[0].step()


def test_adam_without_its_state_is_told(tmp_path):
    loop = Loop(tmp_path / "run", optimizer=adam)
    with pytest.raises(UnexplainedError, match="optimizer state replaced"), loop.record() as recorder:
        loop.train(recorder, 2)
        loop.optimizers[0].state.clear()
        loop.train(recorder, 1)
    assert_whole(loop, 2, last_weights=False)


def test_an_update_that_never_began_can_be_followed_by_another(tmp_path):
    loop = Loop(tmp_path / "run")

    def fail(*_):
        raise RuntimeError("not now")

    with loop.record() as recorder:
        loop.train(recorder, 2)
        handle = loop.optimizers[0].register_step_pre_hook(fail)
        with pytest.raises(RuntimeError, match="not now"):
            loop.train(recorder, 1)
        handle.remove()
        assert recorder.step == 2
        assert recorder.seal() == 2
        loop.train(recorder, 2)
    assert_whole(loop, 4)


@pytest.mark.parametrize("moment", ["prepare", "consume", "remember_after"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_exceptions_between_the_lines_of_a_step(tmp_path, monkeypatch, moment, before, optimizer):
    """Before the optimizer has run, the step is not there; afterwards, it is."""
    loop = Loop(tmp_path / "run", optimizer=optimizer)
    raise_once(monkeypatch, StepBuilder, moment, KeyboardInterrupt(), before=before, at=3)
    with pytest.raises(KeyboardInterrupt), loop.record() as recorder:
        loop.train(recorder, 5)
    assert_whole(loop, 3 if moment == "remember_after" else 2)


@pytest.mark.parametrize("moment", ["prepare", "consume", "remember_after"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_training_goes_on_after_an_exception_in_a_step(tmp_path, monkeypatch, moment, before, optimizer):
    loop = Loop(tmp_path / "run", optimizer=optimizer)
    raise_once(monkeypatch, StepBuilder, moment, ValueError("from outside"), before=before, at=3)
    with loop.record() as recorder:
        loop.train(recorder, 2)
        with pytest.raises(ValueError, match="from outside"):
            loop.train(recorder, 1)
        loop.train(recorder, 3)
    assert_whole(loop, 6 if moment == "remember_after" else 5)


def two_optimizers(model):
    return [torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), adam(model[2])]


def test_of_two_optimizers_the_update_that_was_made_counts(tmp_path, monkeypatch):
    loop = Loop(tmp_path / "run", optimizer=two_optimizers)
    raise_once(monkeypatch, StepBuilder, "prepare", KeyboardInterrupt(), at=6)
    with pytest.raises(KeyboardInterrupt), loop.record() as recorder:
        loop.train(recorder, 5)
    assert loop.finished == 2
    assert loop.dual.store.updates.filter(step=2)["parameter"].to_list() == [0, 1]
    assert_whole(loop, 3)


def test_log_within_optimizer_step_belongs_to_the_step(tmp_path):
    loop = Loop(tmp_path / "run")
    recorder = None
    # A hook that runs before the recorder's own
    loop.optimizers[0].register_step_post_hook(lambda *_: recorder.log(norm=float(loop.finished)))
    recorder = loop.record()
    with recorder:
        loop.train(recorder, 3)
    assert loop.dual.log["norm"].to_list() == [0.0, 1.0, 2.0]
    loop.optimizers[0]._optimizer_step_post_hooks.clear()
    assert_whole(loop, 3)


def test_weights_edited_before_a_snapshot_is_due_are_not_stored_as_trained_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(finished, "SNAPSHOT_SHARE", 0)
    loop = Loop(tmp_path / "run", chunk_bytes=1)
    with pytest.raises(UnexplainedError), loop.record() as recorder:
        loop.train(recorder, 3)
        with torch.no_grad():
            loop.model[0].weight.mul_(1.5)
        loop.train(recorder, 1)
    assert_whole(loop, 3, last_weights=False)


# While the recorder closes


@pytest.mark.parametrize("error", [ValueError("mine"), MemoryError("too much"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    "moment", ["snapshot_of", "EditWatch.edits", "StepBuilder.retire", "Files.publish", "Writer.close"]
)
def test_an_exception_while_it_closes(tmp_path, monkeypatch, error, moment):
    """Whatever it is, the steps are stored and the folder is unlocked. An exception from outside waits until all is done."""
    owner, name = {
        "snapshot_of": (finished, "snapshot_of"),
        "EditWatch.edits": (EditWatch, "edits"),
        "StepBuilder.retire": (StepBuilder, "retire"),
        "Files.publish": (files, "flush_folder"),
        "Writer.close": (recording.Writer, "close"),
    }[moment]
    loop = Loop(tmp_path / "run")
    recorder = loop.record()
    loop.train(recorder, 3)
    raise_once(monkeypatch, owner, name, error, before=moment != "Writer.close")
    expected = WriterError if moment == "Files.publish" else type(error)
    with pytest.raises(expected):
        recorder.close()
    monkeypatch.undo()
    recorder.close()  # nothing is left to do
    if moment == "Files.publish":  # the disk failed, not the recorder
        loop.record(overwrite=True).close()
        return
    is_from_outside = isinstance(error, KeyboardInterrupt)
    # What fails before the weights are copied leaves none; steps and totals do not depend on it
    assert_whole(loop, 3, last_weights=is_from_outside or moment in ("StepBuilder.retire", "Writer.close"))


@pytest.mark.parametrize("owner", [Accumulated, OnlineCurvature], ids=["totals", "curvature"])
def test_sums_that_fail_while_it_closes_leave_the_slots(tmp_path, monkeypatch, owner):
    loop = Loop(tmp_path / "run", totals=["label"], curvature=True)
    recorder = loop.record()
    loop.train(recorder, 1)
    raise_once(monkeypatch, owner, "fold" if owner is Accumulated else "_count", MemoryError("too much"))
    with pytest.raises(MemoryError, match="too much"):
        recorder.close()
    assert loop.dual.info()["ended"] == "closed; totals are not kept"
    assert_whole(loop, 1)


def test_ctrl_c_twice_on_a_slow_disk(tmp_path, monkeypatch):
    slow_disk(monkeypatch, 0.05)
    loop = Loop(tmp_path / "run", totals=["label"], chunk_bytes=1000)
    put = recording.Recording._put_everything

    def interrupted(self, ended, warned):
        ctrl_c_after(0.1)
        return put(self, ended, warned)

    monkeypatch.setattr(recording.Recording, "_put_everything", interrupted)
    began = None
    with pytest.raises(KeyboardInterrupt), loop.record() as recorder:
        loop.train(recorder, 6)
        began = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - began > 0.1  # the second one came
    monkeypatch.undo()
    assert_whole(loop, 6)


def test_ctrl_c_again_and_again_leaves_at_once(tmp_path, monkeypatch):
    slow_disk(monkeypatch, 0.3)
    loop = Loop(tmp_path / "run", chunk_bytes=1000)
    recorder = loop.record()
    loop.train(recorder, 20)
    for seconds in (0.1, 0.2):
        ctrl_c_after(seconds)
    with pytest.raises(KeyboardInterrupt):
        recorder.close()
    monkeypatch.undo()
    assert loop.dual.end_step < 20, "it has waited for the disk"
    assert_whole(loop, loop.dual.end_step, last_weights=False)


def test_warnings_that_are_errors_come_after_everything_is_closed(tmp_path):
    loop = Loop(tmp_path / "run")
    recorder = loop.record()
    loop.train(recorder, 3)
    with torch.no_grad():
        loop.model[0].weight.mul_(1.5)
    with pytest.raises(UserWarning, match="changed after the last step"):  # as pytest treats warnings here
        recorder.close()
    assert_whole(loop, 3, last_weights=False)


# Recorders that are never closed


def test_a_recorder_that_is_dropped_closes_itself(tmp_path):
    loop = Loop(tmp_path / "run")
    recorder = loop.record()
    loop.train(recorder, 3)
    del recorder
    gc.collect()
    assert "dropped without being closed" in loop.dual.info()["ended"]
    assert not loop.model[0]._forward_hooks
    assert_whole(loop, 3)


def test_a_recorder_that_is_never_closed_ends_with_the_process(tmp_path):
    code = (
        "import sys, torch, dualform\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "recorder = dualform.record(model, optimizer, sys.argv[1])\n"
        "for _ in range(3):\n"
        "    recorder.batch(sample_id=range(4))\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(4, 2)).square().sum().backward()\n"
        "    optimizer.step()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True, timeout=120)
    dual = dualform.open(tmp_path / "run")
    assert dual.end_step == 3
    assert dual.verify().passed


@pytest.mark.parametrize("moment", ["Recording._attach", "Recorder.__init__", "Recorder.__enter__"])
def test_an_exception_while_a_recorder_is_made(tmp_path, monkeypatch, moment):
    kind, name = moment.split(".")
    loop = Loop(tmp_path / "run")
    owner = recording.Recording if kind == "Recording" else dualform.Recorder
    raise_once(monkeypatch, owner, name, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        with loop.record():
            pass
    monkeypatch.undo()
    gc.collect()
    assert not loop.model[0]._forward_hooks
    assert not loop.optimizers[0]._optimizer_step_pre_hooks
    assert_whole(loop, 0)


# Signals


def test_a_handler_of_the_users_own_is_called_after_the_step(tmp_path):
    loop, came = Loop(tmp_path / "run"), []
    previous = signal.signal(signal.SIGINT, lambda *_: came.append(loop.finished))
    try:
        with loop.record() as recorder:
            loop.optimizers[0].register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
            seen = []
            loop.optimizers[0].register_step_post_hook(lambda *_: seen.append(list(came)))
            loop.train(recorder, 1)
        assert came == [0]
        assert seen == [[0]]  # after the recorder's own hook
    finally:
        signal.signal(signal.SIGINT, previous)


def test_ctrl_c_comes_through_after_an_update_that_failed(tmp_path, monkeypatch):
    loop = Loop(tmp_path / "run")

    def fail(*_):
        raise RuntimeError("not now")

    with loop.record() as recorder:
        handle = loop.optimizers[0].register_step_pre_hook(fail)
        with pytest.raises(RuntimeError):
            loop.train(recorder, 1)
        handle.remove()
        with pytest.raises(KeyboardInterrupt):  # optimizer.step() is over, though the recorder was not told
            signal.raise_signal(signal.SIGINT)


def test_signals_that_are_ignored_stay_ignored(tmp_path):
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        loop = Loop(tmp_path / "run")
        with loop.record() as recorder:
            loop.train(recorder, 2)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_in_another_thread_no_handler_is_touched(tmp_path):
    loop, failed = Loop(tmp_path / "run"), []

    def train():
        try:
            with loop.record() as recorder:
                loop.train(recorder, 3)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert not failed
    assert_whole(loop, 3)


def test_two_recorders_of_one_model_hold_ctrl_c_back_together(tmp_path):
    one, other = Loop(tmp_path / "one"), Loop(tmp_path / "two")
    other.model, other.optimizers = one.model, one.optimizers
    with pytest.raises(KeyboardInterrupt), one.record() as first, other.record() as second:
        one.optimizers[0].register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        second.batch(sample_id=range(SAMPLES), label=LABELS)
        one.train(first, 1)
    one.optimizers[0]._optimizer_step_pre_hooks.clear()
    for loop in (one, other):
        assert_whole(loop, 1)
