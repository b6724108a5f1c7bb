"""Rows that cannot be among the best are passed over; the answer is that of the full scan."""

import polars as pl
import pytest
import torch

from dualform.query import foremost
from training import FEATURES, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("foremost") / "run", steps=40, chunk_bytes=4000)


@pytest.fixture
def influence(run, monkeypatch):
    monkeypatch.setattr(foremost, "ROWS", 7)
    asked = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return run.dual.influence(asked, segments=6)


def scanned(influence, k, where=None, absolute=False, lowest=False):
    """All scores are computed."""
    return influence._multiplied(k, "absolute" if absolute else "lowest" if lowest else "highest", where)


@pytest.mark.parametrize("k", [1, 3, 500])
@pytest.mark.parametrize("how", [{}, {"absolute": True}, {"lowest": True}, {"where": pl.col("label") == 1}])
def test_the_best_are_those_of_the_full_scan(influence, k, how):
    assert foremost.can_be_bounded(influence._scored, influence._layers)
    found, expected = influence.best(k, **how), scanned(influence, k, **how)
    # rows that are the same sample in the same step have the same score, but for rounding: compare scores, not names
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-9, atol=1e-9)
    assert (found.slots == expected.slots).float().mean() > 0.8


@pytest.mark.parametrize("damping", [0.01, 5.0])
def test_norms_that_were_kept_bound_other_dampings_too(run, damping):
    asked = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = run.dual.influence(asked, segments=6, damping=damping)
    torch.testing.assert_close(found.best(3).scores, scanned(found, 3).scores, rtol=1e-9, atol=1e-9)


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
    asked = torch.randn(2, FEATURES, dtype=torch.float64)
    sketch = run.dual.influence(asked, segments=2, method="sketch")
    assert not foremost.can_be_bounded(sketch._scored, sketch._layers)
    assert sketch.best(2).slots.shape == (2, 2)
