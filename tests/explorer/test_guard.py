"""Who may ask, and how much."""

import asyncio
import hmac
import re

import httpx
import pytest
from clients import Client

from dualform.explorer import guard
from dualform.explorer.guard import MAX_BODY, POLICY, Guard

TOKEN = "open-sesame"
BEARER = {"authorization": f"Bearer {TOKEN}"}
PERSON = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def guarded(app):
    return Guard(app, hosts=["localhost"], token=TOKEN)


def ask(guarded, method, address, headers=None, **options):
    return Client(guarded, **(BEARER | (headers or {})))(method, address, **options)


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1"])
def test_another_host_header_is_refused(guarded, host):
    assert ask(guarded, "GET", "/api/run", {"host": host}).status_code == 400


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "LOCALHOST:1"])
def test_our_own_host_header_is_taken(guarded, host):
    assert ask(guarded, "GET", "/api/log", {"host": host}).status_code == 200


def test_every_answer_has_the_policy(guarded):
    for headers in (BEARER, {}, PERSON):
        for address in ("/", "/api/log", "/nothing", "/page/app.js"):
            found = Client(guarded, **headers)("GET", address)
            assert found.headers["content-security-policy"] == POLICY
            assert found.headers["x-content-type-options"] == "nosniff"
    scripts = re.search(r"script-src ([^;]*);", POLICY).group(1)
    assert scripts == "'self'"


def test_a_long_body_is_refused(guarded):
    assert ask(guarded, "POST", "/api/jobs", content=b"x" * (MAX_BODY + 1)).status_code == 413


def test_a_long_body_without_a_length_is_cut_off(guarded):
    async def pieces():
        for _ in range(40):
            yield b"[" * 4096

    async def post():
        transport = httpx.ASGITransport(guarded, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=BEARER) as client:
            return await client.post("/api/jobs", content=pieces())

    assert asyncio.run(post()).status_code >= 400


def test_a_long_address_is_refused(guarded):
    assert ask(guarded, "GET", "/api/edit?drop=" + "x" * 9000).status_code == 414


# Other sites

ELSEWHERE = [
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},  # another port of this machine
    {"sec-fetch-site": "whatever"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:8001"},
    {"origin": "http://localhost"},
    {"origin": "https://localhost:8000"},
    {"origin": "http://localhost:8000.evil.example"},
    {"origin": "http://localhost:8000", "sec-fetch-site": "cross-site"},
]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("headers", ELSEWHERE)
def test_another_site_may_not_ask_anything(guarded, method, headers):
    for address in ("/api/log", "/api/jobs", "/api/edit?input=test:3&drop=label=3", "/openapi.json"):
        found = ask(guarded, method, address, {"host": "localhost:8000", **headers})
        assert found.status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin", "origin": "http://localhost:8000"},
        {"origin": "http://LOCALHOST:8000"},
    ],
)
def test_our_own_page_and_scripts_may_ask(guarded, headers):
    headers = {"host": "localhost:8000", **headers}
    assert ask(guarded, "GET", "/api/log", headers).status_code == 200
    assert ask(guarded, "DELETE", "/api/jobs/none", headers).status_code == 404


# The token


def test_without_the_token_nothing_is_told(guarded):
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"cookie": f"dualform={TOKEN}"}):
        for address in ("/", "/api/run", "/openapi.json", "/?token=wrong", "/?token=", f"/api/run?token={TOKEN}"):
            found = Client(guarded, **headers)("GET", address)
            assert found.status_code == 401
            assert "token" in found.json()["problem"]
            assert TOKEN not in found.text
    assert Client(guarded)("POST", "/api/jobs", json={"kind": "verify"}).status_code == 401


def test_a_person_without_the_token_sees_a_page_that_explains(guarded):
    for address in ("/", "/?token=wrong", "/api/run"):
        found = Client(guarded, **PERSON, host="localhost:8000")("GET", address)
        assert found.status_code == 401
        assert found.headers["content-type"] == "text/html; charset=utf-8"
        assert "dualform explore" in found.text
        assert "http://localhost:8000/?token=…" in found.text
        assert TOKEN not in found.text


def test_the_token_in_the_address_becomes_a_cookie(guarded):
    found = Client(guarded, host="localhost:8000")("GET", f"/?token={TOKEN}")
    assert found.status_code == 303
    assert found.headers["location"] == "/"
    cookie, *attributes = found.headers["set-cookie"].split("; ")
    assert cookie == f"dualform-8000={TOKEN}"
    assert attributes == ["HttpOnly", "SameSite=Strict", "Path=/"]
    known = Client(guarded, cookie=f'theme="dark; other=1; {cookie}', host="localhost:8000")
    assert known("GET", "/api/log").status_code == 200
    assert known("GET", "/").status_code == 200


def test_explorers_on_other_ports_have_cookies_of_their_own(guarded):
    cookies = f"dualform-8001=another; dualform-8000={TOKEN}"
    assert Client(guarded, cookie=cookies, host="localhost:8000")("GET", "/api/log").status_code == 200
    assert Client(guarded, cookie=cookies, host="localhost:8001")("GET", "/api/log").status_code == 401


def test_the_token_leaves_the_address_bar_and_the_rest_stays(guarded):
    for headers in ({}, {"cookie": f"dualform-80={TOKEN}"}):
        found = Client(guarded, **headers)("GET", f"/?a=1&token={TOKEN}&b=x%20y")
        assert (found.status_code, found.headers["location"]) == (303, "/?a=1&b=x+y")
    old = Client(guarded, cookie=f"dualform-80={TOKEN}")("GET", "/?token=of-yesterday")  # a known browser stays known
    assert (old.status_code, old.headers["location"], old.headers.get("set-cookie")) == (303, "/", None)


def test_a_link_of_another_site_opens_the_page_but_asks_nothing(guarded):
    """Browsers leave the cookie out then; what the page itself asks has it again."""
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", **PERSON}
    assert Client(guarded, **headers)("GET", "/").status_code == 200
    assert Client(guarded, **headers)("GET", f"/?token={TOKEN}").status_code == 303
    assert Client(guarded, **headers)("POST", "/").status_code == 403
    assert Client(guarded, **headers)("GET", "/api/run").status_code == 403
    assert Client(guarded)("GET", "/page/app.js").status_code == 200


def test_the_comparison_takes_the_same_time_for_every_token(guarded, monkeypatch):
    compared = []
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda a, b: (compared.append((a, b)), hmac_compare(a, b))[1])
    for headers in ({"authorization": "Bearer wrong"}, {"cookie": "dualform-80=wrong"}):
        assert Client(guarded, **headers)("GET", "/api/log").status_code == 401
    assert Client(guarded)("GET", "/?token=wrong").status_code == 401
    assert compared == [(b"wrong", TOKEN.encode())] * 3


hmac_compare = hmac.compare_digest


@pytest.mark.parametrize(
    "path",
    ["/page/../app.py", "/page/..%2f..%2fapp.py", "/page//etc/passwd", "/page/%2e%2e/session.py", "/page/"],
)
def test_no_path_reaches_the_disk(guarded, path):
    found = ask(guarded, "GET", path)
    assert found.status_code == 404
    assert "import" not in found.text
