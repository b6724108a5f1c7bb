"""The README: its ten lines run as they stand, and its answers are those of docs/start.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pages import code_blocks, run_page

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TEXT = README.read_text()
START = ROOT / "docs" / "start.md"


def words(text):
    """The text with line breaks and repeated spaces as single spaces."""
    return re.sub(r"\s+", " ", text)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Names that the ten lines leave behind: model, test_images, dual, …"""
    folder = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        names = {}
        exec(code_blocks(START)[0], names)
        exec(code_blocks(README)[0], names)
        yield names


def test_it_is_short():
    assert len(README.read_bytes()) <= 6 * 1024


def test_ten_lines_are_ten_lines():
    (block,) = code_blocks(README)
    assert len([line for line in block.splitlines() if line.strip()]) == 10


def test_the_example_runs(tmp_path):
    """In a process of its own, with warnings as errors, after the data and the network of docs/start.md."""
    (tmp_path / "example.py").write_text(code_blocks(START)[0] + code_blocks(README)[0])
    answer = subprocess.run(
        [sys.executable, "-W", "error", "example.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "fail" not in answer.stdout
    assert answer.stdout.count("pass: within 4 rounding floors") == 4
    assert (tmp_path / "runs" / "digits" / "manifest.json").exists()


def test_its_answers(answers):
    dual = answers["dual"]
    outputs = answers["model"](answers["test_images"]).argmax(1)
    first = (outputs != answers["test_labels"]).nonzero()[0]
    wrong = answers["test_images"][first]
    assert (answers["test_labels"][first].item(), outputs[first].item()) == (6, 1)
    assert "a 6 that the network reads as a 1" in words(TEXT)

    top = dual.attend(wrong)["2"].top(3, by="sample_id")
    first, second, third = top["sample_id"].to_list()
    assert top["label"].to_list() == [1, 1, 1]
    assert f"samples {first}, {second} and {third} first: three ones" in words(TEXT)

    contributions = dual.contributions(wrong)["2"]
    totals = dict(contributions.total("label").select("label", "total").iter_rows())
    parts = contributions.parts()
    ones = f"ones add +{totals[1]:.1f} to the logit of 1 and eights −{-totals[8]:.1f}."
    rest = f"the initial weights (+{parts['initial'].item():.1f}), that makes the logit, {parts['target'].item():.2f}."
    assert f"{ones} With the other classes and {rest}" in words(TEXT)

    strongest = dual.influence(wrong).top(1, by="sample_id")["sample_id"].item()
    assert f"names sample {strongest} as the strongest support" in words(TEXT)

    masked = dual.masked(drop="label = 1")
    assert f"it answers {masked(wrong).argmax(1).item()}." in words(TEXT)


@pytest.mark.parametrize("name", ["start.md", "labels.md"])
def test_a_page_prints_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(ROOT / "docs" / name)


def test_every_picture_and_file_it_names_exists():
    named = re.findall(r"\]\(((?!http)[^)#]+)\)", TEXT)
    assert named
    assert [name for name in named if not (README.parent / name).exists()] == []
