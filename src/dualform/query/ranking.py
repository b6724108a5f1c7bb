"""Which scores are the best, exactly: ties go to the lower slot number."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dualform.native.highest import highest

FEW = 4
"""Up to this many times k, scores are sorted as they are; of more, the k highest are selected first."""
Order = Literal["highest", "lowest", "absolute"]


def rank_keys(scores: Tensor, order: Order) -> Tensor:
    """Return numbers of which the highest belong to the best scores."""
    if order == "absolute":
        return scores.abs()
    if order == "lowest":
        return -scores
    return scores


class Ranking(NamedTuple):
    """The best slots of each query, best first: numbers and scores, both (queries, k)."""

    slots: Tensor
    scores: Tensor

    @staticmethod
    def empty(queries: int, dtype: torch.dtype) -> Ranking:
        """Return a ranking without slots."""
        return Ranking(torch.zeros(queries, 0, dtype=torch.int64), torch.zeros(queries, 0, dtype=dtype))

    def best(self, k: int, order: Order) -> Ranking:
        """Return the k best. Of equal scores, the one with the lower slot number is better."""
        by_slot = self.slots.sort(dim=1).indices
        keys = rank_keys(self.scores, order).gather(1, by_slot)
        by_key = keys.sort(dim=1, descending=True, stable=True).indices[:, :k]
        places = by_slot.gather(1, by_key)
        return Ranking(self.slots.gather(1, places), self.scores.gather(1, places))


def merged(one: Ranking, other: Ranking, k: int, order: Order) -> Ranking:
    """Return the k best of two rankings of at most k slots each."""
    if not one.slots.shape[1]:
        return other
    return side_by_side([one, other]).best(k, order)


def side_by_side(rankings: list[Ranking]) -> Ranking:
    """Join rankings of the same queries."""
    slots = torch.cat([ranking.slots for ranking in rankings], 1)
    scores = torch.cat([ranking.scores for ranking in rankings], 1)
    return Ranking(slots, scores)


def stacked(rankings: list[Ranking], dtype: torch.dtype) -> Ranking:
    """Join rankings of different queries, one below the other."""
    if not rankings:
        return Ranking.empty(0, dtype)
    slots = torch.cat([ranking.slots for ranking in rankings])
    scores = torch.cat([ranking.scores for ranking in rankings])
    return Ranking(slots, scores)


def top_places(keys: Tensor, k: int, codes: Tensor | None = None, groups: int = 1) -> list[Tensor]:
    """Return where the k highest of each query's keys stand, best first, for each group: (queries, up to k) each.

    keys: (queries, n). codes: (n,) int32, the group of each column; None: all are one group.
    """
    found = highest(keys, codes, groups, k)
    if found is not None:
        return found
    if codes is None:
        return [_top_places(keys, k)]
    places = []
    for members in columns_by_group(codes, groups):
        best = _top_places(keys.index_select(1, members), k)
        places.append(members[best])
    return places


def columns_by_group(codes: Tensor, groups: int) -> list[Tensor]:
    """Return the places of each group's members, ascending."""
    order = torch.sort(codes, stable=True).indices
    counts = torch.bincount(codes, minlength=groups).tolist()
    return list(torch.split(order, counts))


def _top_places(keys: Tensor, k: int) -> Tensor:
    if keys.shape[1] <= FEW * k:
        return keys.sort(dim=1, descending=True, stable=True).indices[:, :k]
    places = _highest_in_place(keys, k)
    order = keys.gather(1, places).sort(dim=1, descending=True, stable=True).indices
    return places.gather(1, order)


def _highest_in_place(keys: Tensor, k: int) -> Tensor:
    """Return the places of the k highest of each row, ascending: (rows, k). `topk` alone takes any of equal keys."""
    found = keys.topk(k, dim=1)
    lowest = found.values[:, -1:]
    places = found.indices.sort(dim=1).values
    rows_with_ties = torch.nonzero((keys >= lowest).sum(1) > k)[:, 0]
    for row in rows_with_ties.tolist():
        above = torch.nonzero(keys[row] > lowest[row])[:, 0]
        equal = torch.nonzero(keys[row] == lowest[row])[: k - len(above), 0]
        places[row] = torch.cat([above, equal]).sort().values
    return places
