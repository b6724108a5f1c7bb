"""Rows that cannot be among the best are passed over; the answer is that of the full scan."""

import polars as pl
import pytest
import torch

from dualform.query import foremost
from training import FEATURES, train


@pytest.fixture(scope="module", params=["float64", "float16"])
def run(request, tmp_path_factory):
    precision = torch.float64 if request.param == "float64" else torch.float32
    path = tmp_path_factory.mktemp("foremost") / "run"
    return train(path, steps=40, chunk_bytes=4000, precision=precision, dtype=request.param)


def questions(run, count=4):
    drawn = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return drawn.to(next(run.model.parameters()).dtype)


@pytest.fixture
def influence(run, monkeypatch):
    monkeypatch.setattr(foremost, "ROWS", 7)
    return run.dual.influence(questions(run), segments=6)


def close(found, expected):
    bar = 1e-9 if found.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found, expected, rtol=bar, atol=bar)


def scanned(influence, k, where=None, absolute=False, lowest=False):
    """All scores are computed."""
    return influence._multiplied(k, "absolute" if absolute else "lowest" if lowest else "highest", where)


@pytest.mark.parametrize("k", [1, 3, 500])
@pytest.mark.parametrize("how", [{}, {"absolute": True}, {"lowest": True}, {"where": pl.col("label") == 1}])
def test_the_best_are_those_of_the_full_scan(influence, k, how):
    assert foremost.can_be_bounded(influence._scored, influence._layers)
    found, every = influence.best(k, **how), scanned(influence, 10_000, **how)
    # rows that are the same sample in the same step have the same score, but for rounding: either may come first
    close(found.scores, every.scores[:, :k])
    for rows, scores, all_rows, all_scores in zip(found.slots, found.scores, every.slots, every.scores, strict=True):
        assert len(rows.unique()) == len(rows)
        where = (all_rows == rows[:, None]).nonzero()
        assert where[:, 0].tolist() == list(range(len(rows)))  # each is a row of them all
        close(scores, all_scores[where[:, 1]])


@pytest.mark.parametrize("damping", [0.01, 5.0])
def test_norms_that_were_kept_bound_other_dampings_too(run, damping):
    found = run.dual.influence(questions(run), segments=6, damping=damping)
    close(found.best(3).scores, scanned(found, 3).scores)


def test_ties_go_to_the_lower_row(influence):
    found = influence.best(200)
    for rows, scores in zip(found.slots, found.scores, strict=True):
        for n in range(len(rows) - 1):
            assert scores[n] > scores[n + 1] or rows[n] < rows[n + 1]


def test_not_all_keys_are_read(influence, monkeypatch):
    read = []
    original = foremost._scores

    def counting(*args):
        found = original(*args)
        read.append((len(found[0]), args[3].end - args[3].begin))
        return found

    monkeypatch.setattr(foremost, "_scores", counting)
    influence.best(1)
    assert sum(n for n, _ in read) < sum(n for _, n in read)


def test_other_methods_and_layers_are_scanned(run):
    sketch = run.dual.influence(questions(run, 2), segments=2, method="sketch")
    assert not foremost.can_be_bounded(sketch._scored, sketch._layers)
    assert sketch.best(2).slots.shape == (2, 2)
