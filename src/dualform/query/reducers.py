"""What questions keep of a scan: the best slots, the best of each group, totals by group, or one sum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualform.query.groups import Groups
from dualform.query.ranking import Order, Ranking, merged, rank_keys, top_places
from dualform.query.scan import Tile

NO_SLOT = torch.iinfo(torch.int64).max


class TopK:
    """The k best slots of each query."""

    def __init__(self, queries: int, k: int, order: Order, dtype: torch.dtype):
        self._k = k
        self._order = order
        self.ranking = Ranking.empty(queries, dtype)

    def empty(self) -> TopK:
        """Return one that has seen nothing."""
        slots, scores = self.ranking
        return TopK(len(slots), self._k, self._order, scores.dtype)

    def add(self, tile: Tile) -> None:
        """Take in a tile."""
        self.insert(tile.slots, tile.scores)

    def merge(self, other: TopK) -> None:
        """Take in the best of other slots."""
        self._take(other.ranking)

    def insert(self, slots: Tensor, scores: Tensor) -> None:
        """Take in scores (queries, m) of slots (m,), which ascend."""
        if not len(slots):
            return
        keys = rank_keys(scores, self._order)
        [places] = top_places(keys, self._k)
        best_scores = scores.gather(1, places)
        self._take(Ranking(slots[places], best_scores))

    def _take(self, other: Ranking) -> None:
        self.ranking = merged(self.ranking, other, self._k, self._order)


class TopKPerGroup:
    """The k best slots of each query in each group."""

    def __init__(self, groups: Groups, best: TopK):
        """best: says what the best of a group are."""
        self._groups = groups
        self._empty = best.empty()
        self._best: dict[int, TopK] = {}
        """Of the groups that have been seen."""

    @property
    def rankings(self) -> list[Ranking]:
        """The ranking of each group."""
        return [self._best.get(code, self._empty).ranking for code in range(len(self._groups))]

    def _best_of(self, code: int) -> TopK:
        if code not in self._best:
            self._best[code] = self._empty.empty()
        return self._best[code]

    def empty(self) -> TopKPerGroup:
        """Return one that has seen nothing."""
        return TopKPerGroup(self._groups, self._empty)

    def add(self, tile: Tile) -> None:
        """Take in a tile."""
        codes = _codes(tile, self._groups)
        for code in torch.unique(codes).tolist():
            members = torch.nonzero(codes == code).flatten()
            slots = tile.slots[members]
            scores = tile.scores[:, members]
            self._best_of(code).insert(slots, scores)

    def merge(self, other: TopKPerGroup) -> None:
        """Take in the best of other slots."""
        for code, theirs in other._best.items():
            self._best_of(code).merge(theirs)


class Totals:
    """The sum of the scores of each group, for each query; absolute: of their absolute values."""

    def __init__(self, groups: Groups, queries: int, absolute: bool):
        count = len(groups)
        self._groups = groups
        self._queries = queries
        self._absolute = absolute
        self.totals = torch.zeros(count, queries, dtype=torch.float64)
        self.visits = torch.zeros(count, dtype=torch.int64)
        """(groups,): how many slots each group has."""
        self.first = torch.full((count,), NO_SLOT)
        """(groups,): the lowest slot number in each group."""

    def empty(self) -> Totals:
        """Return one that has seen nothing."""
        return Totals(self._groups, self._queries, self._absolute)

    def add(self, tile: Tile) -> None:
        """Take in a tile."""
        codes = _codes(tile, self._groups)
        scores = tile.scores
        if self._absolute:
            scores = scores.abs()
        self.totals.index_add_(0, codes, scores.T.double())
        once = torch.ones_like(codes)
        self.visits.index_add_(0, codes, once)
        self.first.scatter_reduce_(0, codes, tile.slots, "amin")

    def merge(self, other: Totals) -> None:
        """Add the totals of other slots."""
        self._add_groups(*other._seen())

    def _seen(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the groups that have slots, and their totals, visits and lowest slots: a task sees few of many groups."""
        codes = torch.nonzero(self.visits)[:, 0]
        return codes, self.totals[codes], self.visits[codes], self.first[codes]

    def _add_groups(self, codes: Tensor, totals: Tensor, visits: Tensor, first: Tensor) -> None:
        """Add what was seen of some groups, each of which is there once."""
        self.totals[codes] += totals
        self.visits[codes] += visits
        self.first[codes] = torch.minimum(self.first[codes], first)

    def __reduce__(self) -> tuple[Any, ...]:
        return _totals_of, (self._groups, self._queries, self._absolute, self._seen())


def _totals_of(groups: Groups, queries: int, absolute: bool, seen: tuple[Tensor, Tensor, Tensor, Tensor]) -> Totals:
    """Return totals as they were before they were sent."""
    totals = Totals(groups, queries, absolute)
    totals._add_groups(*seen)
    return totals


class GroupSums(NamedTuple):
    """What was found of groups, for all queries."""

    totals: Tensor
    """(queries, groups) float64"""
    visits: Tensor
    """(groups,): how many slots each group has."""
    first: Tensor
    """(groups,): the lowest slot number in each group."""


class Sum:
    """The sum of all scores, for each query."""

    def __init__(self, queries: int):
        self.total = torch.zeros(queries, dtype=torch.float64)

    def empty(self) -> Sum:
        """Return one that has seen nothing."""
        return Sum(len(self.total))

    def add(self, tile: Tile) -> None:
        """Take in a tile."""
        self.total += tile.scores.double().sum(1)

    def merge(self, other: Sum) -> None:
        """Add the sum of other slots."""
        self.total += other.total


def _codes(tile: Tile, groups: Groups) -> Tensor:
    """Return the group of each slot of a tile, (m,)."""
    codes = groups(tile.piece.run)
    return torch.from_numpy(codes[tile.places])
