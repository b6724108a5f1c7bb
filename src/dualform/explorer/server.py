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
from dualform.explorer.connections import TimedProtocol
from dualform.explorer.guard import LOCAL, Guard
from dualform.explorer.session import Session

ANY_ADDRESS = ("0.0.0.0", "::")
"""Hosts that stand for every address of this machine."""
PATIENCE = TimedProtocol.seconds
UNENCRYPTED = (
    "other machines can reach this address, and the traffic is not encrypted: whoever can listen on the network can read the token. "
    "Safer is --host 127.0.0.1 and a tunnel: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE."
)


class Server:
    """The explorer on an address of its own. `close()` ends it; so does the end of the program."""

    def __init__(self, session: Session, *, host: str = "127.0.0.1", port: int = 0, patience: float = PATIENCE):
        """port 0: any that is free. patience: seconds that a slow client is waited for."""
        self.host = host
        self.token = secrets.token_urlsafe(24)
        self._socket = _bound(host, port)
        self.port: int = self._socket.getsockname()[1]

        class Protocol(TimedProtocol):
            seconds = patience

        self._server = uvicorn.Server(
            uvicorn.Config(
                Guard(application(session), hosts=_names(host), token=self.token),
                http=Protocol,
                ws="none",
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                # The protocol itself closes waiting connections from its own limit on. This one is for requests.
                limit_concurrency=2 * Protocol.most,
                timeout_keep_alive=15,
                h11_max_incomplete_event_size=32 << 10,
                timeout_graceful_shutdown=2,
            )
        )
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """Where the server is, without the token: http://127.0.0.1:8000/."""
        host = _reachable(self.host) if self.host in ANY_ADDRESS else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/"

    @property
    def url(self) -> str:
        """The address with the token, to be opened in a browser; the browser then remembers the token."""
        return f"{self.address}?token={self.token}"

    def announce(self, *, ends: bool) -> None:
        """Print where to look. ends: whether Ctrl-C ends the server."""
        print(f"dualform explorer: {self.url}" + ("   (Ctrl-C ends it)" if ends else ""), flush=True)
        if not is_loopback(self.host):
            print(f"warning: {UNENCRYPTED.format(port=self.port)}", file=sys.stderr, flush=True)

    def __repr__(self) -> str:
        return f"Server({self.address!r})"

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
    if host in ANY_ADDRESS:  # everything this machine is called
        found = {socket.gethostname(), socket.getfqdn(), _reachable(host)}
        with contextlib.suppress(OSError):
            found |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
        names += [f"[{address}]" if ":" in address else address for address in found]
    return names


def _reachable(host: str) -> str:
    """The address by which other machines see this one; its name, if there is no network."""
    # Addresses for documentation, which exist nowhere. Nothing is sent: the system only looks up which way it would send.
    probes = [(socket.AF_INET, "192.0.2.1")]
    if host == "::":
        probes.insert(0, (socket.AF_INET6, "2001:db8::1"))
    for family, target in probes:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    return socket.gethostname()


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named in full: asyncio switches TCP_NODELAY on for IPPROTO_TCP only, and without it each answer takes 40 ms longer.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
