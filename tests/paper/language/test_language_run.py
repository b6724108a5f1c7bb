"""`dualform paper language`, from texts to pages, on tiny texts."""

import json

import pytest
from story import STORY
from typer.testing import CliRunner

from dualform import texts
from dualform.cli import app
from dualform.paper.language import queries, run

BOOK = "THE WOLF AND THE LAMB\n\n\nThe Wolf stood high up the stream and the Lamb a little distance below.\n\n\n\n\nTHE CROW\n\n\n"
ARTICLE = " \n = {} = \n \n who was by this time famous , particularly for his contribution to <unk> \n"
FILES = {
    "aesop": {"49010-0.txt": f"{BOOK}{STORY}\n\n\n\n\nAPPENDIX\n\n\n{STORY}"},
    "wikitext-2": {
        f"wiki.{part}.tokens": "".join(ARTICLE.format(f"The {n}") for n in ("his", "time")) * count
        for part, count in (("train", 9), ("valid", 1), ("test", 2))
    },
}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(texts, "files", lambda name, folder: FILES[name])
    monkeypatch.setattr(run, "COMPARED", 1)
    table = queries.Table(3, "a little d", "at a little [d]istance.", ("the Lamb a little [d]istance below",))
    monkeypatch.setattr(queries, "TABLES", {"aesop": (table,)})


def call(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "160", "NO_COLOR": "1"})


def test_pages(tiny, tmp_path):
    options = ["--size", "small", "--steps", 3, "--state-size", 8, "--out", tmp_path, "--json"]
    found = call("paper", "language", *options)
    assert found.exit_code == 0, found.output
    pages = json.loads(found.stdout)
    for name, measure in (("aesop", "bits per character"), ("wikitext-2", "perplexity")):
        assert pages[name] == str(tmp_path / name / "index.md")
        page = (tmp_path / name / "index.md").read_text()
        assert f"Made by `dualform paper {name} --size small --steps 3 --state-size 8`" in page
        assert f" {measure}** on the whole test text" in page
        for title in (
            "What was trained",
            "Queries chosen by a rule",
            "Negative examples",
            "Two ways to record",
            "What the slots prove",
            "Which positions push a logit",
        ):
            assert f"## {title}" in page
        assert (tmp_path / name / "figures" / "what-was-trained.png").exists()
        results = json.loads((tmp_path / name / "results.json").read_text())
        assert results["settings"]["steps"] == 3
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == [
            "figures", "index.md", "recording", "results.json"
        ]  # fmt: skip
    assert "## Table 3: a little d\n" in (tmp_path / "aesop" / "index.md").read_text()
    assert "THE CROW" in call("passages", tmp_path / "aesop" / "recording", "--prompt", "The", "--top", 30).stdout
    asked = call("passages", tmp_path / "wikitext-2" / "recording", "--prompt", "for his contribution", "--top", 2)
    assert "The his" in asked.stdout
    assert "⟦" in asked.stdout


@pytest.mark.parametrize(
    "option", [["--size", "small"], ["--state-size", 3], ["--minutes", 1], ["--predicted", 0.5], ["--slots"]]
)
def test_options_of_the_language_experiments(option):
    found = call("paper", "joint", *option)
    assert found.exit_code == 2
    assert "are for aesop, wikitext-2 and language" in found.output


def test_a_page_of_all_slots(tiny, tmp_path):
    found = call("paper", "aesop", "--size", "small", "--steps", 2, "--state-size", 8, "--slots", "--out", tmp_path)
    assert found.exit_code == 0, found.output
    assert "all slots in float16" in (tmp_path / "aesop" / "index.md").read_text()
    asked = call("passages", tmp_path / "aesop" / "recording", "--prompt", "The", "--absolute", "--gate", "i")
    assert asked.exit_code == 0, asked.output
