"""Results that take a pass over the store, kept while the store is open."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from dualform.store.reader import Store

T = TypeVar("T")


def cached(store: Store, key: Hashable, compute: Callable[[], T], end: int | None = None) -> T:
    """Return what `compute` returned the first time. end: the step that it is about; None: it holds for the whole store."""
    return store.cached(key, compute, end)
