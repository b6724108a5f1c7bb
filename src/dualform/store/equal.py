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
        self._numbers: dict[bytes, int] = {}
        self._asked = 0
        self._gave_up = False

    def learn(self, keys: Encoded, first: int) -> None:
        """Keys that are stored already, from number `first` on."""
        for place, name in enumerate(_names(keys)):
            self._numbers.setdefault(name, first + place)

    def number(self, keys: Encoded, *, may_repeat: bool) -> tuple[Ints, Ints | None]:
        """The number of each key (n,), and the places of those that are new (None: all of them)."""
        count = len(keys.data)
        if not may_repeat or self._gave_up:
            self.stored += count
            return np.arange(self.stored - count, self.stored), None
        # No loop of Python's own: it would hold up the training
        names, known = _names(keys), self._numbers
        new = dict.fromkeys(filterfalse(known.__contains__, names))
        known.update(zip(new, range(self.stored, self.stored + len(new)), strict=True))
        numbers = np.fromiter(map(known.__getitem__, names), np.int64, count)
        _, first = np.unique(numbers, return_index=True)
        places = np.sort(first[numbers[first] >= self.stored])
        self.stored += len(new)
        self._asked += count
        if len(known) > PATIENCE and self._asked < 1.01 * len(known):
            known.clear()
            self._gave_up = True
        return numbers, places


def _names(keys: Encoded) -> list[bytes]:
    """A 128-bit digest of each key as it is stored, seeded with its exponent."""
    rows = np.ascontiguousarray(keys.data.numpy()).view(np.uint8)
    seeds = [0] * len(rows) if keys.exponents is None else keys.exponents.tolist()
    return list(map(xxhash.xxh3_128_digest, rows, seeds))
