"""`dualform paper language`, from texts to pages, on tiny texts."""

import json

import pytest
import torch
from story import STORY
from typer.testing import CliRunner

from dualform.cli import app
from dualform_paper import cli, texts
from dualform_paper.language import queries, run

BOOK = "THE WOLF AND THE LAMB\n\n\nThe Wolf stood high up the stream and the Lamb a little distance below.\n\n\n\n\nTHE CROW\n\n\n"
ARTICLE = " \n = {} = \n \n who was by this time famous , particularly for his contribution to <unk> \n"
FILES = {
    "aesop": {"49010-0.txt": f"{BOOK}{STORY * 20}\n\n\n\n\nAPPENDIX\n\n\n{STORY}"},
    "wikitext-2": {
        f"wiki.{part}.tokens": "".join(ARTICLE.format(f"The {n}") for n in ("his", "time")) * count
        for part, count in (("train", 60), ("valid", 1), ("test", 2))
    },
}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(texts, "files", lambda name, folder: FILES[name])
    monkeypatch.setattr(run, "COMPARED", 1)
    table = queries.Table(3, "a little d", "at a little [d]istance.", ("the Lamb a little [d]istance below",))
    monkeypatch.setattr(queries, "TABLES", {"aesop": (table,)})
    monkeypatch.setattr(queries, "VARIANTS", {})


def call(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "160", "NO_COLOR": "1"})


def test_pages(tiny, tmp_path):
    options = ["--size", "small", "--steps", 3, "--state-size", 8, "--out", tmp_path, "--json"]
    found = call("paper", "language", *options)
    assert found.exit_code == 0, found.output
    pages = json.loads(found.stdout)
    for name, measure in (("aesop", "bits per character"), ("wikitext-2", "perplexity")):
        folder = tmp_path / f"{name}-released-small"
        assert pages[name] == str(folder / "index.md")
        page = (folder / "index.md").read_text()
        assert f"Made by `dualform paper {name} --preset released --size small --steps 3 --state-size 8`" in page
        assert "initialised uniformly within ±0.1" in page
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
        assert (folder / "figures" / "what-was-trained.png").exists()
        results = json.loads((folder / "results.json").read_text())
        assert (results["settings"]["steps"], results["settings"]["preset"]) == (3, "released")
        assert results["threads"] == torch.get_num_threads()
        (learned,) = [one["data"] for one in results["sections"] if one["title"] == "What was trained"]
        assert learned["seconds"] > 0
        assert learned["processor_seconds"] > 0
        assert sorted(path.name for path in folder.iterdir()) == [
            "figures", "index.md", "recording", "results.json"
        ]  # fmt: skip
    recordings = {name: tmp_path / f"{name}-released-small" / "recording" for name in FILES}
    page = (tmp_path / "aesop-released-small" / "index.md").read_text()
    assert "## Table 3: a little d\n" in page
    assert "## Ranks during training\n" in page
    assert "THE CROW" in call("passages", recordings["aesop"], "--prompt", "The", "--top", 30).stdout
    asked = call("passages", recordings["wikitext-2"], "--prompt", "for his contribution", "--top", 2)
    assert "The his" in asked.stdout
    assert "⟦" in asked.stdout


@pytest.mark.parametrize(
    "option",
    [
        ["--preset", "text"],
        ["--size", "small"],
        ["--state-size", 3],
        ["--minutes", 1],
        ["--predicted", 0.5],
        ["--slots"],
        ["--checkpoint-every", 5],
    ],
)
def test_options_of_the_language_experiments(option):
    found = call("paper", "joint", *option)
    assert found.exit_code == 2
    assert "are for aesop, wikitext-2 and language" in found.output


def test_a_page_of_all_slots(tiny, tmp_path):
    size = ["--preset", "text", "--size", "small", "--steps", 2, "--state-size", 8]
    found = call("paper", "aesop", *size, "--slots", "--out", tmp_path)
    assert found.exit_code == 0, found.output
    folder = tmp_path / "aesop-text-small"
    page = (folder / "index.md").read_text()
    assert "all slots in float16" in page
    assert "Ranks during training" not in page
    asked = call("passages", folder / "recording", "--prompt", "The", "--absolute", "--gate", "i")
    assert asked.exit_code == 0, asked.output


def test_ranks_are_measured_at_each_checkpoint_and_the_number_of_threads_is_set(tiny, tmp_path):
    threads = torch.get_num_threads()
    size = ["--size", "small", "--steps", 5, "--state-size", 8]
    try:
        found = call("paper", "aesop", *size, "--checkpoint-every", 2, "--threads", 1, "--out", tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert found.exit_code == 0, found.output
    results = json.loads((tmp_path / "aesop-released-small" / "results.json").read_text())
    assert results["threads"] == 1
    (ranks,) = [one["data"] for one in results["sections"] if one["title"] == "Ranks during training"]
    assert [step for step, _ in ranks["measured"]] == [2, 4, 5]
    (last,) = ranks["measured"][-1][1]
    (answer,) = [one["data"] for one in results["sections"] if one["title"].startswith("Table 3")]
    assert last["by_attention"] == [place["rank"] for place in answer["theirs"]]
    assert ranks["curves"]["Table 3 at “d”, passage 1"] == {
        "x": [2, 4, 5],
        "y": [at["by_attention"][0] for _, (at,) in ranks["measured"]],
    }


def test_a_run_without_a_terminal_prints_its_progress_now_and_then(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "LOG_SECONDS", 0.0)
    size = ["--size", "small", "--steps", 3, "--state-size", 8]
    found = call("paper", "aesop", *size, "--out", tmp_path)
    assert "training: 3 of 3\n" in found.stderr
