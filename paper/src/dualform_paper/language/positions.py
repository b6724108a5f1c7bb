"""The attention of vectors to every position of the training text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

import dualform
from dualform_paper.language.lexical import Scores


class Positions:
    """key · vector for the positions that a column names, in the mean over their visits.

    The paper sums over visits. Where all have equally many the ranking is the same; else sums would put those first that the last,
    unfinished epoch has visited once more.
    """

    def __init__(self, folder: Path, layer: str, column: str, count: int):
        """count: how many positions there are."""
        self._dual, self._layer, self._column, self._count = dualform.open(folder), layer, column, count

    def __call__(self, vectors: Tensor) -> Scores:
        """vectors (n, d_in) → (n, positions); 0 where a position was never visited."""
        sums = self._dual.attend({self._layer: vectors})[self._layer].sums(self._column)
        scores = np.zeros((len(vectors), self._count))
        scores[:, sums.values[self._column].to_numpy()] = (sums.totals / sums.visits.clamp(min=1)).numpy()
        return scores
