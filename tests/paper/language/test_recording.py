"""A recorded training of a language model: the same with a pause, and the same with any way to record."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from story import SETTINGS

import dualform
from dualform.errors import NotRecordedError, RecordingError, StoreDamagedError
from dualform.paper.language import beside, recording
from dualform.paper.language.checks import check
from dualform.paper.language.recording import train
from dualform.paper.language.ways import compare


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_training_goes_on_where_it_stopped(tmp_path, story, monkeypatch):
    whole, trained = train(story, SETTINGS, tmp_path / "whole")
    train(story, replace(SETTINGS, steps=7), tmp_path / "parts")
    monkeypatch.setattr(recording, "CHECKPOINT_SECONDS", 0.0)  # one after each step
    parts, again = train(story, SETTINGS, tmp_path / "parts")
    assert same(whole, parts)
    assert again.steps == trained.steps == 18
    assert again.test == trained.test
    assert [point for _, point in again.losses] == pytest.approx([point for _, point in trained.losses])
    ours, theirs = (dualform.open(tmp_path / name).store.totals() for name in ("whole", "parts"))
    assert torch.equal(ours["0.0.visits"], theirs["0.0.visits"])
    torch.testing.assert_close(ours["0.0.keys"], theirs["0.0.keys"])
    assert [path.name for path in (tmp_path / "parts").glob("checkpoint-*")] == ["checkpoint-18.safetensors"]


class Interruption:
    """Stops a training at the end of a step."""

    def __init__(self, step):
        self.step = step

    def __call__(self, what, done, total):
        if (what, done) == ("training", self.step):
            raise KeyboardInterrupt


@pytest.mark.parametrize("keep", ["totals", "slots"])
def test_an_interrupted_training_goes_on_from_its_checkpoint(tmp_path, story, monkeypatch, keep):
    settings = replace(SETTINGS, steps=12)
    whole, trained = train(story, settings, tmp_path / "whole", keep=keep)
    now = iter(range(1, 10**6))
    monkeypatch.setattr(recording, "CHECKPOINT_SECONDS", 12.0)  # ours are by the clock's readings: every few steps
    monkeypatch.setattr(recording.time, "perf_counter", lambda: next(now))
    for step in (5, 6, 10):
        with pytest.raises(KeyboardInterrupt):
            train(story, settings, tmp_path / "parts", keep=keep, progress=Interruption(step))
    parts, again = train(story, settings, tmp_path / "parts", keep=keep)
    assert again.steps == trained.steps == 12
    assert same(whole, parts)
    if keep == "totals":
        ours, theirs = (dualform.open(tmp_path / name).store.totals() for name in ("whole", "parts"))
        assert torch.equal(ours["0.0.visits"], theirs["0.0.visits"])


def test_what_is_done_is_not_done_again(tmp_path, story, monkeypatch):
    model, trained = train(story, replace(SETTINGS, steps=3), tmp_path / "run")
    monkeypatch.setattr(recording, "train_step", None)
    monkeypatch.setattr(recording, "evaluate", None)
    again, found = train(story, replace(SETTINGS, steps=3), tmp_path / "run")
    assert same(model, again)
    assert found.test == trained.test


def test_another_training_is_not_overwritten(tmp_path, story):
    train(story, replace(SETTINGS, steps=1), tmp_path / "run")
    with pytest.raises(RecordingError, match="holds another training"):
        train(story, replace(SETTINGS, lr=0.5), tmp_path / "run")


def test_a_training_of_an_older_version_goes_on(tmp_path, story):
    """Whose settings did not have all that there is now."""
    train(story, replace(SETTINGS, steps=2), tmp_path / "run")
    path = tmp_path / "run" / "checkpoint-2.safetensors"
    with safe_open(path, "pt") as file:
        trained = json.loads(file.metadata()["trained"])
    del trained["settings"]["predicted"], trained["settings"]["between"]
    save_file(load_file(path), path, {"trained": json.dumps(trained)})
    _, found = train(story, replace(SETTINGS, steps=3), tmp_path / "run")
    assert found.steps == 3
    assert found.settings == replace(SETTINGS, steps=0).to_dict()


def test_all_slots_stay_within_their_bound(tmp_path, story, monkeypatch):
    monkeypatch.setattr(recording, "BOUND", 3.5 * SETTINGS.slot_bytes)
    _, trained = train(story, SETTINGS, tmp_path / "run", keep="slots")
    assert trained.steps == 3
    slots = sum(
        chunk.files["slots.safetensors"].size for chunk in dualform.open(tmp_path / "run").store.manifest.chunks
    )
    assert 0 < slots - 3 * SETTINGS.slot_bytes < 2000  # header, blocks and gradients of the biases


def test_no_longer_than_this(tmp_path, story):
    _, trained = train(story, SETTINGS, tmp_path / "run", minutes=0)
    assert trained.steps == 1
    assert len(trained.curve) == 1


def test_the_loss_may_be_about_a_part_of_the_tokens_while_all_are_read(tmp_path, story):
    train(story, replace(SETTINGS, predicted=0.2, steps=2), tmp_path / "run")
    visits = dualform.open(tmp_path / "run").store.totals()["0.0.visits"]
    assert int(visits.sum()) == 2 * SETTINGS.tokens


def test_the_text_stands_beside_the_recording(runs, story, tmp_path):
    found = beside.read(runs / "totals")
    assert found.text.vocabulary == story.vocabulary
    assert found.text.unit == story.unit
    np.testing.assert_array_equal(found.text.train.ids, story.train.ids)
    np.testing.assert_array_equal(found.text.test.ids, story.test.ids)
    assert (found.layer, found.column, found.shape) == ("lstm", "text_position", SETTINGS.shape(len(story.vocabulary)))
    with pytest.raises(NotRecordedError, match=r"has no text.json: it does not say which text was trained on"):
        beside.read(tmp_path)
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(StoreDamagedError, match=r"text.json and text.safetensors cannot be read"):
        beside.read(tmp_path)


def test_titles_stand_beside_it_too(tmp_path, story):
    part = replace(story.train, starts=(0, 9), titles=("One", "Ænigma"))
    text = replace(story, train=part, valid=story.test)
    beside.write(tmp_path, beside.Beside(text, SETTINGS.shape(len(story.vocabulary))))
    found = beside.read(tmp_path).text
    assert [found.train.title(n) for n in (0, 8, 9)] == ["One", "One", "Ænigma"]
    np.testing.assert_array_equal(found.valid.ids, story.test.ids)


def test_two_ways_beside_none(tmp_path, story):
    costs = compare(story, SETTINGS, tmp_path, 3)
    key, gates = SETTINGS.embedding + SETTINGS.state, 4 * SETTINGS.state
    assert 2 * SETTINGS.tokens * (key + gates) < costs.slot_bytes < 4 * SETTINGS.tokens * (key + gates)
    assert 0 < costs.by["totals"].nbytes < 6 * 4 * SETTINGS.tokens * key
    assert costs.ratio("totals") > 0
    assert costs.steps_within_bound == int(20e9 / (costs.by["slots"].nbytes / 4))
    assert not (tmp_path / "slots").exists()


@pytest.mark.parametrize("unit", ["story", "words"])
def test_what_all_slots_prove(tmp_path, unit, request):
    text = request.getfixturevalue(unit)
    found = check(text, SETTINGS, tmp_path / "run")
    assert found.passed
    assert {row["parameter"] for row in found.certificate} >= {"lstm.weight_hh_l0", "decoder.weight"}
    assert max(row["gap"] for row in found.certificate) < 1e-5
    assert found.totals_gap < 1e-6
    parts = found.parts
    assert abs(parts["remainder"]) < 1e-5
    assert parts["initial"] + found.by_position == pytest.approx(parts["target"], abs=1e-5)
    assert found.up[0].contribution > found.down[0].contribution
    assert not (tmp_path / "run").exists()
