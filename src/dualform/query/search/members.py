"""What a search ranks: slots, or keys that several slots share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.query.ranking import Order, Ranking, rank_keys

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Members:
    """The members of a search. A place is an index into the list of members."""

    slots: Tensor
    """(n,), ascending: the slot of each member, or the first of the slots that share its key."""
    codes: Tensor | None = None
    """(n,) int32: the group of each member; None: all are one group."""
    groups: int = 1
    sharing: SharingSlots | None = None
    """The slots of each member; None: each member is one slot."""

    def codes_at(self, places: Tensor) -> Tensor | None:
        """Return the groups of the members at some places."""
        if self.codes is None or len(places) == len(self.codes):  # all members, in their order
            return self.codes
        return self.codes.index_select(0, places)

    @cached_property
    def usual_count(self) -> int:
        """How many slots a member usually stands for."""
        return 1 if self.sharing is None else int(np.median(self.sharing.counts))

    def threshold(self, ranking: Ranking, k: int, order: Order) -> Tensor:
        """Return the rank key of the k-th best slot of each query, (queries,); −∞ if there are fewer. ranking: of places."""
        keys = rank_keys(ranking.scores, order)
        padded = torch.cat([keys, keys.new_full((len(keys), 1), -torch.inf)], 1)
        if self.sharing is None:
            return padded[:, min(k - 1, keys.shape[1])]
        counts = torch.from_numpy(self.sharing.counts[ranking.slots.numpy()])
        before = (counts.cumsum(1) < k).sum(1, keepdim=True)
        return padded.gather(1, before)[:, 0]

    def slots_of(self, ranking: Ranking, k: int, order: Order) -> Ranking:
        """Return the k best slots, from the places of the k best members."""
        if self.sharing is None:
            return Ranking(self.slots[ranking.slots], ranking.scores)
        # Members below the k-th slot have none among the k best
        reaches = ~(rank_keys(ranking.scores, order) < self.threshold(ranking, k, order)[:, None])
        width = int(reaches.sum(1).max()) if reaches.numel() else 0
        return self.sharing.best(Ranking(ranking.slots[:, :width], ranking.scores[:, :width]), k, order)


class SharingSlots:
    """The slots of each member. Slots of one member have the same score."""

    def __init__(self, slots: Ints, member_of: Ints, members: int):
        """slots (m,), ascending, and the member of each."""
        self._slots = slots[np.argsort(member_of, kind="stable")]
        self.counts = np.bincount(member_of, minlength=members)
        """(members,): how many slots each has."""
        self._starts = np.cumsum(self.counts) - self.counts

    def best(self, ranking: Ranking, k: int, order: Order) -> Ranking:
        """Return the k best slots of each query, from the places of its k best members.

        The k best slots are always slots of the k best members: every better member has a better slot.
        """
        queries, width = ranking.slots.shape
        members = ranking.slots.reshape(-1).numpy()
        counts = np.minimum(self.counts[members], k)
        ends = np.cumsum(counts)
        within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        slots = self._slots[np.repeat(self._starts[members], counts) + within]
        query = np.repeat(np.repeat(np.arange(queries), width), counts)
        # Members are in order already: only slots of members with equal scores are still to be sorted, by their number
        keys = np.repeat(rank_keys(ranking.scores, order).reshape(-1).numpy(), counts)
        is_worse = np.ones(len(keys), np.int64)
        is_worse[1:] = (query[1:] != query[:-1]) | (keys[1:] != keys[:-1])
        by_rank = np.lexsort((slots, is_worse.cumsum()))
        place_in_query = np.arange(len(query)) - np.searchsorted(query, query)
        kept = by_rank[place_in_query < k]
        scores = np.repeat(ranking.scores.reshape(-1).numpy(), counts)
        return Ranking(
            torch.from_numpy(slots[kept]).reshape(queries, -1), torch.from_numpy(scores[kept]).reshape(queries, -1)
        )


def members_by_key(slots: Tensor, keys: Tensor, codes: Tensor | None = None, groups: int = 1) -> Members:
    """Return a member for each key in each group. slots (n,), ascending; keys (n,): the key of each; codes (n,) int32."""
    both = keys.numpy() if codes is None else keys.numpy() * groups + codes.numpy()
    _, first, line = np.unique(both, return_index=True, return_inverse=True)
    # In the order of their first slots, so that ties among members go to the lower slot
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    firsts = torch.from_numpy(first[order])
    sharing = SharingSlots(slots.numpy(), rank[line], len(firsts))
    return Members(slots[firsts], None if codes is None else codes[firsts], groups, sharing)
