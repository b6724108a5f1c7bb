"""Find the best slots by upper bounds on their scores. Only slots whose bound is high enough are scored.

First the slots that look best are scored. The k-th best of their scores is a threshold: a slot whose upper bound is below it cannot
be among the k best, so that the result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Bools
from dualform.query.ranking import Order, Ranking, merged, rank_keys, stacked_by_group, top_places
from dualform.query.search.bounds import Bounds
from dualform.query.search.members import Members

AHEAD = 1.25
"""How many slots are scored first, relative to k."""
AT_ONCE = 1 << 22
"""Up to this many bounds, over all queries and slots, are computed at once."""
LOOK = 1 << 13
LOOK_PER_WANTED = 32
"""If there are more bounds, the first look is at the longest slots only: LOOK of them, or LOOK_PER_WANTED for each slot wanted."""
MOST_QUERIES = 256
TILE = 1 << 19
TILE_SLOTS = 1 << 15
"""The other bounds are then computed in tiles of this many bounds and slots, which stay in the processor's cache."""
ENOUGH = 4096
"""As soon as this many slots have passed, they are scored, which raises the threshold."""
MANY = 0.25
"""If more than this share of the slots would be scored first, all slots are scored."""


def best_members(
    bounds: Bounds, members: Members, k: int, order: Order, queries: int, dtype: torch.dtype
) -> list[Ranking]:
    """Return the k best slots of each group, for each query."""
    total = len(members.slots)
    if queries * total <= AT_ONCE:
        looked_at = torch.arange(total)
        size = max(1, queries)
    else:
        wanted = k * members.groups
        count = min(total, max(LOOK, LOOK_PER_WANTED * wanted))
        longest = bounds.lengths.topk(count).indices
        looked_at = longest.sort().values
        fitting = 8 * TILE // count
        size = max(1, min(MOST_QUERIES, fitting))
    blocks: list[list[Ranking]] = []
    for first in range(0, queries, size):
        block = slice(first, min(first + size, queries))
        search = _Search(bounds, members, k, order, block, dtype)
        best = search.run(looked_at)
        rankings = [members.slots_of(ranking, k, order) for ranking in best]
        blocks.append(rankings)
    return stacked_by_group(blocks, members.groups, dtype)


@dataclass(frozen=True, eq=False)
class _Search:
    """A search for the best members of some queries. Its rankings hold the places of members instead of slot numbers."""

    bounds: Bounds
    members: Members
    k: int
    order: Order
    queries: slice
    dtype: torch.dtype

    def run(self, looked_at: Tensor) -> list[Ranking]:
        """Return the best members of each group. looked_at: the places of the first look, ascending."""
        total = len(self.members.slots)
        guess, bound = self.bounds.bound(self.queries, looked_at)
        promising = self._promising(guess, looked_at)
        if len(promising) > MANY * total:
            return self._rank_all()
        scores = self.bounds.exact(self.queries, promising)
        threshold = self._threshold(self._rank(promising, scores))
        if len(looked_at) < total:
            return self._rank_in_tiles(threshold)
        passes = self._passes(bound, looked_at, threshold)
        passes[promising.numpy()] = False  # scored above
        passing = _places(passes)
        more_scores = self.bounds.exact(self.queries, passing)
        # Ranking all of them again is faster than merging the rankings of many groups
        places = torch.cat([promising, passing])
        order = np.argsort(places.numpy(), kind="stable")
        ascending = torch.from_numpy(order)
        all_scores = torch.cat([scores, more_scores], 1)
        return self._rank(places[ascending], all_scores[:, ascending])

    def _rank_in_tiles(self, threshold: Tensor) -> list[Ranking]:
        """Compute bounds a tile at a time, and score the members that pass."""
        # |score| ≤ length × size, so members that are too short need no other bound
        sizes = self.bounds.sizes[self.queries]
        shortest = (threshold.amin(1) / sizes).amin()
        is_short = self.bounds.lengths < shortest
        long_enough = _places(~is_short.numpy())
        tiles = self._tiles(long_enough, TILE)
        best = self._nothing()
        waiting: list[Tensor] = []
        for number, places in enumerate(tiles, start=1):
            _, bound = self.bounds.bound(self.queries, places)
            passes = self._passes(bound, places, threshold)
            waiting.append(places[_places(passes)])
            is_last = number == len(tiles)
            if is_last or sum(map(len, waiting)) >= ENOUGH:
                best = self._improve(best, torch.cat(waiting))
                threshold = torch.maximum(threshold, self._threshold(best))
                waiting = []
        return best

    def _rank_all(self) -> list[Ranking]:
        """Score every member."""
        best = self._nothing()
        every = torch.arange(len(self.members.slots))
        for places in self._tiles(every, 8 * TILE):
            best = self._improve(best, places)
        return best

    def _tiles(self, places: Tensor, scores: int) -> Sequence[Tensor]:
        """Split places into tiles: of each, about `scores` scores or bounds are computed at once, for all queries together."""
        size = min(TILE_SLOTS, scores // self._query_count)
        return torch.split(places, max(1, size))

    @property
    def _query_count(self) -> int:
        count: int = self.queries.stop - self.queries.start
        return count

    def _nothing(self) -> list[Ranking]:
        """Return a ranking without members for each group."""
        nothing = Ranking.empty(self._query_count, self.dtype)
        return [nothing] * self.members.groups

    def _improve(self, best: list[Ranking], places: Tensor) -> list[Ranking]:
        """Return the best of each group, with members at further places, which ascend."""
        if not len(places):
            return best
        scores = self.bounds.exact(self.queries, places)
        further = self._rank(places, scores)
        return [merged(old, new, self.k, self.order) for old, new in zip(best, further, strict=True)]

    def _rank(self, places: Tensor, scores: Tensor) -> list[Ranking]:
        """Return the best of each group among the members at some places, which ascend. scores: (queries, places)."""
        keys = rank_keys(scores, self.order)
        columns = self._top_columns(keys, self.k, places)
        return [Ranking(places[best], scores.gather(1, best)) for best in columns]

    def _promising(self, guess: Tensor, places: Tensor) -> Tensor:
        """Return the places of the members that look best in any query and group, ascending."""
        ahead = int(AHEAD * self.k / self.members.usual_count)
        is_promising = np.zeros(len(places), np.bool_)
        for best in self._top_columns(guess, ahead + 1, places):
            is_promising[best.numpy()] = True
        return places[_places(is_promising)]

    def _top_columns(self, keys: Tensor, k: int, places: Tensor) -> list[Tensor]:
        """Return the columns of the k highest keys of each query, for each group. keys: (queries, places)."""
        codes = self.members.codes_at(places)
        return top_places(keys, k, codes, self.members.groups)

    def _passes(self, bound: Tensor, places: Tensor, threshold: Tensor) -> Bools:
        """Return whether the bounds of each member (queries, places) reach the threshold (queries, groups) of any query.

        A bound that is NaN counts as reaching it.
        """
        codes = self.members.codes_at(places)
        if codes is not None:
            threshold = threshold.index_select(1, codes)
        reaches = ~(bound < threshold).numpy()
        passes: Bools = np.logical_or.reduce(reaches)
        return passes

    def _threshold(self, best: list[Ranking]) -> Tensor:
        """Return what a member must reach for any of its slots to be among the k best, (queries, groups)."""
        thresholds = [self.members.threshold(ranking, self.k, self.order) for ranking in best]
        return torch.stack(thresholds, 1)


def _places(mask: Bools) -> Tensor:
    """Return where a mask is true, ascending."""
    return torch.from_numpy(np.flatnonzero(mask))
