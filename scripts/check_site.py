"""Check the built site: every internal link and anchor leads somewhere, and no page loads anything from elsewhere.

python scripts/check_site.py site
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
"""Elements that make a browser load something, and the attribute that says what."""
NOT_LOADED = {"canonical", "next", "prev", "alternate", "author"}
"""Kinds of <link> that are only named."""


@dataclass
class Page(HTMLParser):
    """The anchors of a page, what it links to and what it loads."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        HTMLParser.__init__(self)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's anchor and address."""
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given and given.get("rel") not in NOT_LOADED:
            self.loads.append(given[LOADED[tag]])


def is_elsewhere(address: str) -> bool:
    """Whether an address leads to another server."""
    parts = urlsplit(address)
    return parts.scheme in {"http", "https"} or bool(parts.netloc)


def read(path: Path) -> Page:
    """One page of the site."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def problems(site: Path) -> Iterator[str]:
    """A sentence for each link that leads nowhere and for each thing that is loaded from elsewhere."""
    pages = {path.resolve(): read(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for address in page.loads:
            if is_elsewhere(address):
                yield f"{name} loads {address}"
        if name.name == "404.html":  # its addresses are those of the server's root
            continue
        for address in [*page.links, *page.loads]:
            if urlsplit(address).scheme or is_elsewhere(address):
                continue
            target = (path.parent / unquote(urlsplit(address).path)).resolve() if urlsplit(address).path else path
            anchor = unquote(urlsplit(address).fragment)
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{name} links to {address}: there is no such file"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{name} links to {address}: there is no such anchor"
    for path in site.rglob("*.css"):
        if "@import" in path.read_text(encoding="utf-8") or "url(http" in path.read_text(encoding="utf-8"):
            yield f"{path.relative_to(site)} loads something from elsewhere"


if __name__ == "__main__":
    found = sorted(set(problems(Path(sys.argv[1]))))
    print("\n".join(found) or "every link leads somewhere, and nothing is loaded from elsewhere")
    sys.exit(1 if found else 0)
