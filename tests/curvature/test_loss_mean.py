"""A loss's mean, undone: what a sample scores does not depend on its batch mates."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
import padded
import shared
from dualform.curvature.loss_mean import LossMean, divisors, table_of_calls
from dualform.errors import NotRecordedError, QuestionError
from dualform.record import curvature
from dualform.store.format import NO_ROW
from padded import IGNORED, LABELS, LENGTHS, one_hot
from reference import influence as reference

EXACT = {"rtol": 1e-9, "atol": 1e-12}


def calls(*lines):
    """Each line: backward, first_row, rows, layer, arrival, written; all of step 0."""
    return table_of_calls([(0, *line) for line in lines])


CASES = {
    "a classifier: its rows": ([(0, 0, 4, 0, 1, 4), (0, 0, 4, 1, 0, 4)], [4, 4]),
    "a language model: tokens with a loss": ([(0, 0, 4, 0, 1, 19), (0, 0, 4, 1, 0, 13)], [13, 13]),
    "a convolution under a head for each row": ([(0, 0, 4, 0, 1, 400), (0, 0, 4, 1, 0, 4)], [4, 4]),
    "the head is registered before the body": ([(0, 0, 4, 0, 0, 4), (0, 0, 4, 1, 1, 20)], [4, 4]),
    "without an order of arrival, the last layer": ([(0, 0, 4, 0, 0, 20), (0, 0, 4, 1, 0, 4)], [4, 4]),
    "the head is called for each token": ([(0, 0, 2, 0, 3, 6), *[(0, 0, 2, 1, n, 2) for n in range(3)]], [6] * 4),
    "each backward pass has its own mean": ([(0, 0, 4, 0, 0, 10), (1, 4, 2, 0, 0, 3)], [10, 3]),
    "so has each batch() call of a pass": ([(0, 0, 4, 0, 1, 10), (0, 4, 2, 0, 0, 3)], [10, 3]),
    "an empty batch has the row of the next one": ([(0, 0, 0, 0, 0, 0), (0, 0, 4, 0, 1, 3)], [1, 3]),
    "nothing had a loss": ([(0, 0, 4, 0, 0, 0)], [1]),
    "what serves all rows": ([(0, NO_ROW, 1, 0, 2, 9), (0, 0, 4, 1, 1, 12), (0, 0, 4, 2, 0, 7)], [7, 7, 7]),
    "what serves all rows of a pass without any": ([(0, NO_ROW, 1, 0, 0, 9), (1, 0, 4, 0, 0, 12)], [1, 12]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("case", CASES)
def test_by_what_error_signals_were_divided(case):
    lines, expected = CASES[case]
    given = calls(*lines)
    assert divisors(given, "tokens").tolist() == expected
    assert divisors(given, "none").tolist() == [1] * len(lines)


def test_a_mean_over_rows():
    lines = [(0, 0, 4, 0, 1, 19), (0, 0, 4, 1, 0, 13), (1, 4, 2, 0, 0, 5), (0, NO_ROW, 1, 2, 3, 9)]
    assert divisors(calls(*lines), "rows").tolist() == [4, 4, 2, 4]


def test_what_is_recorded(tmp_path):
    """The layer nearest to the loss is found by the order in which error signals arrive, whatever it is called."""

    class HeadFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = nn.Linear(5, 3), nn.Linear(4, 5)

        def forward(self, x):
            return self.head(self.body(x).tanh().mean(1))

    for precision in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = HeadFirst().to(precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = tmp_path / str(precision)
        with dualform.record(model, optimizer, path) as recorder:
            for rows in (2, 3, 3):
                recorder.batch(sample_id=range(rows))
                optimizer.zero_grad()
                F.cross_entropy(model(torch.randn(rows, 7, 4, dtype=precision)), torch.arange(rows) % 3).backward()
                optimizer.step()
        store = dualform.open(path).store
        loss_mean = LossMean(store)
        for name in ("head", "body"):
            found = np.concatenate([loss_mean.of_blocks(chunk) for chunk in store.chunks(name)])
            assert found.tolist() == [2, 3, 3]


# Scores

BATCHES = [torch.tensor(ids) for ids in ([0, 2], [0, 1, 5], [2, 4, 7, 3], [0, 5, 6, 1], [6, 2], [3, 1, 0])]
"""Sample 0 beside short and long ones; nothing is learnt, so it must score the same each time."""


WHOLE = [(0, len(BATCHES))]


def frozen(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


def scores_of(answer):
    """(queries, rows)"""
    return torch.cat([scores for _, scores in answer.scores()], 1).numpy()


def assert_samples_score_the_same(dual, scores):
    samples = dual.rows["sample_id"].to_numpy()
    for sample in np.unique(samples):
        mine = scores[:, samples == sample]
        np.testing.assert_allclose(mine, np.repeat(mine[:, :1], mine.shape[1], 1), **EXACT)


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    return padded.train(tmp_path_factory.mktemp("loss") / "run", optimizer=frozen, batches=BATCHES, chunk_bytes=900)


def target(output):
    return output[:, 0, 1]


@pytest.mark.parametrize("layers", [None, "0", "2"])
def test_a_sample_scores_the_same_beside_any_others(language, layers):
    answer = language.influence(one_hot(torch.arange(2)), target=target, segments=WHOLE, layers=layers, silent=True)
    assert_samples_score_the_same(language, scores_of(answer))


class Recurrent(nn.Module):
    """Tokens see those before them, and batches are as long as their longest sample."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(padded.TOKENS, 4)
        self.body, self.norm = nn.LSTM(4, 5, batch_first=True), nn.LayerNorm(5)
        self.head = nn.Linear(5, padded.TOKENS)

    def forward(self, tokens):
        return self.head(self.norm(self.body(self.words(tokens))[0]))


