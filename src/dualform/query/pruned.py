"""The best slots without computing all scores: what is known of a score beforehand bounds it, and few slots pass.

Nothing is approximate. A slot is left out only if its bound is below the k-th best score that its query has already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dualform.query.ranking import Best, Way, ranked_by

QUERIES = 256
"""At most so many go together."""
TILE, WIDE = 1 << 19, 1 << 15
"""So many bounds are computed at a time, of so many slots: they stay in the cache."""
ENOUGH = 4096
"""When so many slots have passed, they are looked at."""
LOOK, TIMES = 1 << 14, 32
"""A first look at so many slots, the longest, or at this many for each one wanted, shows which scores are needed."""
DENSE = 0.25
"""If more than this part of the slots passes, bounds do not pay."""


class Bounds(Protocol):
    """What is known of scores. Slots are given by their places among those that take part. |score| ≤ length × size."""

    lengths: Tensor
    """(slots,)"""
    sizes: Tensor
    """(queries,)"""

    def bound(self, queries: slice, places: Tensor) -> Tensor:
        """No score ranks above this, (queries, slots). Good until the next is asked for."""

    def exact(self, queries: slice, places: Tensor) -> Tensor:
        """The scores, (queries, slots); places ascend."""


@dataclass(frozen=True)
class Wanted:
    """The k best of each group of slots."""

    k: int
    way: Way
    numbers: Tensor
    """(slots,): of those that take part, ascending."""
    codes: Tensor | None = None
    """(slots,): the group of each; None: all are one."""
    groups: int = 1

    def members(self, group: int, places: Tensor) -> Tensor:
        """Which of some slots are in a group."""
        return torch.arange(len(places)) if self.codes is None else torch.nonzero(self.codes[places] == group)[:, 0]


def best_of(bounds: Bounds, queries: int, wanted: Wanted, dtype: torch.dtype) -> list[Best] | None:
    """For each group, the best slots of each query; None if bounds do not pay."""
    looked = min(len(wanted.numbers), max(LOOK, TIMES * wanted.k * wanted.groups))
    longest = bounds.lengths.topk(looked).indices.sort().values
    size = max(1, min(QUERIES, 8 * TILE // max(1, looked)))
    pieces = []
    for first in range(0, queries, size):
        found = _of_some(bounds, slice(first, min(first + size, queries)), wanted, longest, dtype)
        if found is None:
            return None
        pieces.append(found)
    return [Best.join([piece[group] for piece in pieces], wanted.k, dtype) for group in range(wanted.groups)]


def _of_some(bounds: Bounds, queries: slice, wanted: Wanted, longest: Tensor, dtype: torch.dtype) -> list[Best] | None:
    total, count = len(wanted.numbers), queries.stop - queries.start
    least = _least(bounds, queries, longest, wanted)
    shortest = (least.amin(1) / bounds.sizes[queries]).amin()
    long = torch.nonzero(~(bounds.lengths < shortest))[:, 0]
    bests, passed = [Best(count, wanted.k, dtype) for _ in range(wanted.groups)], [torch.zeros(0, dtype=torch.int64)]
    size, read, waiting = max(1, min(WIDE, TILE // count)), 0, 0
    for low in range(0, len(long), size):
        places = long[low : low + size]
        beyond = bounds.bound(queries, places).sub_(least if wanted.codes is None else least[:, wanted.codes[places]])
        passed.append(places[~(beyond.amax(0) < 0)])
        waiting += len(passed[-1])
        if read + waiting > DENSE * total:
            return None
        if waiting >= ENOUGH:
            _look(bounds, queries, torch.cat(passed), wanted, bests, least)
            passed, read, waiting = [], read + waiting, 0
    _look(bounds, queries, torch.cat([*passed, long[:0]]), wanted, bests, least)
    return bests


def _look(bounds: Bounds, queries: slice, places: Tensor, wanted: Wanted, bests: list[Best], least: Tensor) -> None:
    """Compute scores in full."""
    scores = bounds.exact(queries, places)
    for group, best in enumerate(bests):
        mine = wanted.members(group, places)
        some = scores if len(mine) == len(places) else scores[:, mine]
        best.add(ranked_by(some, wanted.way), wanted.numbers[places[mine]], some)
        if best.scores.shape[1] == wanted.k:
            least[:, group] = torch.maximum(least[:, group], best.scores[:, -1])


def _least(bounds: Bounds, queries: slice, places: Tensor, wanted: Wanted) -> Tensor:
    """The k-th best score of each query in each group, of those among some slots that look best, (queries, groups)."""
    bound = bounds.bound(queries, places)
    least = bound.new_full((len(bound), wanted.groups), -torch.inf)
    for group in range(wanted.groups):
        mine = wanted.members(group, places)
        if len(mine) >= wanted.k:
            some = bound if len(mine) == len(places) else bound[:, mine]
            best = places[torch.unique(mine[some.topk(wanted.k, dim=1).indices])]
            scores = ranked_by(bounds.exact(queries, best), wanted.way)
            least[:, group] = scores.topk(wanted.k, dim=1).values[:, -1]
    return least


def spread(best: Best, slots_of: Callable[[Tensor], tuple[Tensor, Tensor]], k: int) -> Best:
    """From the best keys of each query to its best slots, where several slots share a key.

    slots_of: keys (n,) → how many slots each has, and all these slots, one key's after the other's, ascending. The k best slots
    are always slots of the k best keys.
    """
    n, width = best.numbers.shape
    counts, slots = slots_of(best.numbers.reshape(-1))
    scores, values = (t.reshape(-1).repeat_interleave(counts) for t in (best.scores, best.values))
    query = torch.arange(n).repeat_interleave(width).repeat_interleave(counts)
    order = torch.from_numpy(np.lexsort((slots.numpy(), -scores.numpy(), query.numpy())))  # the last one decides first
    slots, scores, values, query = slots[order], scores[order], values[order], query[order]
    place = torch.arange(len(query)) - torch.searchsorted(query, query)
    here = place < k
    shape = (n, int(here.sum()) // max(n, 1))
    return best.replaced(scores[here].reshape(shape), values[here].reshape(shape), slots[here].reshape(shape))
