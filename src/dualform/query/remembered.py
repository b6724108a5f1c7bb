"""What takes a walk through a store to find out, and serves every later question: remembered as long as the store is open."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

from dualform.store.reader import Store

T = TypeVar("T")
_KNOWN: WeakKeyDictionary[Store, dict[Hashable, object]] = WeakKeyDictionary()


def remembered(store: Store, name: Hashable, find: Callable[[], T]) -> T:
    """What `find` gives, the first time; the same again, later."""
    known = _KNOWN.setdefault(store, {})
    if name not in known:
        known[name] = find()
    return cast(T, known[name])
