"""Freed memory goes back to the system.

PyTorch asks for aligned memory, and glibc before 2.38 seldom uses a freed aligned block again: a loop that decodes chunk after chunk
would seem to need more and more.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def give_back() -> None:
    """Let go of what is free; milliseconds. Does nothing where the system's library has no such call."""
    trim = _trim()
    if trim is not None:
        trim(0)
