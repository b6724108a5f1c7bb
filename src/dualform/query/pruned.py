"""The best slots without computing all scores: what is known of a score beforehand bounds it, and few slots pass.

Nothing is approximate. A slot is left out only if its bound is below the k-th best score that its query has already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dualform.native.ranked import Highest, highest, joined, reaching
from dualform.query.bounds import counts_up
from dualform.query.ranking import Best, Way, ranked_by

Places = Tensor | slice
AHEAD, AHEAD_OF_KEYS = 1.25, 2
"""A first look at so many slots for each one wanted, those that look best, shows which scores are needed; at more keys where they stand for
several slots each, of which nobody knows beforehand how many."""
AT_ONCE = 1 << 22
"""Up to so many bounds, of all queries and slots, are computed at once."""
QUERIES = 256
"""Of more queries, at most so many go together."""
TILE, WIDE = 1 << 19, 1 << 15
"""So many bounds are then computed at a time, of so many slots: they stay in the cache."""
LOOK, TIMES = 1 << 14, 32
"""The first look is then at so many slots only, the longest, or at this many for each one wanted."""
ENOUGH = 4096
"""When so many slots have passed, they are looked at."""
MANY, FINE = 1024, 1 << 16
"""If more slots have passed than this, finer bounds decide which of them are read; so many at a time, for one query."""
DENSE, EARLY = 0.25, 1 / 8
"""If more than this part of the slots passes, bounds do not pay; of many slots that is told by so large a part of them."""


class Bounds(Protocol):
    """What is known of scores. Slots are given by their places among those that take part. |score| ≤ length × size."""

    @property
    def lengths(self) -> Tensor:
        """(slots,)"""

    @property
    def sizes(self) -> Tensor:
        """(queries,)"""

    def bound(self, queries: slice, places: Places) -> tuple[Tensor, Tensor]:
        """What scores seem to be, and what none ranks above, (queries, slots) each. Good until the next are asked for."""

    def finer(self, queries: slice, places: Tensor) -> Tensor:
        """What none ranks above, found with more effort, (queries, slots). Good until the next are asked for."""

    def exact(self, queries: slice, places: Tensor) -> Tensor:
        """The scores, (queries, slots); places ascend."""


@dataclass(frozen=True, eq=False)
class Members:
    """What takes part: slots, or keys that stand for several slots."""

    numbers: Tensor
    """(n,), ascending"""
    codes: Tensor | None = None
    """(n,), int32: the group of each; None: all are one."""
    groups: int = 1
    visits: Tensor | None = None
    """(n,): for how many slots each stands, whose numbers are then 0, 1, 2, …; None: for one."""
    slots_of: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """From some numbers (m,) to how many slots each has, (m,), and all these slots, one's after the other's, ascending."""

    @cached_property
    def _count_up(self) -> bool:
        return self.visits is not None or counts_up(self.numbers)

    def named(self, places: Tensor) -> Tensor:
        """The numbers of some places: mostly the same, for most of the time everything takes part."""
        return places if self._count_up else self.numbers[places]

    @cached_property
    def by_group(self) -> list[Tensor]:
        """The places of each group, ascending."""
        return self.grouped(torch.arange(len(self.numbers)))

    def grouped(self, places: Tensor) -> list[Tensor]:
        """Which of some places are in each group, ascending."""
        if self.codes is None:
            return [torch.arange(len(places))]
        codes = self.codes[places]
        few = codes.numpy().astype(np.uint8) if self.groups <= 256 else codes.numpy()  # is sorted in linear time
        order = torch.from_numpy(np.argsort(few, kind="stable"))
        return list(torch.split(order, torch.bincount(codes, minlength=self.groups).tolist()))

    @cached_property
    def typical_visits(self) -> int:
        """For how many slots most of them stand, at least."""
        return 1 if self.visits is None else int(self.visits.median())


@dataclass(frozen=True)
class Wanted:
    """The k best slots of each group."""

    k: int
    way: Way
    members: Members

    def nothing(self, queries: int, dtype: torch.dtype) -> list[Best]:
        """The best of each group, before any was seen."""
        return [Best(queries, self.k, dtype) for _ in range(self.members.groups)]

    def best(self, places: Tensor, scores: Tensor) -> list[Best]:
        """The best of each group among all that there are to be seen. scores: (queries, n); places ascend."""
        ranked, numbers = ranked_by(scores, self.way), self.members.named(places)
        found = self._highest(ranked, places, self.k)
        if found is None:
            bests = self.nothing(len(scores), scores.dtype)
            self._add(bests, self.members.grouped(places), ranked, numbers, scores)
            return bests
        order = found.ordered().numpy()
        ordered = [torch.from_numpy(one.numpy().take(order)) for one in (ranked[0], scores[0], numbers)]
        lines = zip(*(torch.split(one, 1) for one in ordered), strict=True)  # one call for all groups
        return [
            Best.holding(self.k, *(line if count == self.k else line[:, :count] for line in group))
            for group, count in zip(lines, found.counts, strict=True)
        ]

    def add(self, bests: list[Best], places: Tensor, scores: Tensor) -> None:
        """scores: (queries, n); places ascend, above all that came before."""
        ranked = ranked_by(scores, self.way)
        found = self._highest(ranked, places, self.k)
        groups = self.members.grouped(places) if found is None else _apart(found)
        self._add(bests, groups, ranked, self.members.named(places), scores)

    def _add(self, bests: list[Best], groups: list[Tensor], ranked: Tensor, numbers: Tensor, scores: Tensor) -> None:
        for best, mine in zip(bests, groups, strict=True):
            whole = len(bests) == 1 and len(scores) > 1
            some = (ranked, scores) if whole else (ranked.index_select(1, mine), scores.index_select(1, mine))
            best.add(some[0], numbers[mine], some[1])

    def least(self, places: Tensor, scores: Tensor) -> Tensor:
        """What a score must reach to be among the best, as far as these scores (queries, n) tell, (queries, groups)."""
        ranked = ranked_by(scores, self.way)
        found = self._highest(ranked, places, self.k)
        if found is not None:
            if self.members.visits is None:
                return found.least[None]
            order = found.ordered()
            return self.kth(ranked[0][order].masked_fill_(order < 0, -torch.inf), places[order])[None]
        least = []
        for mine in self.members.grouped(places):
            some, order = ranked.index_select(1, mine).topk(min(self.k, len(mine)), dim=1)
            least.append(self.kth(some, places[mine][order]))
        return torch.stack(least, 1)

    def _highest(self, ranked: Tensor, places: Places, count: int) -> Highest | None:
        """The best of each group among some slots, if there is one query; None: to be found in another way."""
        return highest(ranked, self._codes(places), self.members.groups, count)

    def _codes(self, places: Places) -> Tensor | None:
        codes = self.members.codes
        return None if codes is None else codes[places] if isinstance(places, slice) else codes.index_select(0, places)

    def kth(self, ranked: Tensor, places: Tensor) -> Tensor:
        """The score of the k-th best slot in each line, (lines,). ranked: (lines, n), best first; places: (lines, n)."""
        lowest = ranked.new_full((len(ranked), 1), -torch.inf)
        visits = self.members.visits
        if visits is None:
            return ranked[:, self.k - 1] if ranked.shape[1] >= self.k else lowest[:, 0]
        before = (visits[places].cumsum(1) < self.k).sum(1, keepdim=True)
        return torch.cat([ranked, lowest], 1).gather(1, before)[:, 0]

    def slots(self, bests: list[Best]) -> list[Best]:
        """From the best members of each group to its best slots."""
        slots_of = self.members.slots_of
        if slots_of is None:
            return bests
        return spread(self._enough(bests), slots_of, self.k)

    def _enough(self, bests: list[Best]) -> list[Best]:
        """Those whose slots may be among the k best."""
        width = max((best.scores.shape[1] for best in bests), default=0)
        scores, numbers = (
            torch.cat([pad(one, (0, width - one.shape[1]), value=fill) for one in every])
            for every, fill in (([b.scores for b in bests], -torch.inf), ([b.numbers for b in bests], 0))
        )
        reaching = ~(scores < self.kth(scores, numbers)[:, None])
        counts = reaching.sum(1).reshape(len(bests), -1).amax(1).tolist() if len(scores) else [0] * len(bests)
        return [best.first(count) for best, count in zip(bests, counts, strict=True)]

    def looking_best(self, guess: Tensor, places: Places) -> Tensor:
        """Which of some slots to look at first, ascending. guess: (queries, n); places: of these n, or of all slots."""
        ahead = AHEAD if self.members.visits is None else AHEAD_OF_KEYS
        count = int(ahead * self.k / self.members.typical_visits) + 1
        chosen = self._highest(guess, places, count)
        if chosen is not None:
            return chosen.ascending(guess.shape[1])
        found = [torch.zeros(0, dtype=torch.int64)]
        for mine in self.members.by_group if isinstance(places, slice) else self.members.grouped(places):
            rest = len(mine) - count
            if rest <= 0:
                found.append(mine)
                continue
            some = (guess if len(mine) == guess.shape[1] else guess.index_select(1, mine)).numpy()
            best = np.argpartition(some, rest, axis=1)[:, rest:]
            found.append(mine[torch.from_numpy(best.reshape(-1))])
        looked: Tensor = torch.unique(torch.cat(found))
        return looked

    def reach(self, bound: Tensor, places: Places, least: Tensor, without: Tensor | None = None) -> Tensor:
        """Which of n slots may be among the best of any query: 0 ≤ … < n, ascending, but for those to be left out."""
        codes = self._codes(places)
        found = reaching(bound, codes, least, without)
        if found is not None:
            return found
        beyond = bound.sub_(least if codes is None else least.index_select(1, codes))
        passed = ~((beyond.amax(0) if len(beyond) > 1 else beyond[0]) < 0)
        if without is not None:
            passed[without] = False
        return torch.from_numpy(np.flatnonzero(passed.numpy()))


def _apart(found: Highest) -> list[Tensor]:
    return [places[:count] for places, count in zip(found.ordered(), found.counts, strict=True)]


def best_of(bounds: Bounds, queries: int, wanted: Wanted, dtype: torch.dtype) -> list[Best] | None:
    """For each group, the best slots of each query; None if bounds do not pay."""
    members = wanted.members
    total = len(members.numbers)
    if 0 < queries * total <= AT_ONCE:
        found = _at_once(bounds, slice(0, queries), wanted)
        return None if found is None else wanted.slots(found)
    looked = min(total, max(LOOK, TIMES * wanted.k * members.groups))
    longest = bounds.lengths.topk(looked).indices.sort().values
    size = max(1, min(QUERIES, 8 * TILE // max(1, looked)))
    pieces = []
    for first in range(0, queries, size):
        found = _in_tiles(bounds, slice(first, min(first + size, queries)), wanted, longest, dtype)
        if found is None:
            return None
        pieces.append(wanted.slots(found))
    return [Best.join([piece[group] for piece in pieces], wanted.k, dtype) for group in range(members.groups)]


def _at_once(bounds: Bounds, queries: slice, wanted: Wanted) -> list[Best] | None:
    total = len(wanted.members.numbers)
    everything = slice(0, total)
    guess, bound = bounds.bound(queries, everything)
    looked = wanted.looking_best(guess, everything)
    if len(looked) > DENSE * total:
        return None
    known = bounds.exact(queries, looked)
    least = wanted.least(looked, known)
    places = _finer(bounds, queries, wanted.reach(bound, everything, least, looked), wanted, least)
    if len(places) + len(looked) > DENSE * total:
        return None
    return wanted.best(*joined((looked, known), (places, bounds.exact(queries, places))))


def _in_tiles(bounds: Bounds, queries: slice, wanted: Wanted, longest: Tensor, dtype: torch.dtype) -> list[Best] | None:
    members, count = wanted.members, queries.stop - queries.start
    guess, _ = bounds.bound(queries, longest)
    looked = longest[wanted.looking_best(guess, longest)]
    if len(looked) > DENSE * len(members.numbers):
        return None
    least = wanted.least(looked, bounds.exact(queries, looked))
    shortest = (least.amin(1) / bounds.sizes[queries]).amin()
    long = torch.nonzero(~(bounds.lengths < shortest))[:, 0]
    size = max(1, min(WIDE, TILE // count))
    bests, passed, waiting, read = wanted.nothing(count, dtype), [long[:0]], 0, 0
    for low in range(0, len(long), size):
        places = long[low : low + size]
        _, bound = bounds.bound(queries, places)
        passed.append(places[wanted.reach(bound, places, least)])
        waiting += len(passed[-1])
        if waiting >= ENOUGH or low + size >= len(long):
            near = _finer(bounds, queries, torch.cat(passed), wanted, least)
            passed, waiting, read = [long[:0]], 0, read + len(near)
            if read > DENSE * len(members.numbers) * max(EARLY, min(1, (low + size) / len(long))):
                return None
            wanted.add(bests, near, bounds.exact(queries, near))
            least = torch.maximum(least, torch.stack([wanted.kth(best.scores, best.numbers) for best in bests], 1))
    return bests


def _finer(bounds: Bounds, queries: slice, places: Tensor, wanted: Wanted, least: Tensor) -> Tensor:
    """Which of some slots, if they are many, still may be among the best; not all of them, once they are too many to pay."""
    if len(places) <= MANY:
        return places
    passed, count = [places[:0]], 0
    for some in torch.split(places, max(1, FINE // min(4, queries.stop - queries.start))):
        passed.append(some[wanted.reach(bounds.finer(queries, some), some, least)])
        count += len(passed[-1])
        if count > DENSE * len(wanted.members.numbers):
            break
    return torch.cat(passed)


def spread(bests: Sequence[Best], slots_of: Callable[[Tensor], tuple[Tensor, Tensor]], k: int) -> list[Best]:
    """From the best keys of each query, in each group, to its best slots, where several slots share a key.

    slots_of: keys (n,) → how many slots each has, and all these slots, one key's after the other's, ascending. The k best slots
    are always slots of the k best keys.
    """
    counted, numbers = slots_of(torch.cat([best.numbers.reshape(-1) for best in bests]))
    counts, slots = counted.numpy(), numbers.numpy()  # a few thousand: NumPy takes less time for them
    scores, values = (
        np.repeat(torch.cat([getattr(best, name).reshape(-1) for best in bests]).numpy(), counts)
        for name in ("scores", "values")
    )
    lines = np.array([width for n, width in (best.numbers.shape for best in bests) for _ in range(n)], np.int64)
    owner = np.repeat(np.repeat(np.arange(len(lines)), lines), counts)
    # Best keys stand in their order: only the slots of keys with equal scores are still to be mixed
    worse = np.ones(len(owner), np.int64)
    worse[1:] = (owner[1:] != owner[:-1]) | (scores[1:] != scores[:-1])
    order = np.argsort(worse.cumsum() * (int(slots.max()) + 1 if len(slots) else 1) + slots, kind="stable")
    begins = np.searchsorted(owner, np.arange(len(lines)))
    order = order[np.arange(len(owner)) - begins[owner] < k]
    kept = np.bincount(owner[order], minlength=len(lines)).reshape(len(bests), -1)
    sizes = kept.sum(1).tolist()
    ordered = [torch.from_numpy(one[order]) for one in (scores, values, slots)]
    parts = zip(*(torch.split(one, sizes) for one in ordered), strict=True)
    return [
        best.replaced(*(one.view(len(many), max(many, default=0)) for one in part))
        for best, many, part in zip(bests, kept.tolist(), parts, strict=True)
    ]
