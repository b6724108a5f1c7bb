"""The best k of a stream, exactly: ties go to the lower slot number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

FEW = 4
"""Up to so many times k scores are sorted as they are; of more, the k highest are taken first."""
Way = Literal["highest", "lowest", "absolute"]


def ranked_by(scores: Tensor, way: Way) -> Tensor:
    """What decides: the highest of these are the best."""
    return scores.abs() if way == "absolute" else -scores if way == "lowest" else scores


class Best:
    """For each of n queries the k highest scores so far, with their numbers and values."""

    def __init__(self, n: int, k: int, dtype: torch.dtype):
        self._k = k
        self.scores = torch.zeros((n, 0), dtype=dtype)
        self.values = torch.zeros((n, 0), dtype=dtype)
        self.numbers = torch.zeros((n, 0), dtype=torch.int64)

    def first(self, count: int) -> Best:
        """The best of them."""
        return self.replaced(self.scores[:, :count], self.values[:, :count], self.numbers[:, :count])

    @staticmethod
    def join(parts: Sequence[Best], k: int, dtype: torch.dtype) -> Best:
        """Those of several, one below the other; all have seen the same slots."""
        found = Best(0, k, dtype)
        width = max((part.scores.shape[1] for part in parts), default=0)
        return found.replaced(
            *(
                torch.cat([getattr(part, name) for part in parts]) if parts else getattr(found, name).reshape(0, width)
                for name in ("scores", "values", "numbers")
            )
        )

    def replaced(self, scores: Tensor, values: Tensor, numbers: Tensor) -> Best:
        """Another one that holds these."""
        return Best.holding(self._k, scores, values, numbers)

    @classmethod
    def holding(cls, k: int, scores: Tensor, values: Tensor, numbers: Tensor) -> Best:
        """One that has seen these, (n, up to k) each, best first."""
        found = cls.__new__(cls)
        found._k, found.scores, found.values, found.numbers = k, scores, values, numbers
        return found

    def add(self, scores: Tensor, numbers: Tensor, values: Tensor) -> None:
        """scores (n, m) decide; values (n, m) go along; numbers (m,) ascend, above all that came before."""
        if not scores.shape[1]:
            return
        numbered = numbers.expand(scores.shape)
        if scores.shape[1] > FEW * self._k:
            places = _highest(scores, self._k)
            scores, values, numbered = scores.gather(1, places), values.gather(1, places), numbered.gather(1, places)
        both = torch.cat([self.scores, scores], dim=1)
        numbered = torch.cat([self.numbers, numbered], dim=1)
        valued = torch.cat([self.values, values], dim=1)
        order = both.sort(dim=1, descending=True, stable=True).indices[:, : self._k]
        self.scores, self.numbers = both.gather(1, order), numbered.gather(1, order)
        self.values = valued.gather(1, order)


def _highest(scores: Tensor, k: int) -> Tensor:
    """(n, m) → (n, k): the places of the k highest of each row, ascending; ties to the lower place."""
    found = scores.topk(k, dim=1)
    lowest = found.values[:, -1:]
    places = found.indices.sort(dim=1).values
    tied = torch.nonzero((scores >= lowest).sum(1) > k)[:, 0]
    for row in tied.tolist():
        above = torch.nonzero(scores[row] > lowest[row])[:, 0]
        equal = torch.nonzero(scores[row] == lowest[row])[: k - len(above), 0]
        places[row] = torch.cat([above, equal]).sort().values
    return places
