"""The linear datamodeling score: do summed scores of the kept samples put subsets in the order that retraining does?

For each test example, Spearman's correlation over the subsets between Σ scores of the samples kept and the outcome of training on
them; the mean over the test examples (Park et al. 2023, TRAK).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from dualform.evaluate.ranks import correlation, ranks, spearman

DRAWS = 2000
"""Of the bootstrap."""


@dataclass(frozen=True)
class Interval:
    """A number, and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(value: float, draws: Tensor) -> Interval:
        """From the values that the bootstrap drew."""
        low, high = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
        return Interval(value, low, high)


def mean_interval(values: Tensor) -> Interval:
    """The mean of independent values (n,), redrawn DRAWS times."""
    counts = _counts(len(values), torch.Generator().manual_seed(0))
    return Interval.of(float(values.mean()), counts @ values.double() / len(values))


@dataclass(frozen=True)
class Lds:
    """The score of one view; `draws` are the same subsets and examples for every view, so that views can be compared."""

    by_example: Tensor
    """(examples,)"""
    draws: Tensor
    """(DRAWS,)"""

    @property
    def interval(self) -> Interval:
        """The mean over the examples."""
        return Interval.of(float(self.by_example.mean()), self.draws)

    def ratio(self, other: Lds) -> Interval:
        """How many times the other's score it has."""
        return Interval.of(float(self.by_example.mean() / other.by_example.mean()), self.draws / other.draws)


@dataclass(frozen=True)
class Truth:
    """What training on each subset gave."""

    kept: Tensor
    """(subsets, samples) bool"""
    outcomes: Tensor
    """(repeats, subsets, examples)"""

    def lds(self, scores: Tensor) -> Lds:
        """How well scores (examples, samples), positive for what supports, foretell the outcomes."""
        foretold = ranks(scores.double() @ self.kept.double().T)
        found = ranks(self.outcomes.mean(0).T)
        return Lds(correlation(foretold, found), _bootstrap(foretold, found))

    def ceiling(self) -> float | None:
        """The score that the true expected outcome would have: retraining noise bounds every method. None: no repetitions.

        From the correlation r of two repetitions: the mean of n correlates with the truth by √(n·r / (1 + (n − 1)·r)). That is
        the formula for normal variables, applied to ranks: an estimate.
        """
        count = len(self.outcomes)
        if count < 2:
            return None
        by_example = self.outcomes.transpose(1, 2)
        pairs = torch.stack([spearman(by_example[i], by_example[j]) for i, j in combinations(range(count), 2)])
        one = pairs.mean(0).clamp(min=0)
        return float((count * one / (1 + (count - 1) * one)).sqrt().mean())


def _bootstrap(a: Tensor, b: Tensor) -> Tensor:
    """The mean correlation of rows (examples, subsets) for redrawn examples and subsets, (DRAWS,).

    Ranks stay those among all subsets, so that a draw is a few products with the counts of what was drawn.
    """
    examples, subsets = a.shape
    generator = torch.Generator().manual_seed(0)
    of_subsets = _counts(subsets, generator)
    of_examples = _counts(examples, generator)

    def mean(values: Tensor) -> Tensor:
        return of_subsets @ values.T / subsets

    mean_a, mean_b = mean(a), mean(b)
    spread = (mean(a * a) - mean_a**2).clamp(min=0) * (mean(b * b) - mean_b**2).clamp(min=0)
    by_example = torch.where(spread > 0, (mean(a * b) - mean_a * mean_b) / spread.sqrt().clamp(min=1e-12), 0.0)
    return (by_example * of_examples).sum(1) / examples


def _counts(size: int, generator: torch.Generator) -> Tensor:
    """How often each of `size` things is drawn, if so many are drawn with replacement: (DRAWS, size)."""
    drawn = torch.randint(size, (DRAWS, size), generator=generator)
    return torch.zeros(DRAWS, size, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(DRAWS, size, dtype=torch.float64)
    )
