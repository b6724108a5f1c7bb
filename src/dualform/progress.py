"""How long work reports its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def ignore_progress(what: str, done: int, total: int) -> None:
    """Report to no one: the default of functions that always report."""


def report(what: str, items: Sequence[T], progress: Progress | None) -> Iterator[T]:
    """Return items one after the other, and report how many are done."""
    for done, item in enumerate(items):
        if progress is not None:
            progress(what, done, len(items))
        yield item
    if progress is not None:
        progress(what, len(items), len(items))
