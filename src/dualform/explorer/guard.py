"""Who may ask, and how much: the Host header, the token, the origin, the size of a request, and the page's own rules."""

from __future__ import annotations

import hmac
import json
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

BODY = 64 << 10
"""The longest body."""
TARGET = 8 << 10
"""The longest address."""
COOKIE = "dualform"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""No script but our own files. Plotly sets styles on its elements, so styles may be inline."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
LOCAL = ("127.0.0.1", "localhost", "[::1]", "::1")


class Guard:
    """Stands before the application."""

    def __init__(self, app: Any, *, hosts: Collection[str], token: str | None):
        """hosts: what the Host header may say, without port. token: what must be shown, if anything."""
        self._app, self._hosts, self._token = app, {host.lower() for host in hosts}, token

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Let a request through, or say why not."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        guarded = _with_headers(send)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _say(guarded, *refusal)
            return
        if self._token is not None and not self._knows(headers):
            await self._let_in(scope, guarded)
            return
        await self._app(scope, _bounded(receive), guarded)

    def _refusal(self, scope: dict[str, Any], headers: dict[str, str]) -> tuple[int, str] | None:
        host = _name(headers.get("host", ""))
        if host not in self._hosts:
            return 400, "this server is not called that way (Host header)."
        if len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"") > TARGET:
            return 414, f"the address is longer than {TARGET} bytes."
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > BODY:
            return 413, f"a request may have at most {BODY} bytes."
        if scope["method"] not in ("GET", "HEAD"):
            origin = headers.get("origin")
            if origin is not None and _name(urlsplit(origin).netloc) not in self._hosts:
                return 403, "another page may not ask this."
            if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
                return 403, "another page may not ask this."
        return None

    def _knows(self, headers: dict[str, str]) -> bool:
        assert self._token is not None
        shown = [headers.get("authorization", "").removeprefix("Bearer ")]
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        if cookie is not None:
            shown.append(cookie.value)
        return any(hmac.compare_digest(one.encode(), self._token.encode()) for one in shown)

    async def _let_in(self, scope: dict[str, Any], send: Any) -> None:
        """The first visit carries the token in its address; from then on it is in a cookie."""
        assert self._token is not None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and hmac.compare_digest(given.encode(), self._token.encode()):
            cookie = f"{COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            headers = [(b"location", b"/"), (b"set-cookie", cookie.encode()), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 303, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        await _say(send, 401, "this server needs its token: open the address that was printed when it started.")


def _name(host: str) -> str:
    """A Host header without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _bounded(receive: Any) -> Any:
    """A body that did not say its length ends at the limit, too."""
    seen = 0

    async def receive_some() -> Any:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > BODY:
            return {"type": "http.disconnect"}
        return message

    return receive_some


def _with_headers(send: Any) -> Any:
    async def send_with(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            here = {name.lower() for name, _ in message["headers"]}
            more = [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in here]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return send_with


async def _say(send: Any, status: int, problem: str) -> None:
    body = json.dumps({"problem": problem}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
