"""From upper bounds on scores to the best slots: only slots whose bound is high enough are scored.

First the slots that look best are scored. The k-th best of their scores is a threshold: a slot whose upper bound is below it cannot
be among the k best. Nothing is approximate.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualform.query.ranking import Order, Ranking, merged, rank_keys, stacked, top_places
from dualform.query.search.bounds import Bounds
from dualform.query.search.members import Members

AHEAD = 1.25
"""How many slots are scored first, for each one wanted."""
AT_ONCE = 1 << 22
"""Up to this many bounds, of all queries and slots together, are computed at once."""
LOOK = 1 << 13
LOOK_PER_WANTED = 32
"""Where there are more, the first look is at this many of the longest slots only, or at this many for each one wanted."""
MOST_QUERIES = 256
TILE = 1 << 19
TILE_SLOTS = 1 << 15
"""The other bounds are then computed a tile at a time, which stays in the processor's cache."""
ENOUGH = 4096
"""When this many slots have passed, they are scored, and the threshold rises."""
MANY = 0.25
"""If more than this part of the slots would be scored first, all are scored at once."""


def best_members(
    bounds: Bounds, members: Members, k: int, order: Order, queries: int, dtype: torch.dtype
) -> list[Ranking]:
    """Return the k best slots of each group, for each query."""
    total = len(members.slots)
    if queries * total <= AT_ONCE:
        looked_at = torch.arange(total)
        size = max(1, queries)
    else:
        count = min(total, max(LOOK, LOOK_PER_WANTED * k * members.groups))
        looked_at = bounds.lengths.topk(count).indices.sort().values
        size = max(1, min(MOST_QUERIES, 8 * TILE // count))
    blocks: list[list[Ranking]] = []
    for first in range(0, queries, size):
        search = _Search(bounds, members, k, order, slice(first, min(first + size, queries)), dtype)
        blocks.append([members.slots_of(ranking, k, order) for ranking in search.run(looked_at)])
    return [stacked([block[group] for block in blocks], dtype) for group in range(members.groups)]


class _Search:
    """A search for the best members of some queries. Its rankings hold the places of members instead of slot numbers."""

    def __init__(self, bounds: Bounds, members: Members, k: int, order: Order, queries: slice, dtype: torch.dtype):
        self._bounds = bounds
        self._members = members
        self._k = k
        self._order = order
        self._queries = queries
        self._count = queries.stop - queries.start
        self._dtype = dtype

    def run(self, looked_at: Tensor) -> list[Ranking]:
        """Return the best members of each group. looked_at: the places of the first look, ascending."""
        total = len(self._members.slots)
        guess, bound = self._bounds.bound(self._queries, looked_at)
        promising = self._promising(guess, looked_at)
        if len(promising) > MANY * total:
            return self._rank_all()
        scores = self._bounds.exact(self._queries, promising)
        threshold = self._threshold(self._rank(promising, scores))
        if len(looked_at) < total:
            return self._rank_in_tiles(threshold)
        passing = self._passing(bound, looked_at, threshold, without=promising)
        both = torch.cat([promising, passing])
        ascending = torch.from_numpy(np.argsort(both.numpy(), kind="stable"))
        scores = torch.cat([scores, self._bounds.exact(self._queries, passing)], 1)
        return self._rank(both[ascending], scores[:, ascending])

    def _rank_in_tiles(self, threshold: Tensor) -> list[Ranking]:
        """Compute bounds a tile at a time, and score the members that pass."""
        # |score| ≤ length × size, so that members that are too short need no other bound
        shortest = (threshold.amin(1) / self._bounds.sizes[self._queries]).amin()
        long_enough = torch.nonzero(~(self._bounds.lengths < shortest))[:, 0]
        best = [Ranking.empty(self._count, self._dtype) for _ in range(self._members.groups)]
        waiting: list[Tensor] = []
        tiles = torch.split(long_enough, max(1, min(TILE_SLOTS, TILE // self._count)))
        for number, places in enumerate(tiles, start=1):
            _, bound = self._bounds.bound(self._queries, places)
            waiting.append(self._passing(bound, places, threshold))
            if sum(map(len, waiting)) >= ENOUGH or number == len(tiles):
                best = self._improve(best, torch.cat(waiting))
                threshold = torch.maximum(threshold, self._threshold(best))
                waiting = []
        return best

    def _rank_all(self) -> list[Ranking]:
        """Score every member."""
        best = [Ranking.empty(self._count, self._dtype) for _ in range(self._members.groups)]
        size = max(1, min(TILE_SLOTS, 8 * TILE // self._count))
        for places in torch.split(torch.arange(len(self._members.slots)), size):
            best = self._improve(best, places)
        return best

    def _improve(self, best: list[Ranking], places: Tensor) -> list[Ranking]:
        """Return the best of each group, with members at further places, which ascend."""
        if not len(places):
            return best
        found = self._rank(places, self._bounds.exact(self._queries, places))
        return [merged(old, new, self._k, self._order) for old, new in zip(best, found, strict=True)]

    def _rank(self, places: Tensor, scores: Tensor) -> list[Ranking]:
        """Return the best of each group among the members at some places, which ascend. scores: (queries, places)."""
        codes = self._members.codes_at(places)
        columns = top_places(rank_keys(scores, self._order), self._k, codes, self._members.groups)
        return [Ranking(places[best], scores.gather(1, best)) for best in columns]

    def _promising(self, guess: Tensor, places: Tensor) -> Tensor:
        """Return the places of the members that look best in any query and group, ascending."""
        count = int(AHEAD * self._k / self._members.usual_count) + 1
        columns = top_places(guess, count, self._members.codes_at(places), self._members.groups)
        is_promising = np.zeros(len(places), np.bool_)
        for best in columns:
            is_promising[best.numpy()] = True
        return places[torch.from_numpy(np.flatnonzero(is_promising))]

    def _passing(self, bound: Tensor, places: Tensor, threshold: Tensor, without: Tensor | None = None) -> Tensor:
        """Return the places whose bounds (queries, n) reach the threshold (queries, groups) of any query.

        A bound that is not a number does. without: members that are scored already, if the places are those of all members.
        """
        codes = self._members.codes_at(places)
        needed = threshold if codes is None else threshold.index_select(1, codes)
        reaches = ~(bound < needed).numpy()
        if without is not None:
            reaches[:, without.numpy()] = False
        return places[torch.from_numpy(np.flatnonzero(reaches.any(axis=0)))]

    def _threshold(self, best: list[Ranking]) -> Tensor:
        """Return what a member must reach for any of its slots to be among the k best, (queries, groups)."""
        return torch.stack([self._members.threshold(ranking, self._k, self._order) for ranking in best], 1)
