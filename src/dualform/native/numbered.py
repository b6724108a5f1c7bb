"""Numbers of vectors by their content, in C: their names never become objects of Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from dualform.native.kernels import address, kernels

Ints = np.ndarray[Any, np.dtype[np.int64]]
NamesOf = np.ndarray[Any, np.dtype[np.uint64]]


class Table:
    """The names (128 bits) of the vectors seen so far, each with its number."""

    def __init__(self) -> None:
        self._entries, self._count = np.zeros((1 << 10, 3), np.uint64), 0

    def __len__(self) -> int:
        return self._count

    @staticmethod
    def names(rows: np.ndarray[Any, Any], seeds: np.ndarray[Any, np.dtype[np.int16]] | None) -> NamesOf:
        """The name of each row (n, 2)."""
        rows, found = np.ascontiguousarray(rows), np.empty((len(rows), 2), np.uint64)
        given = None if seeds is None else address(seeds)
        kernels().named(len(rows), rows.nbytes // max(len(rows), 1), address(rows), given, address(found))
        return found

    def number(self, names: NamesOf, following: int, *, in_place: bool = False) -> tuple[Ints, Ints]:
        """The number of each name (n,), and the places of those that are new.

        New ones are numbered from `following` on. in_place: a new one has the number following + its place.
        """
        self._make_room(len(names))
        numbers, places = np.empty(len(names), np.int64), np.empty(len(names), np.int64)
        count = kernels().numbered(
            *(len(names), address(names), address(self._entries), len(self._entries)),
            *(following, in_place, address(numbers), address(places)),
        )
        self._count += count
        return numbers, places[:count]

    def _make_room(self, more: int) -> None:
        """At most half of it is full: the next empty place is near."""
        capacity = len(self._entries)
        while 2 * (self._count + more) > capacity:
            capacity *= 2
        if capacity > len(self._entries):
            larger = np.zeros((capacity, 3), np.uint64)
            kernels().moved(address(self._entries), len(self._entries), address(larger), capacity)
            self._entries = larger
