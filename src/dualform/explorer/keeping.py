"""Results that are kept for a while: the latest used, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """A bounded memory. What is being computed by one thread is waited for by the others."""

    def __init__(self, limit: int, size: Callable[[T], int]):
        self._limit, self._size = limit, size
        self._found: OrderedDict[Hashable, T] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        self._busy: dict[Hashable, Lock] = {}

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What is kept for a key, or computed now."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
            mine = self._busy.setdefault(key, Lock())
        with mine:
            with self._lock:
                if key in self._found:
                    return self._found[key]
            try:
                result = compute()
                self.put(key, result)
            finally:
                with self._lock:
                    self._busy.pop(key, None)
        return result

    def put(self, key: Hashable, result: T) -> None:
        """Keep what was computed elsewhere."""
        size = self._size(result)
        with self._lock:
            if key in self._found or size > self._limit:
                return
            self._found[key] = result
            self._bytes += size
            while self._bytes > self._limit:
                _, gone = self._found.popitem(last=False)
                self._bytes -= self._size(gone)

    def peek(self, key: Hashable) -> T | None:
        """What is kept for a key, if anything is."""
        with self._lock:
            return self._found.get(key)

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._found

    @property
    def nbytes(self) -> int:
        """How much is kept."""
        return self._bytes
