"""Bounds on the time and the memory that a damaged store may take."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SECONDS = 20
"""What takes longer hangs."""
ALLOCATION = 1 << 30
"""More memory than this is a large allocation."""


def limit_memory() -> None:
    """Let larger allocations fail in this process, for good."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ALLOCATION, resource.RLIM_INFINITY))


def guarded(work: Callable[[], T]) -> T:
    """Do some work; a TimeoutError if it hangs."""

    def hang(*_: object) -> None:
        raise TimeoutError(f"it took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        return work()
    finally:
        signal.alarm(0)
