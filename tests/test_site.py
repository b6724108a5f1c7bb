"""The site as far as it can be checked without MkDocs: `make docs` builds it and checks its links."""

import re
import runpy
from pathlib import Path

import pytest

import dualform
from dualform import errors
from dualform.cli import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NAVIGATION = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
NAMED = re.findall(r": (\S+\.md)$", NAVIGATION, re.MULTILINE)
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_the_navigation_names_files_that_exist():
    assert len(NAMED) > 40
    assert [name for name in NAMED if not (DOCS / name).is_file()] == []


def test_every_page_is_in_the_navigation_once():
    assert sorted(NAMED) == PAGES


@pytest.mark.parametrize("name", PAGES)
def test_links_of_a_page_lead_to_files(name):
    """Files outside docs/ are no part of the site, so no page links to one."""
    page = DOCS / name
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = re.findall(r"\]\(((?!http|mailto)[^)#\s]+)(?:#[^)\s]*)?\)", text)
    for link in named:
        target = (page.parent / link).resolve()
        assert target.is_file(), f"{name} links to {link}"
        assert target.is_relative_to(DOCS), f"{name} links to {link}"


def test_nothing_comes_from_elsewhere():
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings
    assert "http" not in settings


def test_the_reference_has_every_public_name():
    text = (DOCS / "reference" / "api.md").read_text()
    headings = set(re.findall(r"heading: dualform\.(\w+)$", text, re.MULTILINE))
    assert headings == set(dualform.__all__) - {"__version__", "errors"}


def test_the_reference_has_every_error():
    text = (DOCS / "reference" / "errors.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)`", text, re.MULTILINE))
    kinds = {
        name: kind for name, kind in vars(errors).items() if str(name).endswith("Error") and isinstance(kind, type)
    }
    assert set(rows) == set(kinds)
    for name, builtin in rows.items():
        assert builtin in {kind.__name__ for kind in kinds[name].__mro__}


def test_the_page_of_the_command_line_has_every_command():
    text = runpy.run_path(str(ROOT / "scripts" / "site_commands.py"))["commands"]()
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        assert f"## dualform {name}\n" in text
    assert "| `RUN` | The folder given to dualform.record(), or an address: s3://bucket/folder. | required |" in text
    assert "| `--json` |" in text


CHECK = runpy.run_path(str(ROOT / "scripts" / "check_site.py"))


def test_the_check_of_the_site_finds_what_is_wrong(tmp_path):
    (tmp_path / "good.html").write_text(
        '<h1 id="top"></h1><a href="good.html#top"></a><a href="https://elsewhere.org">'
    )
    assert list(CHECK["problems"](tmp_path)) == []
    (tmp_path / "bad.html").write_text(
        '<script src="https://elsewhere.org/a.js"></script><a href="missing.html"></a><a href="good.html#nowhere"></a>'
    )
    (tmp_path / "bad.css").write_text("@import 'https://elsewhere.org/font.css';")
    found = "\n".join(CHECK["problems"](tmp_path))
    assert "bad.html loads https://elsewhere.org/a.js" in found
    assert "bad.html links to missing.html: there is no such file" in found
    assert "bad.html links to good.html#nowhere: there is no such anchor" in found
    assert "bad.css loads something from elsewhere" in found
