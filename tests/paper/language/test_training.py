"""How a text is read and a language model is trained."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from dualform.errors import DataError
from dualform.language.model import build_model
from dualform.language.shape import Shape
from dualform_paper.language import training
from dualform_paper.language.reading import batch
from dualform_paper.language.settings import settings_for

SETTINGS = replace(
    settings_for("aesop", "small", preset="text"), embedding=4, state=6, batch=3, window=5, dropout=0.3, lr=0.02
)
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


def test_an_epoch_visits_each_window_once_and_starts_again_without_state():
    rows, window = 3, 5  # 40 tokens: 8 windows, 2 for each row, so positions 30 to 39 are never read
    first, second, third = (batch(IDS, step, rows, window, epochs=True) for step in range(3))
    assert first.positions[:, 0].tolist() == [0, 10, 20]
    assert second.positions[:, 0].tolist() == [5, 15, 25]
    visited = torch.cat([first.positions, second.positions]).flatten()
    assert sorted(visited.tolist()) == list(range(30))
    assert torch.equal(third.tokens, first.tokens)
    assert (first.starts_epoch, second.starts_epoch, third.starts_epoch) == (True, False, True)
    for read in (first, second):
        assert read.tokens.tolist() == IDS[read.positions].tolist()
        assert read.following.tolist() == IDS[read.positions + 1].tolist()
    with pytest.raises(DataError, match="has 40 tokens, less than one window of 5 for each of 9 rows"):
        batch(IDS, 0, 9, window, epochs=True)


def states_that_steps_begin_with(settings, steps):
    """(steps, rows): the size of each row's hidden state when a step begins."""
    model = training.initial_model(settings, 7)
    optimizer = training.adam(model, settings)
    state = (torch.ones(1, 3, 6), torch.ones(1, 3, 6))
    sizes = []
    handle = model.lstm.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[1][0].abs().sum((0, 2))))
    for step in range(steps):
        read = training.batch_of(IDS, step, settings)
        training.train_step(model, optimizer, read, state, step, settings)
    handle.remove()
    return torch.stack(sizes)


def test_rows_drop_their_state_each_by_itself_or_all_at_once():
    alone = states_that_steps_begin_with(replace(SETTINGS, forget=0.5), 20) > 0
    assert any(0 < row.sum() < 3 for row in alone)
    together = states_that_steps_begin_with(replace(SETTINGS, forget=0.5, forget_together=True), 20) > 0
    assert {int(row.sum()) for row in together} == {0, 3}


def test_the_state_is_dropped_where_an_epoch_starts():
    kept = states_that_steps_begin_with(replace(SETTINGS, forget=0.0, epochs=True), 6) > 0
    assert kept.all(1).tolist() == [False, True] * 3
    assert states_that_steps_begin_with(replace(SETTINGS, forget=0.0), 6).gt(0).all()


def trained(steps, **options):
    model = training.initial_model(SETTINGS, 7)
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
    model = build_model(Shape(7, 4, 6, dropout=0.5, between=3), 1)
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
