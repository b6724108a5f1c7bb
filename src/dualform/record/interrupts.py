"""Ctrl-C is held back while something must not be done by halves, and let through right afterwards.

An exception in the middle of `optimizer.step()` leaves weights that belong to no step, and one in the middle of a sum leaves totals that
are of no use. Both take milliseconds, so a first Ctrl-C waits for them; a second one does not. This works where Python handles
signals, in the main thread, and where SIGINT has a handler in Python.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from types import FrameType
from typing import Any


class Interrupts:
    """Holds SIGINT back. There is one handler for each process, so there is one of these."""

    def __init__(self) -> None:
        self._sections: dict[Hashable, FrameType] = {}
        """By who asked for it: the function that must not be interrupted."""
        self._previous: Callable[[int, FrameType | None], Any] = signal.default_int_handler
        self._is_waiting = False
        """Whether a SIGINT has come that is yet to be let through."""
        self.was_insisted = False
        """Whether a second SIGINT has come, which was not held back."""

    def hold(self, owner: Hashable, frame: FrameType) -> None:
        """Hold SIGINT back until `owner` releases it, or until the function that runs in `frame` has ended."""
        if threading.current_thread() is not threading.main_thread():
            return  # no handler ever runs in another thread
        current = signal.getsignal(signal.SIGINT)
        if current == self._handle:
            self._sections[owner] = frame
        elif callable(current):
            self._previous, self._is_waiting, self.was_insisted = current, False, False
            self._sections = {owner: frame}
            signal.signal(signal.SIGINT, self._handle)

    def release(self, owner: Hashable) -> None:
        """Let SIGINT through again, unless somebody else holds it back; raises what has been waiting."""
        if self._sections.pop(owner, None) is None or self._sections:
            return
        if threading.current_thread() is threading.main_thread():
            self._restore(sys._getframe(1))

    @contextlib.contextmanager
    def held(self, owner: Hashable) -> Iterator[None]:
        """Hold SIGINT back within a with statement."""
        self.hold(owner, sys._getframe(2))  # the function that has the with statement
        try:
            yield
        finally:
            self.release(owner)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # optimizer.step() may have ended with an exception, so that its section was never released
        self._sections = {owner: one for owner, one in self._sections.items() if is_running(one, frame)}
        if self._sections and not self._is_waiting:
            self._is_waiting = True
            return
        self.was_insisted = self._is_waiting
        self._sections, self._is_waiting = {}, True
        self._restore(frame)

    def _restore(self, frame: FrameType | None) -> None:
        was_waiting, self._is_waiting = self._is_waiting, False
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._previous)
        if was_waiting:
            self._previous(signal.SIGINT, frame)


def is_running(function: FrameType, current: FrameType | None) -> bool:
    """Whether a call of a function is the current one, or one of those that led to it."""
    while current is not None and current is not function:
        current = current.f_back
    return current is not None


INTERRUPTS = Interrupts()
