"""Rows that cannot be among the best are passed over; the answer is that of the full scan."""

import polars as pl
import pytest
import torch

from dualform.query.influence import index as row_search
from full_scan import top_by_scan
from training import FEATURES, train


@pytest.fixture(scope="module", params=["float64", "float16"])
def run(request, tmp_path_factory):
    precision = torch.float64 if request.param == "float64" else torch.float32
    path = tmp_path_factory.mktemp("rows") / "run"
    return train(path, steps=40, chunk_bytes=4000, precision=precision, dtype=request.param)


def questions(run, count=4):
    drawn = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return drawn.to(next(run.model.parameters()).dtype)


@pytest.fixture
def influence(run, monkeypatch):
    monkeypatch.setattr(row_search, "MOST_ROWS", 7)
    return run.dual.influence(questions(run), segments=6)


def close(found, expected):
    bar = 1e-9 if found.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found, expected, rtol=bar, atol=bar)


@pytest.mark.parametrize("k", [1, 3, 500])
@pytest.mark.parametrize("how", [{}, {"absolute": True}, {"lowest": True}, {"where": pl.col("label") == 1}])
def test_the_best_are_those_of_the_full_scan(influence, k, how):
    assert influence._scorer.index() is not None
    found, every = influence.best(k, **how), top_by_scan(influence, 10_000, **how)
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
    close(found.best(3).scores, top_by_scan(found, 3).scores)


def test_ties_go_to_the_lower_row(influence):
    found = influence.best(200)
    for rows, scores in zip(found.slots, found.scores, strict=True):
        for n in range(len(rows) - 1):
            assert scores[n] > scores[n + 1] or rows[n] < rows[n + 1]


def test_not_all_keys_are_read(influence, monkeypatch):
    read = []
    score = row_search._BoundedWindow.score

    def counting(window, rows):
        read.append((len(rows), window._bound.shape[1]))
        return score(window, rows)

    monkeypatch.setattr(row_search._BoundedWindow, "score", counting)
    influence.best(1)
    assert sum(scored for scored, _ in read) < sum(rows for _, rows in read)


def test_other_methods_and_layers_are_scanned(run):
    sketch = run.dual.influence(questions(run, 2), segments=2, method="sketch")
    assert sketch._scorer.index() is None
    assert sketch.best(2).slots.shape == (2, 2)
