"""A recorded training of a language model: its bounds, what it writes beside the recording, and any way to record it."""

from dataclasses import replace

import pytest
import torch
from story import SETTINGS

import dualform
from dualform.language.description import read_description
from dualform_paper.language import recording
from dualform_paper.language.checks import check
from dualform_paper.language.recording import train
from dualform_paper.language.ways import compare


def test_what_is_done_is_not_done_again(tmp_path, story, monkeypatch):
    model, trained = train(story, replace(SETTINGS, steps=3), tmp_path / "run")
    monkeypatch.setattr(recording, "train_step", None)
    monkeypatch.setattr(recording, "evaluate", None)
    again, found = train(story, replace(SETTINGS, steps=3), tmp_path / "run")
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert found.test == trained.test


def test_all_slots_stay_within_their_bound(tmp_path, story, monkeypatch):
    monkeypatch.setattr(recording, "BOUND", 3.5 * SETTINGS.slot_bytes)
    _, trained = train(story, SETTINGS, tmp_path / "run", keep="slots")
    assert trained.steps == 3
    slots = sum(
        chunk.files["slots.safetensors"].size for chunk in dualform.open(tmp_path / "run").store.manifest.chunks
    )
    assert 0 < slots - 3 * SETTINGS.slot_bytes < 3000  # header with its label, blocks and gradients of the biases


def test_no_longer_than_this(tmp_path, story):
    _, trained = train(story, SETTINGS, tmp_path / "run", minutes=0)
    assert trained.steps == 1
    assert len(trained.curve) == 1


def test_the_loss_may_be_about_a_part_of_the_tokens_while_all_are_read(tmp_path, story):
    train(story, replace(SETTINGS, predicted=0.2, steps=2), tmp_path / "run")
    visits = dualform.open(tmp_path / "run").store.totals()["0.0.visits"]
    assert int(visits.sum()) == 2 * SETTINGS.tokens


def test_a_description_is_written_beside_the_recording(runs, story):
    description = read_description(runs / "totals")
    assert description.text.vocabulary == story.vocabulary
    assert description.shape == SETTINGS.shape(len(story.vocabulary))


def test_two_ways_beside_none(tmp_path, story):
    costs = compare(story, SETTINGS, tmp_path, 3)
    key, gates = SETTINGS.shape(0).key, 4 * SETTINGS.state
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
