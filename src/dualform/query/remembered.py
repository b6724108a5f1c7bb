"""What takes a walk through a store to find out, and serves every later question: remembered as long as the store is open."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar
from weakref import WeakKeyDictionary

from dualform.store.moments import Moments
from dualform.store.reader import Store

T = TypeVar("T")
_KNOWN: WeakKeyDictionary[Store, Moments] = WeakKeyDictionary()


def remembered(store: Store, name: Hashable, find: Callable[[], T], end: int | None = None) -> T:
    """What `find` gives, the first time; the same again, later. end: what it is about, if only of a moment."""
    return _KNOWN.setdefault(store, Moments()).get(end, name, find)
