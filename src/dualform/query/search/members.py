"""What a search ranks: slots, or keys that several slots share."""

from __future__ import annotations

from dataclasses import dataclass
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
        return None if self.codes is None else self.codes.index_select(0, places)

    def slots_of(self, ranking: Ranking, k: int, order: Order) -> Ranking:
        """Return the k best slots, from the k best members."""
        return ranking if self.sharing is None else self.sharing.best(ranking, k, order)


class SharingSlots:
    """The slots of each member. Slots of one member have the same score."""

    def __init__(self, slots: Ints, member_of: Ints, first: Ints):
        """slots (m,), ascending, and the member of each. first (members,): each member's first slot, ascending."""
        self._slots = slots[np.argsort(member_of, kind="stable")]
        self._starts = np.searchsorted(np.sort(member_of), np.arange(len(first) + 1))
        self._first = first

    def best(self, ranking: Ranking, k: int, order: Order) -> Ranking:
        """Return the k best slots of each query, from its k best members.

        The k best slots are always slots of the k best members: every better member has a better slot.
        """
        queries, width = ranking.slots.shape
        members = np.searchsorted(self._first, ranking.slots.reshape(-1).numpy())
        begin = self._starts[members]
        counts = np.minimum(self._starts[members + 1] - begin, k)
        ends = np.cumsum(counts)
        within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        slots = self._slots[np.repeat(begin, counts) + within]
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
    member_slots = slots[firsts]
    sharing = SharingSlots(slots.numpy(), rank[line], member_slots.numpy())
    return Members(member_slots, None if codes is None else codes[firsts], groups, sharing)
