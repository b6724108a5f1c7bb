"""Who gets in, in a real browser: the token, links, and pages of other sites."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from browsing import PATIENCE, browser, needs_browser, page, settled

from dualform.explorer.server import Server

pytestmark = needs_browser


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def server(session):
    with Server(session) as started:
        yield started


@contextlib.contextmanager
def another_site(html):
    """A page of another site; gives its address. For a browser, localhost and 127.0.0.1 are different sites."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        try:
            yield f"http://localhost:{site.server_port}/"
        finally:
            site.shutdown()
            thread.join()


def test_the_token_leaves_the_address_bar_and_the_view_stays(chromium, server):
    with page(chromium, f"{server.url}#/prediction?input=test:3") as look:
        look.get_by_role("heading", name="test example 3", exact=True).wait_for()
        assert look.url == f"{server.address}#/prediction?input=test:3"
        [cookie] = look.context.cookies()
        assert cookie["name"] == f"dualform-{server.port}"
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"


def test_a_copied_link_opens_the_same_view_for_the_same_person(chromium, server):
    with page(chromium, f'{server.url}#/edit?input=test:3&off=["label",3]') as look:
        look.context.grant_permissions(["clipboard-read", "clipboard-write"])
        look.get_by_text("rows dropped").wait_for()
        look.get_by_role("button", name="Copy link").click()
        look.get_by_role("button", name="Copied").wait_for()
        link = look.evaluate("navigator.clipboard.readText()")
        assert server.token not in link
        other = look.context.new_page()
        other.set_default_timeout(PATIENCE)
        other.goto(link)
        other.get_by_text("rows dropped").wait_for()


def test_without_the_token_a_person_sees_an_explanation(chromium, server):
    context = chromium.new_context()
    try:
        look = context.new_page()
        for address in (server.address, f"{server.address}?token=wrong"):
            assert look.goto(address).status == 401
            look.get_by_role("heading", name="The token is missing").wait_for()
            assert "dualform explore" in look.inner_text("body")
        look.goto(server.url)
        look.get_by_text("Verified after step 16").wait_for()
        assert look.goto(server.address).status == 200
    finally:
        context.close()


def test_two_explorers_on_one_host_do_not_forget_each_other(chromium, server, session):
    with Server(session) as other, page(chromium, server.url) as look:
        settled(look)
        look.goto(other.url)
        look.get_by_text("Verified after step 16").wait_for()
        look.goto(server.address)
        look.get_by_text("Verified after step 16").wait_for()


def test_a_link_on_another_site_works_for_who_knows_the_token(chromium, server):
    """A chat or a notebook: browsers leave a SameSite=Strict cookie out when such a link is followed."""
    links = f'<a href="{server.address}#/prediction?input=test:3">view</a> <a href="{server.url}#/suspects">first</a>'
    with another_site(links) as site:
        context = chromium.new_context()
        try:
            look = context.new_page()
            look.set_default_timeout(PATIENCE)
            look.goto(site)
            look.get_by_text("view").click()
            look.get_by_role("alert").get_by_text("this server needs its token").wait_for()
            look.goto(site)
            look.get_by_text("first").click()
            look.get_by_role("heading", name="Suspects").wait_for()
            assert look.url == f"{server.address}#/suspects"
            look.goto(site)
            look.get_by_text("view").click()
            look.get_by_role("heading", name="test example 3", exact=True).wait_for()
        finally:
            context.close()


ATTACK = """<form id="form" method="post" action="{address}api/jobs" enctype="text/plain" target="frame">
<input name='{{"kind":"verify","by":["' value='"]}}'></form><iframe name="frame"></iframe><script>
async function attack() {{
  const found = [];
  for (const options of [{{}}, {{ mode: "no-cors" }}, {{ mode: "no-cors", method: "POST", body: '{{"kind":"verify"}}' }}]) {{
    try {{
      const answer = await fetch("{address}api/log", {{ credentials: "include", ...options }});
      found.push(answer.type === "opaque" ? "opaque" : await answer.text());
    }} catch (error) {{ found.push("failed"); }}
  }}
  document.getElementById("form").submit();
  return found;
}}
</script>"""


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_page_of_another_site_or_port_gets_nothing(chromium, server, session, monkeypatch, host):
    """The person who looks at it has the cookie; on another port of the same host, the browser sends it, too."""
    asked = []
    monkeypatch.setattr(session, "log", lambda: asked.append("log"))
    monkeypatch.setattr(session, "verify", lambda progress=None: asked.append("verify"))
    with another_site(ATTACK.format(address=server.address)) as site:
        context = chromium.new_context()
        try:
            look = context.new_page()
            look.goto(f"{server.url}#/api")
            look.get_by_role("heading", name="For scripts").wait_for()
            look.goto(site.replace("localhost", host))
            assert set(look.evaluate("attack()")) <= {"failed", "opaque"}
            look.wait_for_timeout(500)
            assert asked == []
        finally:
            context.close()
