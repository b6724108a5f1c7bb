"""How long work reports its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def ignore_progress(what: str, done: int, total: int) -> None:
    """Report to no one: the default of functions that always report."""
