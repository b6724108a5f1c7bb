"""Keys that several slots share: which slots, and how many of each group."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.query.groups import Groups
from dualform.query.pruned import Members
from dualform.query.remembered import remembered
from dualform.query.written import written
from dualform.store.reader import Store

Ints = np.ndarray[Any, np.dtype[np.int64]]
STRETCH = 8192
"""So many keys are decoded at a time."""


class Visits:
    """The slots of each stored key of a layer, up to a step."""

    def __init__(self, store: Store, layer: str, end: int, *, silent: bool = True):
        """silent: whether slots that wrote nothing take part."""
        self._store, self._layer, self._end = store, layer, end
        chunks = list(store.addresses(layer, end_step=end))
        found = [c.key_numbers if c.key_numbers is not None else np.arange(c.slots) + self._first(c) for c in chunks]
        self.key_of: Ints = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
        """(n,): the number of the key of each slot that takes part."""
        self._chosen: Ints | None = None
        """(n,): the numbers of the slots that take part, ascending; None: all do."""
        if not silent and found:
            self._chosen = np.flatnonzero(np.concatenate([written(chunk) for chunk in chunks]))
            self.key_of = self.key_of[self._chosen]
        by_key = np.argsort(self.key_of, kind="stable")
        self._starts = np.searchsorted(self.key_of[by_key], np.arange(store.key_count(layer) + 1))
        self._order = by_key if self._chosen is None else self._chosen[by_key]

    @property
    def slots(self) -> Ints:
        """(n,): the numbers of the slots that take part, ascending."""
        return np.arange(len(self.key_of)) if self._chosen is None else self._chosen

    @cached_property
    def visited(self) -> Tensor:
        """(n,): the numbers of the keys that some slot has, ascending."""
        return torch.from_numpy(np.flatnonzero(np.diff(self._starts)))

    @cached_property
    def in_order(self) -> bool:
        """Whether keys were stored in the order of their first slots: not so after steps that no longer count (a resumed run)."""
        first = self._order[self._starts[self.visited.numpy()]]
        return bool((np.diff(first) > 0).all())

    def _first(self, chunk: Any) -> int:
        """The number of the first key that a chunk stores: in it each slot has a key of its own."""
        place = next(n for n, c in enumerate(self._store.manifest.chunks) if c is chunk.chunk)
        return sum(c.keys[chunk.number] for c in self._store.manifest.chunks[:place])

    def keys(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Numbers (n,) and keys (n, d_in) of those that some slot has."""
        counts = np.diff(self._starts)
        for first, keys in self._store.distinct_keys(self._layer, dtype):
            for low in range(0, len(keys), STRETCH):
                some = keys[low : low + STRETCH]
                there = counts[first + low : first + low + len(some)] > 0
                numbers = torch.arange(first + low, first + low + len(some))
                if there.all():
                    yield numbers, some
                elif there.any():
                    yield numbers[torch.from_numpy(there)], some[torch.from_numpy(there)]

    def slots_of(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """How many slots each of some keys has, (n,), and all these slots, one key's after the other's."""
        return _slots_of(self._order, self._starts, numbers.numpy())

    def shared(self, groups: Groups | None) -> Shared:
        """The keys of each group's slots, one line for each (key, group)."""
        if groups is None:
            return Shared(self.slots, self.key_of, None, 1)
        return Shared(self.slots, self.key_of, self._codes(groups), len(groups))

    def _codes(self, groups: Groups) -> Ints:
        """(n,): the group of each slot that takes part."""
        chunks = list(self._store.addresses(self._layer, end_step=self._end))
        codes: Ints = groups.of_slots(chunks).numpy()
        return codes if self._chosen is None else codes[self._chosen]

    def by_group(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """How many slots of each group a key has, (keys, groups), and each group's first slot, (groups,)."""
        codes = self._codes(groups)
        width = len(groups)
        shape = (len(self._starts) - 1, width)
        flat = np.bincount(self.key_of * width + codes, minlength=shape[0] * width)
        first = torch.full((width,), torch.iinfo(torch.int64).max)
        first.scatter_reduce_(0, torch.from_numpy(codes), torch.from_numpy(self.slots), "amin")
        return torch.from_numpy(flat.reshape(shape)), first


class Shared:
    """Keys that several slots of a group share, in the order of their first slots: ties among them are those among slots."""

    def __init__(self, numbers: Ints, key_of: Ints, codes: Ints | None, groups: int):
        """Of each slot that takes part: its number, its key, and its group; (n,) each, numbers ascend."""
        both = key_of if codes is None else key_of * groups + codes
        _, first, line, counts = np.unique(both, return_index=True, return_inverse=True, return_counts=True)
        order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        slots = numbers[np.argsort(place[line], kind="stable")]
        starts = np.concatenate([[0], np.cumsum(counts[order])])
        self.keys = torch.from_numpy(key_of[first[order]])
        """(n,): the number of each one's key."""
        self.members = Members(
            torch.arange(len(order)),
            None if codes is None else torch.from_numpy(codes[first[order]]).int(),
            groups,
            torch.from_numpy(counts[order]),
            lambda places: _slots_of(slots, starts, places.numpy()),
        )


def _slots_of(order: Ints, starts: Ints, wanted: Ints) -> tuple[Tensor, Tensor]:
    begin, end = starts[wanted], starts[wanted + 1]
    counts = end - begin
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return torch.from_numpy(counts), torch.from_numpy(order[np.repeat(begin, counts) + within])


def visits_of(store: Store, layer: str, end: int, *, silent: bool = True) -> Visits:
    """The visits of a layer, found once for an open store. silent: whether slots that wrote nothing take part."""
    return remembered(store, ("visits", layer, silent), lambda: Visits(store, layer, end, silent=silent), end)


def keys_of(store: Store, layer: str, end: int, slots: Tensor) -> Tensor:
    """The numbers of the keys of some slots."""
    return torch.from_numpy(visits_of(store, layer, end).key_of)[slots] if store.has_equal_keys(layer) else slots
