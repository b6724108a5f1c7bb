"""Short arrays whose place in memory is known: to ask NumPy for it takes longer than to fill them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dualform.native.kernels import address

STRETCH = 1 << 17
"""So many numbers are taken from NumPy at a time."""


class Arena:
    """Arrays of float64, cut one after the other from longer ones; these are freed with the last of their parts."""

    def __init__(self) -> None:
        self._memory, self._at, self._used = np.empty(0), 0, 0

    def take(self, size: int) -> tuple[np.ndarray[Any, np.dtype[np.float64]], int]:
        """An array (size,) with any content, and where it begins in memory."""
        if self._used + size > len(self._memory):
            self._memory = np.empty(max(size, STRETCH))
            self._at, self._used = address(self._memory), 0
        low, self._used = self._used, self._used + size
        return self._memory[low : self._used], self._at + 8 * low
