"""Run a piece of work in a forked child: what it does to memory, threads and locks goes with it.

PyTorch and dualform are imported once, in the parent. The parent itself must never use Polars: its thread pool does not
survive a fork.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SECONDS = 120.0
"""A child that takes longer hangs."""


class ChildError(Exception):
    """The child raised an exception, crashed, or did not end in time."""


def start(work: Callable[[], object]) -> int:
    """Fork a child that does some work, then ends with status 0, or with 1 after an exception; gives its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def call(work: Callable[[], T], seconds: float = SECONDS) -> T:
    """What the work gives, done in a child. Raises ChildError with the child's traceback if it fails."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        answer: tuple[str, Any]
        try:
            answer = ("gave", work())
        except BaseException:
            answer = ("raised", traceback.format_exc())
        try:
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        data = _read(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
    if data is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if data is None:
        raise ChildError(f"the child did not end within {seconds:.0f} s")
    if not data:
        raise ChildError(f"the child crashed: {_described(status)}")
    what, value = pickle.loads(data)
    if what == "raised":
        raise ChildError(value)
    found: T = value
    return found


def _read(descriptor: int, until: float) -> bytes | None:
    """Everything up to the end of a pipe; None if that does not come in time."""
    pieces: list[bytes] = []
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return None
        piece = os.read(descriptor, 1 << 20)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)


def _described(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
