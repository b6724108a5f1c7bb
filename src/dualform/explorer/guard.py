"""The checks before every request: the Host header, other sites, the token, and sizes; and the headers of every answer."""

from __future__ import annotations

import hmac
import json
from collections.abc import Collection
from html import escape
from typing import Any
from urllib.parse import parse_qsl, urlencode

MAX_BODY = 64 << 10
"""Bytes of the longest body."""
MAX_ADDRESS = 8 << 10
"""Bytes of the longest address."""
COOKIE = "dualform"
"""Beginning of the cookie's name; the port follows, since browsers send a cookie to every port of a host."""
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
OWN = ("same-origin", "none")
"""Values of Sec-Fetch-Site for requests of our own page, and for addresses that a person has typed or opened."""
NO_TOKEN = "this server needs its token: open the address that was printed when it started."
EXPLANATION = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>dualform explorer: the token is missing</title>
<style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 40em; margin: 3em auto; padding: 0 1em }}</style></head>
<body><h1>The token is missing</h1>
<p>This is a dualform explorer. To keep other users of this machine and network out, it opens only with the token in its address:</p>
<p><code>http://{host}/?token=…</code></p>
<p>The complete address was printed where the explorer was started: in the terminal of <code>dualform explore</code>, or in the
notebook or script that called <code>dual.explore()</code>. Open it once, and this browser has access until it is closed.</p>
<p>An explorer that was started again has another token.</p></body></html>
"""
Scope = dict[str, Any]


class Guard:
    """Passes a request on to the application, or answers why not."""

    def __init__(self, app: Any, *, hosts: Collection[str], token: str):
        """hosts: names that the Host header may have, without the port. token: what every client must know."""
        self._app = app
        self._hosts = {host.lower() for host in hosts}
        self._token = token

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Check one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        send = _with_headers(send)
        refusal = self._size_refusal(scope, headers) or self._site_refusal(scope, headers)
        if refusal is not None:
            await _send_problem(send, *refusal)
            return
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if scope["path"] == "/" and "token" in dict(query):
            await self._take_token(query, headers, send)
            return
        if not self._is_known(headers) and not _is_public(scope, headers):
            await _send_no_token(headers, send)
            return
        await self._app(scope, _bounded(receive), send)

    def _size_refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        if len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"") > MAX_ADDRESS:
            return 414, f"the address is longer than {MAX_ADDRESS} bytes."
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY:
            return 413, f"a request may have at most {MAX_BODY} bytes."
        return None

    def _site_refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        """Refuse what another web site makes a browser ask, whatever the method."""
        host = headers.get("host", "").strip().lower()
        if _without_port(host) not in self._hosts:
            return 400, "this server is not called that way (Host header)."
        # The page itself may be opened by a link from anywhere: it is the same for everybody and changes nothing.
        opens_the_page = scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        if headers.get("sec-fetch-site", "none") not in OWN and not opens_the_page:
            return 403, "another site may not ask this."
        # Browsers without Sec-Fetch-Site, and scripts: an Origin must be ours with scheme and port.
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"{scope.get('scheme', 'http')}://{host}":
            return 403, "another site may not ask this."
        return None

    def _is_known(self, headers: dict[str, str]) -> bool:
        """Whether a request has the token, in its cookie or as Authorization: Bearer."""
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(credentials.strip()):
            return True
        cookies = (cookie.strip().partition("=") for cookie in headers.get("cookie", "").split(";"))
        name = _cookie_name(headers)
        return any(found == name and self._is_token(value) for found, _, value in cookies)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    async def _take_token(self, query: list[tuple[str, str]], headers: dict[str, str], send: Any) -> None:
        """Exchange the token in an address for a cookie, and lead on to the address without it."""
        is_right = any(name == "token" and self._is_token(value) for name, value in query)
        if not is_right and not self._is_known(headers):
            await _send_no_token(headers, send)
            return
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        location = f"/?{rest}" if rest else "/"
        answer = [(b"location", location.encode()), (b"content-length", b"0"), (b"cache-control", b"no-store")]
        if is_right:
            cookie = f"{_cookie_name(headers)}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            answer.append((b"set-cookie", cookie.encode()))
        await send({"type": "http.response.start", "status": 303, "headers": answer})
        await send({"type": "http.response.body", "body": b""})


def _is_public(scope: Scope, headers: dict[str, str]) -> bool:
    """Whether everybody may have this: files of the page, which hold nothing of a run.

    Browsers leave a SameSite=Strict cookie out when a link of another site, such as a notebook's, leads here. The page is then
    served without it; the questions that the page asks have the cookie again.
    """
    if scope["method"] not in ("GET", "HEAD"):
        return False
    is_from_elsewhere = headers.get("sec-fetch-site", "none") not in OWN
    return scope["path"].startswith("/page/") or (scope["path"] == "/" and is_from_elsewhere)


def _cookie_name(headers: dict[str, str]) -> str:
    """With the port as the browser knows it, which a tunnel may have changed."""
    port = headers["host"].rpartition(":")[2].strip()
    return f"{COOKIE}-{port if port.isdecimal() else 80}"


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _bounded(receive: Any) -> Any:
    """End a body at the limit that did not say its length."""
    seen = 0

    async def receive_bounded() -> Any:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY:
            return {"type": "http.disconnect"}
        return message

    return receive_bounded


def _with_headers(send: Any) -> Any:
    async def send_with_headers(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            missing = [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in present]
            message = {**message, "headers": [*message["headers"], *missing]}
        await send(message)

    return send_with_headers


async def _send_no_token(headers: dict[str, str], send: Any) -> None:
    """Explain to a person on a page, and to a program in JSON."""
    if "text/html" in headers.get("accept", ""):
        page = EXPLANATION.format(host=escape(headers["host"]))
        await _send(send, 401, b"text/html; charset=utf-8", page.encode())
    else:
        await _send_problem(send, 401, NO_TOKEN)


async def _send_problem(send: Any, status: int, problem: str) -> None:
    await _send(send, status, b"application/json", json.dumps({"problem": problem}).encode())


async def _send(send: Any, status: int, kind: bytes, body: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), (b"cache-control", b"no-store")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
