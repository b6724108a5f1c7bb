"""The report: one file, opened without a server."""

import re

import pytest
import runs
from browsing import browser, expect, needs_browser, page, settled
from typer.testing import CliRunner

from dualform.cli import app
from dualform.errors import QuestionError
from dualform.explorer.report import write
from dualform.explorer.session import Session
from dualform.explorer.subject import subject


def outside(text):
    """What a file would fetch."""
    return re.findall(r'(?:src|href)="(?!data:|#)([^"]*)"', re.sub(r"<script>.*?</script>", "", text, flags=re.S))


def test_one_file_that_fetches_nothing(folder, tmp_path):
    out = tmp_path / "report.html"
    found = CliRunner().invoke(app, ["report", str(folder), "-o", str(out), "--test", "3", "--test", "5"])
    assert found.exit_code == 0, found.output
    assert "2 test examples" in found.output
    assert outside(out.read_text()) == []
    assert list(tmp_path.iterdir()) == [out]


def test_a_test_example_that_is_not_there(session, tmp_path):
    with pytest.raises(QuestionError, match="no test example 9999"):
        write(session, tmp_path / "report.html", tests=[9999])
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(QuestionError, match=r"no folder .*nowhere to write"):
        write(session, tmp_path / "nowhere" / "report.html", tests=[3])


@needs_browser
def test_it_opens_without_a_server(session, tmp_path):
    write(session, tmp_path / "report.html", tests=[3, 5])
    with browser() as chromium, page(chromium, (tmp_path / "report.html").as_uri()) as look:
        look.get_by_text("Verified after step 16").wait_for()
        look.get_by_role("link", name="Prediction").click()
        settled(look)
        expect(look.locator(".grid a")).to_have_count(2)
        look.locator(".grid a").nth(1).click()
        look.get_by_role("heading", name="test example 5", exact=True).wait_for()
        settled(look)
        expect(look.locator(".sources .picture")).to_have_count(24)
        look.locator(".chart").first.scroll_into_view_if_needed()
        look.locator(".chart .main-svg").first.wait_for()
        look.get_by_role("radio", name="Contribution").click()
        look.get_by_text("Exact: initial part").wait_for()
        settled(look)
        assert look.get_by_role("alert").count() == 0
        look.get_by_role("link", name="Edit the memory behind it").click()
        look.get_by_role("button", name="Switch off label 3").click()
        look.get_by_text("rows dropped").wait_for()


@needs_browser
def test_influence_is_in_it(session, tmp_path):
    write(session, tmp_path / "report.html", tests=[3, 5])
    with browser() as chromium, page(chromium, (tmp_path / "report.html").as_uri()) as look:
        look.goto((tmp_path / "report.html").as_uri() + "#/prediction?input=test:5&kind=influence")
        settled(look)
        assert "An estimate" in look.locator(".note").inner_text()
        card = look.get_by_role("region", name="Layer 4")
        card.get_by_text("Pushes it up most").wait_for()
        dual = session.subject.dual
        best = dual.influence(session.predictions.inputs("test:5"))["4"].top(1, by="sample_id")["sample_id"][0]
        first = card.locator(".sources a").first.get_attribute("aria-label")
        assert first.startswith(f"Training example {best}, ")
        assert look.get_by_role("alert").count() == 0


@needs_browser
@pytest.mark.parametrize("keep", ["keys", "totals", "slots"])
def test_what_cannot_be_estimated_is_told_in_words(keep, tmp_path, monkeypatch):
    """Keys or totals do not do; or the method has a reason of its own."""
    session = runs.lines(tmp_path / "run", keep=keep, totals=["label"] if keep == "totals" else [])
    if keep == "slots":

        def refuse(*_, **__):
            raise QuestionError("none of these layers was called for these inputs.")

        monkeypatch.setattr(type(session.subject.dual), "influence", refuse)
    write(session, tmp_path / "report.html", tests=[0])
    why = "none of these layers was called" if keep == "slots" else f"this run keeps {keep} only"
    with browser() as chromium, page(chromium, (tmp_path / "report.html").as_uri()) as look:
        look.goto((tmp_path / "report.html").as_uri() + "#/prediction?input=test:0")
        settled(look)
        look.get_by_role("radio", name="Influence").click()
        look.get_by_text("Influence cannot be shown here: ").wait_for()
        assert why in look.inner_text("main")
        assert look.get_by_role("alert").count() == 0
        assert look.locator(".skeleton").count() == 0


@needs_browser
def test_a_report_believes_nothing_in_the_data(tmp_path):
    dual, train, test, options = runs.hostile(tmp_path / "run")
    write(Session(subject(dual, train, test, **options)), tmp_path / "report.html", tests=[0])
    with browser() as chromium, page(chromium, (tmp_path / "report.html").as_uri() + "#/prediction") as look:
        settled(look)
        assert look.evaluate("window.owned") is None
        assert runs.HOSTILE in look.locator(".brand .title").inner_text()
