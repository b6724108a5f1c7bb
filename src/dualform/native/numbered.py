"""Numbers of vectors by their content, in one loop in C: their names never become objects of Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from dualform.native.kernels import kernels

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Table:
    """The names (128 bits) of the vectors seen so far, each with its number."""

    def __init__(self) -> None:
        self._entries, self._count = np.zeros((1 << 10, 3), np.uint64), 0

    def __len__(self) -> int:
        return self._count

    def number(
        self,
        rows: np.ndarray[Any, Any],
        seeds: np.ndarray[Any, np.dtype[np.int16]] | None,
        following: int,
        *,
        in_place: bool = False,
    ) -> tuple[Ints, Ints]:
        """The number of each row (n,), and the places of those that are new.

        New ones are numbered from `following` on. in_place: a new one has the number following + its place.
        """
        rows = np.ascontiguousarray(rows)
        self._make_room(len(rows))
        numbers, places = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        count = kernels().numbered(
            *(len(rows), rows.nbytes // max(len(rows), 1), rows.ctypes.data),
            *(None if seeds is None else seeds.ctypes.data, self._entries.ctypes.data, len(self._entries)),
            *(following, in_place, numbers.ctypes.data, places.ctypes.data),
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
            kernels().moved(self._entries.ctypes.data, len(self._entries), larger.ctypes.data, capacity)
            self._entries = larger
