"""Memory: what is freed goes back to the system, and what is needed again is kept.

PyTorch asks for aligned memory, and glibc before 2.38 seldom uses a freed aligned block again: a loop that decodes chunk after chunk
would seem to need more and more.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor


class Room:
    """Memory that is used again and again: fresh pages cost more than what is written to them."""

    def __init__(self, dtype: torch.dtype):
        self._memory = torch.empty(0, dtype=dtype)

    def __call__(self, n: int, m: int) -> Tensor:
        """A matrix with any content."""
        if self._memory.numel() < n * m:
            self._memory = self._memory.new_empty(n * m)
        return self._memory[: n * m].view(n, m)


def give_back() -> None:
    """Give memory that is free back to the system; takes milliseconds. Does nothing where the C library has no such call."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
