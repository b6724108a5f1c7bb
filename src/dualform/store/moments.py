"""What takes a while to find out about a moment of training: known for the moments that were asked about last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import TypeVar, cast

T = TypeVar("T")
MOST = 8
"""So many moments. Each may take tens of bytes for each slot, and a run has thousands of them."""


class Moments:
    """By moment (steps; None: none in particular, which stays) and name, what was found out."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, dict[Hashable, object]] = OrderedDict()
        self._always: dict[Hashable, object] = {}
        self._lock = Lock()

    def get(self, moment: int | None, name: Hashable, find: Callable[[], T]) -> T:
        """What `find` gives, the first time; the same again, later."""
        known = self._always if moment is None else self._of(moment)
        if name not in known:
            known[name] = find()
        return cast(T, known[name])

    def _of(self, moment: int) -> dict[Hashable, object]:
        with self._lock:
            known = self._known.setdefault(moment, {})
            self._known.move_to_end(moment)
            if len(self._known) > MOST:
                self._known.popitem(last=False)
            return known
