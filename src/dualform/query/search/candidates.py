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
        search.run(looked_at)
        blocks.append([members.slots_of(ranking, k, order) for ranking in search.best])
    return [stacked([block[group] for block in blocks], dtype) for group in range(members.groups)]


class _Search:
    """A search for the best members of some queries."""

    def __init__(self, bounds: Bounds, members: Members, k: int, order: Order, queries: slice, dtype: torch.dtype):
        self._bounds = bounds
        self._members = members
        self._k = k
        self._order = order
        self._queries = queries
        self._count = queries.stop - queries.start
        self._is_scored = np.zeros(len(members.slots), np.bool_)
        self.best = [Ranking.empty(self._count, dtype) for _ in range(members.groups)]
        """The best members of each group so far."""

    def run(self, looked_at: Tensor) -> None:
        """Find the best members. looked_at: the places of the first look, ascending."""
        total = len(self._members.slots)
        guess, bound = self._bounds.bound(self._queries, looked_at)
        promising = self._promising(guess, looked_at)
        if len(promising) > MANY * total:
            self._score_all()
            return
        self._score(promising)
        if len(looked_at) == total:
            self._score(self._passing(bound, looked_at))
        else:
            self._search_in_tiles()

    def _search_in_tiles(self) -> None:
        # |score| ≤ length × size, so that members that are too short need no other bound
        shortest = (self._threshold().amin(1) / self._bounds.sizes[self._queries]).amin()
        long_enough = torch.nonzero(~(self._bounds.lengths < shortest))[:, 0]
        waiting = [long_enough[:0]]
        for places in torch.split(long_enough, max(1, min(TILE_SLOTS, TILE // self._count))):
            _, bound = self._bounds.bound(self._queries, places)
            waiting.append(self._passing(bound, places))
            if sum(map(len, waiting)) >= ENOUGH:
                self._score(torch.cat(waiting))  # which raises the threshold for the tiles that follow
                waiting = [long_enough[:0]]
        self._score(torch.cat(waiting))

    def _score_all(self) -> None:
        size = max(1, min(TILE_SLOTS, 8 * TILE // self._count))
        for places in torch.split(torch.arange(len(self._members.slots)), size):
            self._score(places)

    def _score(self, places: Tensor) -> None:
        """Score the members at some places, which ascend, and keep the best of each group."""
        if not len(places):
            return
        scores = self._bounds.exact(self._queries, places)
        slots = self._members.slots[places]
        codes = self._members.codes_at(places)
        columns = top_places(rank_keys(scores, self._order), self._k, codes, self._members.groups)
        for group, best in enumerate(columns):
            found = Ranking(slots[best], scores.gather(1, best))
            self.best[group] = merged(self.best[group], found, self._k, self._order)
        self._is_scored[places.numpy()] = True

    def _promising(self, guess: Tensor, places: Tensor) -> Tensor:
        """Return the places of the members that look best in any query and group, ascending."""
        count = int(AHEAD * self._k) + 1
        columns = top_places(guess, count, self._members.codes_at(places), self._members.groups)
        return places[torch.unique(torch.cat([best.reshape(-1) for best in columns]))]

    def _passing(self, bound: Tensor, places: Tensor) -> Tensor:
        """Return the places, of those not scored yet, whose bounds (queries, n) reach the threshold of any query.

        A bound that is not a number does.
        """
        codes = self._members.codes_at(places)
        threshold = self._threshold()
        needed = threshold if codes is None else threshold.index_select(1, codes)
        misses = (bound < needed).numpy().all(axis=0)
        return places[torch.from_numpy(np.flatnonzero(~(misses | self._is_scored[places.numpy()])))]

    def _threshold(self) -> Tensor:
        """Return what a member must reach to be among the k best, (queries, groups)."""
        lowest = []
        for ranking in self.best:
            if ranking.scores.shape[1] < self._k:
                lowest.append(ranking.scores.new_full((self._count,), -torch.inf))
            else:
                lowest.append(rank_keys(ranking.scores[:, self._k - 1], self._order))
        return torch.stack(lowest, 1)
