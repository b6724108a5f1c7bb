"""Indexes, which find the best slots without computing all scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from dualform.query.groups import Groups
from dualform.query.ranking import Order, Ranking
from dualform.query.search.bounds import Bounds
from dualform.query.search.candidates import best_members
from dualform.query.search.members import Members, members_by_key
from dualform.query.search.sketch import MOST_VECTORS
from dualform.store.reader import Store

if TYPE_CHECKING:
    from dualform.query.scorer import Selection

FEWEST_SLOTS = 1 << 14
"""With fewer slots, all scores are computed."""
MOST_GROUPS = 64
"""With more groups, all scores are computed."""


@dataclass(frozen=True)
class TopKRequest:
    """A question for the k best of the selected slots, in each group if there are groups."""

    k: int
    order: Order
    selection: Selection
    groups: Groups | None = None

    @property
    def group_count(self) -> int:
        """How many rankings there will be."""
        return 1 if self.groups is None else len(self.groups)


class Index(Protocol):
    """Finds the best slots without computing all scores, exactly."""

    def search(self, request: TopKRequest) -> list[Ranking] | None:
        """Return the ranking of each group; None if computing all scores is cheaper."""


@dataclass(frozen=True)
class SlotIndex:
    """Finds the best slots of a layer by upper bounds on their scores."""

    store: Store
    layer: str
    end: int
    queries: int
    dtype: torch.dtype
    bounds_of: Callable[[Tensor, Order], Bounds]
    """From slot numbers (n,) to bounds on their scores."""
    keys_of: Callable[[Tensor], Tensor] | None = None
    """From slot numbers (n,) to numbers of keys; given if slots that share a key have the same score."""

    def search(self, request: TopKRequest) -> list[Ranking] | None:
        """Return the ranking of each group; None if computing all scores is cheaper."""
        if not FEWEST_SLOTS <= self.store.slots(self.layer) <= MOST_VECTORS:
            return None
        if request.group_count > MOST_GROUPS:
            return None
        members = self._members(request)
        if not len(members.slots):
            return None
        bounds = self.bounds_of(members.slots, request.order)
        return best_members(bounds, members, request.k, request.order, self.queries, self.dtype)

    def _members(self, request: TopKRequest) -> Members:
        """Return the selected slots with their groups, from the cache if the selection has a key."""
        selection = request.selection.key
        if selection is None:
            return self._find_members(request)
        by = () if request.groups is None else tuple(request.groups.by)
        are_keys = self.keys_of is not None  # attention ranks keys where contributions rank slots
        key = ("members", self.layer, are_keys, by, selection)
        return self.store.cached(key, lambda: self._find_members(request), self.end)

    def _find_members(self, request: TopKRequest) -> Members:
        slots = [np.zeros(0, np.int64)]
        codes = [np.zeros(0, np.int64)]
        for chunk in self.store.addresses(self.layer, end_step=self.end):
            selected = request.selection(chunk)
            places = np.arange(chunk.slots) if selected is None else np.flatnonzero(selected)
            slots.append(places + chunk.first_slot)
            if request.groups is not None:
                codes.append(request.groups(chunk)[places])
        numbers = torch.from_numpy(np.concatenate(slots))
        grouped = None if request.groups is None else torch.from_numpy(np.concatenate(codes)).int()
        # Finding equal keys takes longer than one question saves, so it is done only for members that are cached
        if self.keys_of is None or request.selection.key is None:
            return Members(numbers, grouped, request.group_count)
        return members_by_key(numbers, self.keys_of(numbers), grouped, request.group_count)
