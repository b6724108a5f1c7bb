"""Serving: the address, the browser, and a server that runs beside a notebook."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import secrets
import socket
import sys
import threading
import time
import webbrowser
from typing import Any

import uvicorn

from dualform.errors import QuestionError
from dualform.explorer.app import application
from dualform.explorer.guard import LOCAL, Guard
from dualform.explorer.session import Session

CONNECTIONS = 256
"""So many connections at once; more are told to come back."""


class Server:
    """The explorer on an address of its own. `close()` ends it; so does the end of the program."""

    def __init__(self, session: Session, *, host: str = "127.0.0.1", port: int = 0):
        """port 0: any that is free. A host other than this machine's own loopback needs a token, made here."""
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)
        self._socket = _bound(host, port)
        self.host, self.port = host, self._socket.getsockname()[1]
        guarded = Guard(application(session), hosts=_names(host), token=self.token)
        self._server = uvicorn.Server(
            uvicorn.Config(
                guarded,
                log_level="warning",
                access_log=False,
                limit_concurrency=CONNECTIONS,
                timeout_keep_alive=15,
                h11_max_incomplete_event_size=32 << 10,
                server_header=False,
                timeout_graceful_shutdown=2,
            )
        )
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where to look; with the token, if there is one."""
        shown = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        shown = f"[{shown}]" if ":" in shown else shown
        return f"http://{shown}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    def start(self) -> Server:
        """Serve in a thread of its own; returns when it answers."""
        if self._thread is not None:
            return self
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
        return self

    def wait(self) -> None:
        """Until interrupted."""
        try:
            while self._thread is not None and self._thread.is_alive():
                self._thread.join(0.5)
        except KeyboardInterrupt:
            self.close()

    def open_browser(self) -> None:
        """Show the page, if there is a browser."""
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(self.url)

    def close(self) -> None:
        """End."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(5)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.close()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names(host: str) -> list[str]:
    """What the Host header may say."""
    named = f"[{host}]" if ":" in host else host
    if is_loopback(host):
        return [*LOCAL, named]
    names = [named, *LOCAL]
    if host in ("0.0.0.0", "::"):  # everything this machine is called
        names += [socket.gethostname(), socket.getfqdn()]
        with contextlib.suppress(OSError):
            found = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
            names += [f"[{address}]" if ":" in address else address for address in found]
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # nothing is sent; it says which address others see
            names.append(probe.getsockname()[0])
    return names


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        taken = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
        hint = "Another --port may be free" if taken else "Expected an address of this machine, such as 127.0.0.1"
        raise QuestionError(f"cannot listen on {host}, port {port}: {error}. {hint}.") from None
    return bound


def is_interactive() -> bool:
    """Whether a person sits at this very Python: a notebook or a prompt."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules
