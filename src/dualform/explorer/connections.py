"""Connections that keep a server waiting: each has a deadline, and the oldest gives way to a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

RECEIVED = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR)
"""States of a client whose request has arrived in full, or never will."""


class Deadline:
    """Calls a function after some seconds, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, action: Callable[[], object]):
        self._loop = loop
        self._seconds = seconds
        self._action = action
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """A deadline that runs already stays as it is."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._action)

    def stop(self) -> None:
        """It may be started again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with deadlines.

    uvicorn itself waits without end for the rest of a request and for a client that does not read its answer, and counts such
    connections among those it serves. Here a request must arrive within `seconds`, head and body, however slowly its bytes
    trickle in; and a client must read its answer without a pause of that length.
    """

    seconds = 20.0
    most = 256
    """Connections at a time; one more, and the one that has waited longest is closed."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._waiting_since = self.loop.time()
        self._to_receive = Deadline(self.loop, self.seconds, self._give_up)
        self._to_send = Deadline(self.loop, self.seconds, self._give_up)

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._to_receive.start()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        """The deadline begins with the first byte of a request and ends with the last."""
        self._to_receive.start()
        super().data_received(data)
        if self.conn.their_state in RECEIVED:
            self._to_receive.stop()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        super().pause_writing()
        self._to_send.start()

    def resume_writing(self) -> None:
        """The client has read on."""
        self._to_send.stop()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """From now on the connection is idle; uvicorn closes it after `timeout_keep_alive`."""
        self._waiting_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines."""
        self._to_receive.stop()
        self._to_send.stop()
        super().connection_lost(exc)

    def _give_up(self) -> None:
        self.transport.abort()

    def _make_room(self) -> None:
        """Whoever asks is served before whoever waits: if there are too many, the one that has waited longest goes."""
        others = [one for one in self.connections if isinstance(one, TimedProtocol) and one is not self]
        others = [one for one in others if not one.transport.is_closing()]
        waiting = [one for one in others if one.is_waiting]
        if waiting and len(others) >= self.most:
            min(waiting, key=lambda one: one._waiting_since)._give_up()
