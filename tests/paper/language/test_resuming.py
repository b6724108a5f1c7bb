"""A training that is killed at any moment and started again ends like one that ran without a break, bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import story as stories
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dualform
from dualform.errors import QuestionError, RecordingError
from dualform.record.recorder import Recorder
from dualform.store import writer
from dualform_paper.language import checkpoints, recording
from dualform_paper.language.recording import train

RELEASED = replace(stories.RELEASED, steps=13)
ALL = {
    "released": RELEASED,
    "text": replace(stories.SETTINGS, steps=13, dropout=0.2, output_dropout=0.2, predicted=0.5),
}
EVERY = 5
POINTS = 3
"""Of the learning curve: more than a step lies between two of them, so that losses must survive a kill, too."""


@pytest.fixture(autouse=True)
def few_points(monkeypatch):
    monkeypatch.setattr(recording, "CURVE_POINTS", POINTS)


def measure(folder):
    """A number that depends on all totals."""
    return float(dualform.open(folder).store.totals()["0.0.keys"].double().abs().sum())


def run(story, folder, preset, keep="totals", **options):
    measured = measure if keep == "totals" else None
    return train(story, ALL[preset], folder, keep=keep, checkpoint_every=EVERY, measure=measured, **options)


def recorded(folder):
    """All tensors of a recording, by name."""
    dual = dualform.open(folder)
    if dual.store.manifest.keep == "totals":
        totals = dual.store.totals()
        groups = torch.tensor(dual.store.groups(0)["text_position"].to_list())
        return {name: totals[name] for name in totals} | {"groups": groups}
    return {
        "keys": torch.as_tensor(dual.layer("lstm").keys),
        "errors": torch.cat([chunk.errors(torch.float32) for chunk in dual.store.chunks("lstm")]),
        "positions": torch.tensor(dual.rows["text_position"].explode().to_list()),
    }


def course(trained):
    """The course of a training without times and sizes of files."""
    plain = json.loads(json.dumps(asdict(trained)))
    return {name: value for name, value in plain.items() if name not in ("seconds", "processor", "nbytes")}


def assert_same(folder, trained, expected_folder, expected):
    assert course(trained) == course(expected)
    ours, theirs = (
        load_file(checkpoints.by_step(one)[trained.steps]) | recorded(one) for one in (folder, expected_folder)
    )
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different
    assert list(checkpoints.by_step(folder)) == [trained.steps]


@pytest.mark.parametrize(("keep", "preset"), [("totals", "released"), ("totals", "text"), ("slots", "released")])
def test_a_kill_at_any_moment_changes_nothing(tmp_path, story, monkeypatch, keep, preset):
    """A copy of the folder at some moment is what a kill leaves behind then."""
    whole, left = tmp_path / "whole", []

    def leave(moment):
        if (whole / "manifest.json").exists():
            left.append(shutil.copytree(whole, tmp_path / f"{len(left)}-{moment}"))

    def watch(patch, owner, name):
        original = getattr(owner, name)

        def call(*given, **named):
            leave(f"before-{name}")
            found = original(*given, **named)
            leave(f"after-{name}")
            return found

        patch.setattr(owner, name, call)

    with monkeypatch.context() as patch:
        watch(patch, checkpoints, "save")
        watch(patch, checkpoints, "remove_all")
        watch(patch, Recorder, "seal")
        watch(patch, Recorder, "_close")
        watch(patch, writer._Background, "_with_snapshot")
        watch(patch, writer, "publish_manifest")
        _, expected = run(story, whole, preset, keep, progress=lambda what, done, total: leave(f"{what}-{done}"))
    assert len(left) > 40
    for folder in left:
        _, trained = run(story, folder, preset, keep)
        assert_same(folder, trained, whole, expected)


CHILD = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads({threads})
from pathlib import Path
from test_resuming import POINTS, recording, run
from dualform.language.text import load_text
recording.CURVE_POINTS = POINTS
story = load_text(Path({text!r}))
run(story, Path({folder!r}), "released", progress=lambda what, done, total: print(done, flush=True))
"""


