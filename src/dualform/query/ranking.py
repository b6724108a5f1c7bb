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
        slots = torch.zeros(queries, 0, dtype=torch.int64)
        scores = torch.zeros(queries, 0, dtype=dtype)
        return Ranking(slots, scores)

    def at(self, places: Tensor) -> Ranking:
        """Return some entries of each query, (queries, m)."""
        slots = self.slots.gather(1, places)
        scores = self.scores.gather(1, places)
        return Ranking(slots, scores)

    def best(self, k: int, order: Order) -> Ranking:
        """Return the k best. Of equal scores, the one with the lower slot number is better."""
        by_slot = self.at(self.slots.argsort(dim=1))
        keys = rank_keys(by_slot.scores, order)
        best = _best_first(keys)[:, :k]
        return by_slot.at(best)


def merged(one: Ranking, other: Ranking, k: int, order: Order) -> Ranking:
    """Return the k best of two rankings of at most k slots each."""
    if not one.slots.shape[1]:
        return other
    return side_by_side([one, other]).best(k, order)


def side_by_side(rankings: list[Ranking]) -> Ranking:
    """Join rankings of the same queries."""
    slots, scores = zip(*rankings, strict=True)
    return Ranking(torch.cat(slots, 1), torch.cat(scores, 1))


def stacked(rankings: list[Ranking], dtype: torch.dtype) -> Ranking:
    """Join rankings of different queries, one below the other."""
    if not rankings:
        return Ranking.empty(0, dtype)
    slots, scores = zip(*rankings, strict=True)
    return Ranking(torch.cat(slots), torch.cat(scores))


def stacked_by_group(blocks: list[list[Ranking]], groups: int, dtype: torch.dtype) -> list[Ranking]:
    """Join the rankings of each group. blocks: of different queries, a ranking for each group."""
    joined = []
    for group in range(groups):
        own = [block[group] for block in blocks]
        joined.append(stacked(own, dtype))
    return joined


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
        own_keys = keys.index_select(1, members)
        best = _top_places(own_keys, k)
        places.append(members[best])
    return places


def columns_by_group(codes: Tensor, groups: int) -> list[Tensor]:
    """Return the places of each group's members, ascending."""
    by_group = codes.argsort(stable=True)
    counts = torch.bincount(codes, minlength=groups)
    return list(torch.split(by_group, counts.tolist()))


def _top_places(keys: Tensor, k: int) -> Tensor:
    if keys.shape[1] <= FEW * k:
        return _best_first(keys)[:, :k]
    places = _highest_in_place(keys, k)
    highest_keys = keys.gather(1, places)
    return places.gather(1, _best_first(highest_keys))


def _best_first(keys: Tensor) -> Tensor:
    """Return the order of each row's keys, the highest first. Equal keys stay in their order."""
    return keys.argsort(dim=1, descending=True, stable=True)


def _highest_in_place(keys: Tensor, k: int) -> Tensor:
    """Return the places of the k highest of each row, ascending: (rows, k). `topk` alone takes any of equal keys."""
    found = keys.topk(k, dim=1)
    lowest = found.values[:, -1:]
    places = found.indices.sort(dim=1).values
    has_ties = (keys >= lowest).sum(1) > k
    for row in torch.nonzero(has_ties).flatten().tolist():
        own = keys[row]
        limit = lowest[row]
        above = torch.nonzero(own > limit).flatten()
        equal = torch.nonzero(own == limit).flatten()
        first_equal = equal[: k - len(above)]
        chosen = torch.cat([above, first_equal])
        places[row] = chosen.sort().values
    return places
