"""Large pages: the system takes less time for what lies in few of them.

A vector that is picked out of gigabytes lies in one or two pages of 4 KB, and the processor must find these first. What goes to the disk from
where it is, the system holds and lets go page by page. Linux can use pages of 2 MB, if it is asked before anybody touches the memory. Of a
file it then reads as much at a time, so it is asked only for files that stay in memory once they have been read.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

LARGE_PAGE = 2 << 20
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""What a container may use, if there is a limit."""


@functools.cache
def system_call(name: str) -> Callable[..., int] | None:
    """A function of Linux's own library, if it has it."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found


def memory_bytes() -> int:
    """How much memory there is, for all that runs here; 0: nobody knows."""
    known = [os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE] if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}) else []
    for path in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is no such limit
            known.append(int(path.read_text()))
    return max(0, min(known, default=0))


def in_large_pages(begin: int, nbytes: int) -> None:
    """Ask the system for large pages, from an address on. Where it has none, or there is less than one, all stays as it is."""
    advise, wanted = system_call("madvise"), getattr(mmap, "MADV_HUGEPAGE", None)
    if advise is None or wanted is None or nbytes < LARGE_PAGE:
        return
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    advise(ctypes.c_void_p(first), ctypes.c_size_t(begin + nbytes - first), wanted)
