"""A real browser, looking at real pages."""

import contextlib
import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs the browser Chromium: apt-get install chromium")
PATIENCE = 30_000
"""Milliseconds; machines are busy."""


@contextlib.contextmanager
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


@contextlib.contextmanager
def page(browser, address, *, width=1280, theme="light", refusals=False):
    """A page without errors, on its console or thrown. refusals: the browser itself logs answers with 4xx."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    opened, problems = context.new_page(), []
    opened.set_default_timeout(PATIENCE)
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.goto(address)
    opened.locator("main h1").first.wait_for(state="attached")
    try:
        yield opened
        assert [one for one in problems if not (refusals and "Failed to load resource" in one)] == []
    finally:
        context.close()


def expect(locator):
    """Assertions that wait until they hold: a click returns before the page has changed."""
    from playwright.sync_api import expect as waiting

    waiting.set_options(timeout=PATIENCE)
    return waiting(locator)


def settled(page):
    """Everything is there."""
    page.locator(".skeleton").first.wait_for(state="detached")
    return page


def fits(page):
    """Nothing sticks out to the right."""
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


NAMELESS = """() => [...document.querySelectorAll("button, a, input, select, textarea, img, canvas, [role=img]")].filter((one) => {
  if (one.closest("[aria-hidden=true]")) return false;
  if (one.tagName === "IMG") return one.getAttribute("alt") === null;
  const label = one.closest("label") ?? (one.id && document.querySelector(`label[for="${one.id}"]`));
  const name = one.getAttribute("aria-label") || one.textContent.trim() || label?.textContent.trim();
  return !name;
}).map((one) => one.outerHTML.slice(0, 120))"""


def nameless(page):
    """What a screen reader could not name."""
    return page.evaluate(NAMELESS)