def test_batches_that_are_padded_to_different_lengths(tmp_path):
    torch.manual_seed(0)
    model = Recurrent().double()
    optimizer = frozen(model.parameters())
    settings = {"dtype": "float64", "batch_axis": {"words": 0, "norm": 0, "head": 0}}
    with dualform.record(model, optimizer, tmp_path / "run", **settings) as recorder:
        for ids in BATCHES:
            longest = int(LENGTHS[ids].max())
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            logits, labels = model(padded.TEXT[ids, :longest]), LABELS[ids, :longest]
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    answer = dual.influence(padded.TEXT[:2], target=target, segments=WHOLE, silent=True)
    scores = scores_of(answer)
    assert_samples_score_the_same(dual, scores)
    assert scores.any()


def test_the_scores_are_those_of_plain_gradients(language):
    """Each token's gradient by autograd, dense matrices: no batch is involved."""
    queries = one_hot(torch.arange(2))
    answer = language.influence(queries, target=target, segments=WHOLE, silent=True)
    rows = torch.cat(BATCHES)
    tokens = [(one_hot(rows[n : n + 1])[0], LABELS[rows[n]]) for n in range(len(rows))]
    expected = reference.whitened_tokens(language.model(), tokens, queries, target, ["0", "2"], IGNORED)
    np.testing.assert_allclose(scores_of(answer), expected.sum(0), **EXACT)
    for place, layer in enumerate(("0", "2")):
        totals = answer[layer].total("sample_id")["total"].to_numpy().reshape(2, -1)
        sums = [expected[place][:, (rows == sample).numpy()].sum(1) for sample in sorted(set(rows.tolist()))]
        np.testing.assert_allclose(totals, np.stack(sums, 1), **EXACT)


