"""Who may ask, and how much."""

import asyncio
import re

import httpx
import pytest

from conftest import Client
from dualform.explorer.guard import BODY, POLICY, Guard
from dualform.explorer.server import Server, is_loopback


@pytest.fixture(scope="module")
def guarded(app):
    return Guard(app, hosts=["localhost"], token=None)


@pytest.fixture(scope="module")
def locked(app):
    return Guard(app, hosts=["localhost"], token="open-sesame")


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1"])
def test_another_host_header_is_refused(guarded, host):
    assert Client(guarded, host=host)("GET", "/api/run").status_code == 400


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "LOCALHOST:1"])
def test_our_own_host_header_is_taken(guarded, host):
    assert Client(guarded, host=host)("GET", "/api/log").status_code == 200


def test_every_answer_has_the_policy(guarded):
    for address in ("/", "/api/log", "/nothing", "/page/app.js"):
        found = Client(guarded)("GET", address)
        assert found.headers["content-security-policy"] == POLICY
        assert found.headers["x-content-type-options"] == "nosniff"
    scripts = re.search(r"script-src ([^;]*);", POLICY).group(1)
    assert scripts == "'self'"


def test_a_long_body_is_refused(guarded):
    assert Client(guarded)("POST", "/api/jobs", content=b"x" * (BODY + 1)).status_code == 413


def test_a_long_body_without_a_length_is_cut_off(guarded):
    async def pieces():
        for _ in range(40):
            yield b"[" * 4096

    async def ask():
        transport = httpx.ASGITransport(guarded, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/api/jobs", content=pieces())

    assert asyncio.run(ask()).status_code >= 400


def test_a_long_address_is_refused(guarded):
    assert Client(guarded)("GET", "/api/edit?drop=" + "x" * 9000).status_code == 414


@pytest.mark.parametrize(
    "headers", [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}]
)
def test_another_page_may_not_start_anything(guarded, headers):
    assert Client(guarded, **headers)("POST", "/api/jobs", json={"kind": "verify"}).status_code == 403


def test_without_the_token_nothing_is_told(locked):
    for address in ("/", "/api/run", "/openapi.json", "/page/app.js", "/?token=wrong", "/api/run?token=open-sesame"):
        found = Client(locked)("GET", address)
        assert found.status_code == 401
        assert "token" in found.json()["problem"]


def test_the_token_is_shown_once_and_then_a_cookie(locked):
    found = Client(locked)("GET", "/?token=open-sesame")
    assert found.status_code == 303
    assert found.headers["location"] == "/"
    cookie = found.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert Client(locked, cookie=cookie.partition(";")[0])("GET", "/api/log").status_code == 200
    assert Client(locked, authorization="Bearer open-sesame")("GET", "/api/log").status_code == 200
    assert Client(locked, cookie="dualform=wrong")("GET", "/api/log").status_code == 401


@pytest.mark.parametrize(
    "path",
    ["/page/../app.py", "/page/..%2f..%2fapp.py", "/page//etc/passwd", "/page/%2e%2e/session.py", "/page/"],
)
def test_no_path_reaches_the_disk(guarded, path):
    found = Client(guarded)("GET", path)
    assert found.status_code == 404
    assert "import" not in found.text


def test_this_machine_alone_unless_told():
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")


def test_a_server_for_others_has_a_token(session):
    with Server(session, host="0.0.0.0") as server:
        assert server.token
        address = f"http://127.0.0.1:{server.port}/api/log"
        assert httpx.get(address).status_code == 401
        assert httpx.get(address, headers={"authorization": f"Bearer {server.token}"}).status_code == 200


def test_a_server_of_ones_own_has_none(session):
    with Server(session) as server:
        assert server.token is None
        assert server.url == f"http://127.0.0.1:{server.port}/"
        assert httpx.get(server.url + "api/log").status_code == 200
        from dualform.errors import QuestionError

        with pytest.raises(QuestionError, match="cannot listen"):
            Server(session, port=server.port)
