"""Polars in forked processes: its threads do not survive a fork, and whoever waits for them waits for ever.

A child is cut off if these threads had begun in its parent, be it by a recording, a question or the user's own tables. Importing Polars
begins none. Everything of ours that uses Polars asks `require_polars()` first.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path

from dualform.errors import ForkedError

TASKS = Path("/proc/self/task")
"""Linux: a folder for each thread of this process."""
THREAD = re.compile(r"polars-\d+\s*")
"""The names of the threads that Polars computes with."""
PATIENCE = 2.0
"""How many seconds a thread may take to get its name."""


class _Checked:
    """What is known of the processes that this module was imported in."""

    process: int | None = None if "polars" in sys.modules else os.getpid()
    """Here Polars works. None: it was imported before this module, perhaps in the parent of this process."""
    is_used = False
    """Whether Polars was about to be used here, or in the process that this one was forked from."""


def require_polars() -> None:
    """Raise ForkedError if Polars would wait for threads that this process does not have."""
    process = os.getpid()
    if process != _Checked.process:
        if _is_cut_off():
            raise ForkedError(
                f"process {process} was forked from one that had used Polars (as recordings and questions do), whose threads do not "
                f'survive a fork: what it waits for would never come. Start such a process by the method "spawn" or "forkserver", '
                f'multiprocessing.get_context("spawn"), or do this in the parent.'
            )
        _Checked.process = process
    _Checked.is_used = True


def _is_cut_off() -> bool:
    if not TASKS.is_dir():
        return _Checked.is_used
    import polars as pl

    # Begins the threads, unless Polars believes that they run already
    expected = pl.thread_pool_size()
    until = time.monotonic() + PATIENCE
    while not any(THREAD.fullmatch(name) for name in _thread_names()):
        if len(_thread_names()) <= expected or time.monotonic() > until:
            return True
        time.sleep(0.001)  # each gives itself its name when it begins to run
    return False


def _thread_names() -> list[str]:
    names = []
    for task in TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text())
    return names
