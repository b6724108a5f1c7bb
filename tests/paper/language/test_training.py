"""How a text is read and a language model is trained."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from dualform.errors import QuestionError
from dualform.paper.language import training
from dualform.paper.language.model import built
from dualform.paper.language.reading import batch
from dualform.paper.language.settings import settings_for
from dualform.paper.language.shape import Shape

SETTINGS = replace(settings_for("aesop", "small"), embedding=4, state=6, batch=3, window=5, dropout=0.3, lr=0.02)
IDS = np.random.default_rng(0).integers(0, 7, 40).astype(np.int32)


def test_rows_read_on_and_every_position_is_visited_equally_often():
    visits = np.zeros(len(IDS), int)
    before = None
    for step in range(8):
        read = batch(IDS, step, 3, 5)
        assert read.tokens.tolist() == IDS[read.positions].tolist()
        assert read.following.tolist() == IDS[(read.positions + 1) % len(IDS)].tolist()
        if before is not None:
            assert read.tokens[:, 0].tolist() == before.following[:, -1].tolist()
        before = read
        np.add.at(visits, read.positions.numpy().ravel(), 1)
    assert visits.sum() == 8 * 15
    assert visits.max() - visits.min() <= 1


def trained(steps, **options):
    model = built(SETTINGS.shape(7), 0)
    optimizer, state, losses = training.adam(model, SETTINGS), training.start(model, 3), []
    for step in range(steps):
        read = batch(IDS, step, SETTINGS.batch, SETTINGS.window)
        loss, state = training.train_step(model, optimizer, read, state, step, SETTINGS, **options)
        losses.append(loss)
    return model, losses


def test_in_pieces_or_at_once_it_is_the_same_training(monkeypatch):
    monkeypatch.setattr(training, "LOGITS", 1)
    pieces, whole = trained(4), trained(4, whole=True)
    assert pieces[1] == pytest.approx(whole[1], rel=1e-5)
    for ours, theirs in zip(pieces[0].parameters(), whole[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_training_learns_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    _, losses = trained(60)
    assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] == pytest.approx(math.log(7), rel=0.1)
    assert np.mean(losses[-10:]) < losses[0] - 0.1


def test_nats_of_a_text_beside_a_plain_loop(monkeypatch):
    monkeypatch.setattr(training, "LOGITS", 50)
    model = built(Shape(7, 4, 6, dropout=0.5, between=3), 1)
    text, length = torch.tensor(IDS.astype(int)), (len(IDS) - 1) // training.STREAMS
    total = 0.0
    model.eval()
    for stream in range(training.STREAMS):
        state = training.start(model, 1)
        for place in range(stream * length, (stream + 1) * length):
            logits, state = model(text[None, place : place + 1], state)
            total += float(cross_entropy(logits[0], text[place + 1 : place + 2]).detach())
    model.train()
    assert training.evaluate(model, IDS) == pytest.approx(total / (training.STREAMS * length), rel=1e-5)
    assert model.training
    assert math.isfinite(training.evaluate(model, IDS, most=2))


def test_bits_and_perplexity():
    assert training.bits(math.log(8)) == pytest.approx(3)
    assert training.perplexity(math.log(50)) == pytest.approx(50)


def test_presets():
    paper = settings_for("aesop").shape(74)
    assert (paper.embedding, paper.state, paper.key) == (64, 1024, 1088)
    assert settings_for("wikitext-2").shape(33_278).key == 400
    assert settings_for("wikitext-2", "small", steps=7, state=9, seed=3).to_dict()["state"] == 9
    with pytest.raises(QuestionError, match="there is no preset faust paper; expected one of aesop paper"):
        settings_for("faust")
    for share in (0.0, 1.5):
        with pytest.raises(QuestionError, match=f"predicted {share:g}: expected a share of the tokens"):
            settings_for("aesop", predicted=share)
    with pytest.raises(QuestionError, match="steps 0: expected at least 1"):
        settings_for("aesop", steps=0)