def test_curvature_that_was_counted_while_recording(tmp_path, monkeypatch):
    monkeypatch.setattr(curvature, "EVERY", 1)
    dual = padded.train(tmp_path / "run", optimizer=frozen, batches=BATCHES, curvature=True)
    answer = dual.influence(one_hot(torch.arange(2)), target=target, segments=WHOLE, silent=True)
    scores = scores_of(answer)
    assert_samples_score_the_same(dual, scores)
    monkeypatch.setattr("dualform.query.influence.factors.recorded_factors", lambda *given, **named: None)
    for path in (tmp_path / "run").glob("curvature-*"):
        path.unlink()
    again = dual.reopened().influence(one_hot(torch.arange(2)), target=target, segments=WHOLE, silent=True)
    np.testing.assert_allclose(scores, scores_of(again), rtol=1e-4, atol=1e-6)  # snapshots hold float32


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """One label for each row; some rows have none."""
    model = padded.network()
    optimizer = frozen(model.parameters())
    path = tmp_path_factory.mktemp("loss") / "classifier"
    with dualform.record(model, optimizer, path, dtype="float64") as recorder:
        for ids in BATCHES:
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.cross_entropy(model(one_hot(ids)[:, 0]), LABELS[ids, 0], ignore_index=IGNORED).backward()
            optimizer.step()
    return dualform.open(path, model)


@pytest.mark.parametrize("method", ["whitened", "kernel", "sketch"])
def test_rows_whose_label_is_ignored(classifier, method):
    queries = one_hot(torch.arange(2))[:, 0]
    answer = classifier.influence(queries, target=1, segments=WHOLE, method=method, silent=True)
    scores = scores_of(answer)
    assert_samples_score_the_same(classifier, scores)
    without = classifier.rows["sample_id"].to_numpy() == 6
    assert (LENGTHS == 0).nonzero().item() == 6
    assert not scores[:, without].any()
    assert (scores[:, ~without] != 0).all()


def test_the_best_rows_are_found_by_bounds(classifier):
    answer = classifier.influence(one_hot(torch.arange(2))[:, 0], target=1, segments=WHOLE)
    assert answer._scorer.index() is not None
    scores = scores_of(answer)
    numbers = np.concatenate([rows.numpy() for rows, _ in answer.scores()])
    order = np.argsort(-scores, axis=1, kind="stable")[:, :5]
    assert answer.best(5).slots.tolist() == numbers[order].tolist()


# What the loss is a mean over


@pytest.mark.parametrize("mean", ["none", "rows"])
def test_other_means(tmp_path, language, mean):
    model = padded.network()
    optimizer = frozen(model.parameters())
    with dualform.record(model, optimizer, tmp_path / "run", dtype="float64", chunk_bytes=900) as recorder:
        for ids in BATCHES:
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            losses = F.cross_entropy(model(one_hot(ids)).transpose(1, 2), LABELS[ids], reduction="none")
            (losses.sum() / (len(ids) if mean == "rows" else 1)).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    queries = one_hot(torch.arange(2))
    found = dual.influence(queries, target=target, segments=WHOLE, loss_mean=mean, silent=True)
    expected = language.influence(queries, target=target, segments=WHOLE, silent=True)
    np.testing.assert_allclose(scores_of(found), scores_of(expected), **EXACT)
    wrong = dual.influence(queries, target=target, segments=WHOLE, silent=True)
    with pytest.raises(AssertionError):
        assert_samples_score_the_same(dual, scores_of(wrong))


def test_an_unknown_mean(language):
    with pytest.raises(QuestionError, match="loss_mean='words': expected one of 'tokens', 'rows', 'none'"):
        language.influence(one_hot(torch.arange(2)), target=target, loss_mean="words")


def test_a_mean_that_cannot_be_is_told(classifier):
    with pytest.raises(NotRecordedError, match="loss_mean="):
        classifier.influence(
            one_hot(torch.arange(1))[:, 0], target=1, segments=WHOLE, method="kernel", loss_mean="rows"
        )


def test_what_serves_all_rows_has_the_mean_of_its_pass(tmp_path):
    dual = shared.train(tmp_path / "run")
    loss_mean = LossMean(dual.store)
    for layer in dual.layers:
        for chunk in dual.store.chunks(layer):
            assert loss_mean.of_blocks(chunk).tolist() == [shared.ROWS] * len(chunk.blocks)
