"""The members of a search, which it ranks: slots, or keys that several slots share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dualform.arrays import Ints
from dualform.query.ranking import Order, Ranking, rank_keys


@dataclass(frozen=True, eq=False)
class Members:
    """The members of a search. A place is an index into the list of members."""

    slots: Tensor
    """(n,), ascending: the slot of each member; if several slots share its key, the first of them."""
    codes: Tensor | None = None
    """(n,) int32: the group of each member; None: all are one group."""
    groups: int = 1
    sharing: SharingSlots | None = None
    """The slots of each member; None: each member is one slot."""

    def codes_at(self, places: Tensor) -> Tensor | None:
        """Return the groups of the members at some places."""
        if self.codes is None:
            return None
        if len(places) == len(self.codes):  # all members, in their order
            return self.codes
        return self.codes.index_select(0, places)

    @cached_property
    def usual_count(self) -> int:
        """The median number of slots per member."""
        if self.sharing is None:
            return 1
        median = np.median(self.sharing.counts)
        return int(median)

    def threshold(self, ranking: Ranking, k: int, order: Order) -> Tensor:
        """Return the rank key of the k-th best slot of each query, (queries,); −∞ if there are fewer. ranking: of places."""
        keys = rank_keys(ranking.scores, order)
        padded = pad(keys, (0, 1), value=-torch.inf)
        if self.sharing is None:
            last = min(k - 1, keys.shape[1])
            return padded[:, last]
        members = ranking.slots.numpy()
        counts = torch.from_numpy(self.sharing.counts[members])
        is_before = counts.cumsum(1) < k
        place = is_before.sum(1, keepdim=True)
        return padded.gather(1, place)[:, 0]

    def slots_of(self, ranking: Ranking, k: int, order: Order) -> Ranking:
        """Return the k best slots, from the places of the k best members."""
        if self.sharing is None:
            return Ranking(self.slots[ranking.slots], ranking.scores)
        # Members below the k-th slot's score have no slot among the k best
        keys = rank_keys(ranking.scores, order)
        threshold = self.threshold(ranking, k, order)
        is_below = keys < threshold[:, None]
        reaching = (~is_below).sum(1)
        width = int(reaching.max())
        members = ranking.slots[:, :width]
        scores = ranking.scores[:, :width]
        return self.sharing.best(Ranking(members, scores), k, order)


class SharingSlots:
    """The slots of each member. Slots of one member have the same score."""

    def __init__(self, slots: Ints, member_of: Ints):
        """slots (m,), ascending, and the member of each."""
        by_member = np.argsort(member_of, kind="stable")
        self._slots = slots[by_member]
        self.counts = np.bincount(member_of)
        """(members,): how many slots each has."""
        ends = np.cumsum(self.counts)
        self._starts = ends - self.counts

    def best(self, ranking: Ranking, k: int, order: Order) -> Ranking:
        """Return the k best slots of each query, from the places of its k best members.

        The k best slots are always slots of the k best members: every better member has a better slot.
        """
        queries, width = ranking.slots.shape
        members = ranking.slots.reshape(-1).numpy()
        scores = ranking.scores.reshape(-1).numpy()
        # The first k slots of each member, one member after the other; `entry` is the place of each slot's member in the ranking
        counts = np.minimum(self.counts[members], k)
        entry = np.repeat(np.arange(len(members)), counts)
        ends = np.cumsum(counts)
        begins = self._starts[members] - (ends - counts)
        places = begins[entry] + np.arange(len(entry))
        slots = self._slots[places]
        # Members are sorted already; only slots of members with equal scores must still be sorted, by their numbers
        keys = rank_keys(ranking.scores, order)
        ranks = _ranks(keys)
        by_rank = np.lexsort((slots, ranks[entry]))
        # Either each query has at least k slots, or all queries have the same slots
        kept = min(k, len(slots) // queries)
        first_entries = width * np.arange(queries)
        starts = np.searchsorted(entry, first_entries)
        first = starts.reshape(-1, 1)
        best = by_rank[first + np.arange(kept)]
        best_slots = torch.from_numpy(slots[best])
        best_scores = torch.from_numpy(scores[entry[best]])
        return Ranking(best_slots, best_scores)


def _ranks(keys: Tensor) -> Ints:
    """Number the entries of all queries (queries, n), whose keys descend, such that only equal keys of a query share a number."""
    is_worse = torch.ones_like(keys, dtype=torch.bool)
    is_worse[:, 1:] = keys[:, 1:] != keys[:, :-1]
    ranks = is_worse.reshape(-1).cumsum(0)
    return ranks.numpy()


def members_by_key(slots: Tensor, keys: Tensor, codes: Tensor | None, groups: int) -> Members:
    """Return a member for each key in each group. slots (n,), ascending; keys (n,): the key of each; codes (n,) int32."""
    distinct = keys.numpy()
    if codes is not None:
        distinct = distinct * groups + codes.numpy()
    _, first, number = np.unique(distinct, return_index=True, return_inverse=True)
    # Sorted by their first slots, so that ties go to the lower slot
    order = np.argsort(first)
    place = np.argsort(order)
    sharing = SharingSlots(slots.numpy(), place[number])
    firsts = torch.from_numpy(first[order])
    group_of = None if codes is None else codes[firsts]
    return Members(slots[firsts], group_of, groups, sharing)
