"""Memory: what is freed goes back to the system, what is needed again is kept, and what is read here and there lies in large pages.

PyTorch asks for aligned memory, and glibc before 2.38 seldom uses a freed aligned block again: a loop that decodes chunk after chunk
would seem to need more and more.

Vectors that are picked out of gigabytes lie in as many pages of 4 KB, and to find each of these takes the processor as long as to read it.
Linux can map files by pages of 2 MB, and reads as much at a time then: for stores that fit into memory, where nothing is read twice.
And what goes to the disk from where it is takes Linux less time if it lies in few pages.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20


class Room:
    """Memory that is used again and again: fresh pages cost more than what is written to them."""

    def __init__(self, dtype: torch.dtype):
        self._memory = torch.empty(0, dtype=dtype)

    def __call__(self, n: int, m: int) -> Tensor:
        """A matrix with any content."""
        if self._memory.numel() < n * m:
            self._memory = self._memory.new_empty(n * m)
        return self._memory[: n * m].view(n, m)


@functools.cache
def _system(name: str) -> Callable[..., int] | None:
    """A call of Linux, if it has it."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found


def give_back() -> None:
    """Let go of what is free; milliseconds. Does nothing where the system's library has no such call."""
    trim = _system("malloc_trim")
    if trim is not None:
        trim(0)


def memory() -> int:
    """How many bytes the machine has; 0: nobody knows."""
    names = getattr(os, "sysconf_names", {})
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE if "SC_PHYS_PAGES" in names else 0


def in_large_pages(array: Tensor) -> None:
    """Ask the system to map an array, which nobody has touched yet, by large pages; where it cannot, nothing happens."""
    advise, wanted = _system("madvise"), getattr(mmap, "MADV_HUGEPAGE", None)
    if advise is None or wanted is None or array.nbytes < LARGE_PAGE:
        return
    begin = array.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = array.data_ptr() + array.nbytes - begin
    advise(ctypes.c_void_p(begin), ctypes.c_size_t(size), wanted)
