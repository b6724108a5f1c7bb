"""Results that take a pass over the store, kept while the store is open."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from cachetools import LRUCache

from dualform.store.reader import Store

T = TypeVar("T")
STEPS = 8
"""How many steps of training are remembered at a time: what is known of one may take tens of bytes per slot."""


class _StoreCache:
    """The results of one store: those about a step of training, and those about the whole store."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_step: LRUCache[int, dict[Hashable, Any]] = LRUCache(STEPS)
        self._lasting: dict[Hashable, Any] = {}

    def entries(self, step: int | None) -> dict[Hashable, Any]:
        if step is None:
            return self._lasting
        with self._lock:
            if step not in self._by_step:
                self._by_step[step] = {}
            return self._by_step[step]


_CACHES: WeakKeyDictionary[Store, _StoreCache] = WeakKeyDictionary()
_LOCK = Lock()


def cached(store: Store, key: Hashable, compute: Callable[[], T], end: int | None = None) -> T:
    """Return what `compute` returned the first time. end: the step that it is about; None: it holds for the whole store.

    Two threads may compute the same result at the same time; both are right, and one of them stays.
    """
    with _LOCK:
        cache = _CACHES.setdefault(store, _StoreCache())
    entries = cache.entries(end)
    if key not in entries:
        entries[key] = compute()
    return cast(T, entries[key])