def test_a_killed_process_goes_on(tmp_path, story):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _, expected = run(story, whole, "released")
    text = tmp_path / "story.txt"
    text.write_text(story.decode([*story.train.ids.tolist(), *story.test.ids.tolist()]), encoding="utf-8")
    code = CHILD.format(
        tests=str(Path(__file__).parent), threads=torch.get_num_threads(), text=str(text), folder=str(parts)
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if int(line) == 12:
                os.kill(child.pid, signal.SIGKILL)
                break
    assert child.returncode == -signal.SIGKILL
    assert max(checkpoints.by_step(parts)) == 10
    done = []
    _, trained = run(story, parts, "released", progress=lambda what, steps, total: done.append((what, steps)))
    assert ("training", 10) not in done
    assert ("training", 11) in done
    assert_same(parts, trained, whole, expected)


class Interruption:
    """Stops a training at the end of a step."""

    def __init__(self, step):
        self.step = step

    def __call__(self, what, done, total):
        if (what, done) == ("training", self.step):
            raise KeyboardInterrupt


@pytest.mark.parametrize("keep", ["totals", "slots"])
def test_an_interrupted_training_goes_on(tmp_path, story, keep):
    _, expected = run(story, tmp_path / "whole", "released", keep)
    for step in (3, 7, 8, 12):
        with pytest.raises(KeyboardInterrupt):
            run(story, tmp_path / "parts", "released", keep, progress=Interruption(step))
    _, trained = run(story, tmp_path / "parts", "released", keep)
    assert_same(tmp_path / "parts", trained, tmp_path / "whole", expected)


def test_a_finished_training_can_be_prolonged(tmp_path, story):
    whole, _ = run(story, tmp_path / "whole", "released")
    train(story, replace(RELEASED, steps=7), tmp_path / "parts")
    parts, trained = run(story, tmp_path / "parts", "released")
    assert trained.steps == 13
    for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_result_that_was_half_written_is_written_again(tmp_path, story):
    _, expected = run(story, tmp_path / "run", "released")
    path = tmp_path / "run" / "trained.json"
    (tmp_path / "run" / ".trained.json").write_text(path.read_text()[:40])
    path.unlink()
    _, trained = run(story, tmp_path / "run", "released")
    assert course(trained) == course(expected)
    assert json.loads(path.read_text())["steps"] == 13


def test_files_are_replaced_only_when_they_are_whole(tmp_path):
    path = tmp_path / "trained.json"
    path.write_text("before")

    def fail(unfinished):
        unfinished.write_text("aft")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        checkpoints.replace_file(path, fail)
    assert path.read_text() == "before"
    checkpoints.replace_file(path, lambda unfinished: unfinished.write_text("after"))
    assert path.read_text() == "after"
    assert [one.name for one in tmp_path.iterdir()] == ["trained.json"]


def test_a_checkpoint_of_a_step_that_was_never_sealed_is_removed(tmp_path, story, monkeypatch):
    """Killed between its first checkpoint and the seal, a training begins anew; the old checkpoint must not meet the new recording."""
    folder = tmp_path / "run"
    _, expected = run(story, tmp_path / "whole", "released")
    run(story, folder, "released")
    (checkpoint,) = checkpoints.by_step(folder).values()
    shutil.copy(checkpoint, tmp_path / "stale")
    shutil.rmtree(folder)
    with pytest.raises(KeyboardInterrupt):
        train(story, RELEASED, folder, checkpoint_every=100, progress=Interruption(3))
    shutil.copy(tmp_path / "stale", folder / "checkpoint-5.safetensors")
    with pytest.raises(KeyboardInterrupt):
        train(story, RELEASED, folder, checkpoint_every=100, progress=Interruption(7))
    _, trained = run(story, folder, "released")
    assert_same(folder, trained, tmp_path / "whole", expected)


def test_a_recording_without_a_fitting_checkpoint_is_not_overwritten(tmp_path, story):
    run(story, tmp_path / "run", "released")
    (path,) = checkpoints.by_step(tmp_path / "run").values()
    path.rename(path.with_name("checkpoint-9.safetensors"))
    with pytest.raises(RecordingError, match="is sealed at step 13, and there are checkpoints of step 9 only"):
        run(story, tmp_path / "run", "released")


def test_another_training_is_not_overwritten(tmp_path, story):
    train(story, replace(RELEASED, steps=1), tmp_path / "run")
    for other in (replace(RELEASED, lr=0.5), stories.SETTINGS):
        with pytest.raises(RecordingError, match="holds another training"):
            train(story, other, tmp_path / "run")


def test_a_training_of_an_older_version_goes_on(tmp_path, story):
    """Settings that were added since had their default values then."""
    train(story, replace(stories.SETTINGS, steps=2), tmp_path / "run")
    path = tmp_path / "run" / "checkpoint-2.safetensors"
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["trained"])
    for added in ("predicted", "between", "preset", "output_dropout", "embedding_range", "epochs", "forget_together"):
        del about["settings"][added]
    for added in ("processor", "recent", "measured"):
        del about[added]
    save_file(load_file(path), path, {"trained": json.dumps(about)})
    _, found = train(story, replace(stories.SETTINGS, steps=3), tmp_path / "run")
    assert found.steps == 3
    assert found.settings == replace(stories.SETTINGS, steps=0).to_dict()


def test_slots_are_not_measured(tmp_path, story):
    with pytest.raises(QuestionError, match="measure= needs totals, and keep is 'slots'"):
        train(story, RELEASED, tmp_path / "run", keep="slots", measure=measure)


def test_steps_between_checkpoints_are_checked(tmp_path, story):
    with pytest.raises(QuestionError, match="checkpoint_every 0: expected at least 1 step"):
        train(story, RELEASED, tmp_path / "run", checkpoint_every=0)


def test_times_go_on_without_pauses(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(recording.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(recording.time, "process_time", lambda: now[0] / 2)
    watch = recording.Stopwatch(7.0, 3.0)
    now[0] += 10
    with watch.paused():
        now[0] += 1000
    now[0] += 2
    assert watch.here == (12.0, 6.0)
    assert watch.total == (19.0, 9.0)
