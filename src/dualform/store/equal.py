"""Equal keys are stored once, found by their content: an input layer sees each image in every epoch."""

from __future__ import annotations

from itertools import filterfalse
from typing import Any

import numpy as np
import xxhash

from dualform.store.encoding import Encoded

Ints = np.ndarray[Any, np.dtype[np.int64]]

PATIENCE = 1_000_000
"""After this many keys that hardly ever came again (augmented data), a layer's keys are no longer compared."""


class EqualKeys:
    """The distinct keys of one layer, numbered in the order in which they are stored."""

    def __init__(self, stored: int = 0) -> None:
        self.stored = stored
        self._known = Names()
        self._asked = 0
        self._gave_up = False

    def learn(self, keys: Encoded, first: int) -> None:
        """Keys that are stored already, from number `first` on."""
        self._known.number(self._names(keys), first, in_place=True)

    def number(self, keys: Encoded, *, may_repeat: bool) -> tuple[Ints, Ints | None]:
        """The number of each key (n,), and the places of those that are new (None: all of them)."""
        count = keys.count
        if not may_repeat or self._gave_up:
            self.stored += count
            return np.arange(self.stored - count, self.stored), None
        numbers, places = self._known.number(self._names(keys), self.stored)
        self.stored += len(places)
        self._asked += count
        if len(self._known) > PATIENCE and self._asked < 1.01 * len(self._known):
            self._known = Names()
            self._gave_up = True
        return numbers, places

    def _names(self, keys: Encoded) -> list[bytes]:
        return self._known.names(keys.data.numpy(), None if keys.exponents is None else keys.exponents.numpy())


class Names:
    """Distinct vectors by their content, each with its number."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    @staticmethod
    def names(rows: np.ndarray[Any, Any], seeds: np.ndarray[Any, np.dtype[np.int16]] | None) -> list[bytes]:
        """The name of each row."""
        # A 128-bit digest, seeded with the exponent. No loop of Python's own: it would hold up the training
        given = [0] * len(rows) if seeds is None else seeds.tolist()
        return list(map(xxhash.xxh3_128_digest, np.ascontiguousarray(rows).view(np.uint8), given))

    def number(self, names: list[bytes], following: int, *, in_place: bool = False) -> tuple[Ints, Ints]:
        """The number of each name (n,), and the places of those that are new."""
        known = self._numbers
        new = dict.fromkeys(filterfalse(known.__contains__, names))
        if in_place:
            first_at = dict(zip(reversed(names), range(len(names) - 1, -1, -1), strict=True))
            known.update((name, following + first_at[name]) for name in new)
        else:
            known.update(zip(new, range(following, following + len(new)), strict=True))
        numbers = np.fromiter(map(known.__getitem__, names), np.int64, len(names))
        _, first = np.unique(numbers, return_index=True)
        return numbers, np.sort(first[numbers[first] >= following])
