"""Equal keys are stored once, found by their content: an input layer sees each image in every epoch."""

from __future__ import annotations

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
        numbers, new = [], []
        for place, name in enumerate(_names(keys)):
            number = self._numbers.setdefault(name, self.stored)
            if number == self.stored:
                new.append(place)
                self.stored += 1
            numbers.append(number)
        self._asked += count
        if len(self._numbers) > PATIENCE and self._asked < 1.01 * len(self._numbers):
            self._numbers.clear()
            self._gave_up = True
        return np.array(numbers, dtype=np.int64), np.array(new, dtype=np.int64)


def _names(keys: Encoded) -> list[bytes]:
    """A 128-bit digest of each key as it is stored, seeded with its exponent."""
    rows = np.ascontiguousarray(keys.data.numpy()).view(np.uint8)
    seeds = [0] * len(rows) if keys.exponents is None else keys.exponents.tolist()
    return list(map(xxhash.xxh3_128_digest, rows, seeds))
