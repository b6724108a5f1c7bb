"""The attention of vectors to every position of the training text."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import dualform
from dualform.paper.language.lexical import Scores
from dualform.paper.language.rankings import Places


class Positions:
    """key · vector for the positions that a column names, in the mean over their visits.

    The paper sums over visits. Where all have equally many the ranking is the same; else sums would put those first that the last,
    unfinished epoch has visited once more.
    """

    def __init__(self, folder: Path, layer: str, column: str, count: int):
        """count: how many positions there are."""
        self._dual, self._layer, self._column, self._count = dualform.open(folder), layer, column, count

    @cached_property
    def visits(self) -> Places:
        """(positions,)"""
        found = np.zeros(self._count, dtype=np.int64)
        width = next(one["d_in"] for one in self._dual.info()["layers"] if one["name"] == self._layer)
        seen = self._dual.attend({self._layer: torch.zeros(1, width)})[self._layer].top(self._count, by=self._column)
        found[seen[self._column].to_numpy()] = seen["visits"].to_numpy()
        return found

    def __call__(self, vectors: Tensor) -> Scores:
        """vectors (n, d_in) → (n, positions); 0 where a position was never visited."""
        totals = self._dual.attend({self._layer: vectors})[self._layer].total(self._column)
        scores = np.zeros((len(vectors), self._count))
        scores[totals["query"].to_numpy(), totals[self._column].to_numpy()] = totals["total"].to_numpy()
        return scores / np.maximum(self.visits, 1)
