"""The demo: its numbers add up, and what it says is what the recording says."""

import io
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import dualform
from dualform import demo as demos
from dualform.cli import app
from dualform.terminal import show_demo

QUICK = demos.Settings(epochs=2, train_images=300, width=16, top=4)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return demos.run(tmp_path_factory.mktemp("demo") / "run", QUICK)


def test_the_certificate_passes(found):
    assert found.certificate.passed, found.certificate
    assert found.steps == 12


@pytest.mark.parametrize("threads", [1, 2])
def test_the_largest_gap_is_what_the_benchmarks_say(tmp_path, threads):
    """The last digits depend on the number of threads, so the page gives a bound."""
    page = (Path(__file__).parent.parent / "docs" / "benchmarks.md").read_text()
    assert (
        "with any seed and number of threads | below 1e-5, and below one rounding floor | now | `dualform demo` |"
        in page
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        frame = demos.run(tmp_path / "run", demos.Settings()).certificate.frame
    finally:
        torch.set_num_threads(before)
    assert frame["gap"].max() < 1e-5
    assert (frame["distance"] < frame["floor"]).all()


def test_the_same_settings_give_the_same_network(found, tmp_path):
    again = demos.run(tmp_path / "again", QUICK)
    assert again.accuracy == found.accuracy
    assert again.wrong.splits[0].logit == found.wrong.splits[0].logit


def test_one_right_and_one_wrong_answer_of_the_same_class(found):
    assert found.right.right
    assert not found.wrong.right
    assert found.right.label == found.wrong.label


@pytest.mark.parametrize("which", ["right", "wrong"])
def test_the_parts_of_a_logit_add_up(found, which):
    explained = getattr(found, which)
    assert [split.unit for split in explained.splits] == list(dict.fromkeys([explained.answer, explained.label]))
    for split in explained.splits:
        terms = [abs(split.initial), *map(abs, split.parts)]
        assert abs(split.remainder) <= 1e-5 * max(terms), f"{split.total} instead of {split.logit}"


@pytest.mark.parametrize("which", ["right", "wrong"])
def test_attention_is_key_times_query(found, which):
    """Against a plain loop over the rows: the input layer's keys are the training images themselves."""
    explained = getattr(found, which)
    digits = demos.load(QUICK)
    query = digits.images[explained.sample_id].double()
    first = explained.layers[0]
    rows = dualform.open(found.folder).rows
    totals = [0.0] * demos.CLASSES
    for sample_id, label in rows.select("sample_id", "label").iter_rows():
        totals[label] += float(digits.images[sample_id].double() @ query)
    np.testing.assert_allclose(first.totals, totals, rtol=1e-4, atol=1e-2)
    seen = rows["sample_id"].unique()
    weights = {i: float(digits.images[i].double() @ query) for i in seen}
    best = sorted(weights, key=weights.__getitem__, reverse=True)[: QUICK.top]
    assert [source.sample_id for source in first.top] == best
    for source in first.top:
        assert source.weight == pytest.approx(weights[source.sample_id], rel=1e-5)
        visits = rows.filter(pl.col("sample_id") == source.sample_id)
        assert source.step in visits["step"]
        assert visits["label"].unique().to_list() == [source.label]


def test_top_examples_are_distinct_and_sorted(found):
    for explained in (found.right, found.wrong):
        for layer in explained.layers:
            assert len({source.sample_id for source in layer.top}) == QUICK.top
            weights = [source.weight for source in layer.top]
            assert weights == sorted(weights, reverse=True)


def test_the_choice_of_digits():
    labels = torch.tensor([0, 1, 1, 0])
    logits = torch.nn.functional.one_hot(torch.tensor([0, 0, 1, 0]), 2).float()
    assert demos.choose(logits, labels) == (2, 1)
    sure = torch.tensor([[3.0, 0], [0, 2], [0, 1], [5, 0]])
    assert demos.choose(sure, labels) == (1, 2), "no wrong answer: the least sure one"


def test_what_is_printed_holds_the_numbers(found):
    console = Console(file=io.StringIO(), width=300)
    show_demo(console, found, [])
    text = console.file.getvalue()
    assert f"Test accuracy {found.accuracy:.1%}" in text
    for explained in (found.right, found.wrong):
        for split in explained.splits:
            assert f"{split.total:+.4f}" in text
            assert f"{split.remainder:+.1e}" in text
        assert all(f"{source.weight:.1f}" in text for layer in explained.layers for source in layer.top)
    assert f"dualform info {found.folder}" in text


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(demos, "Settings", lambda seed: demos_settings(seed))
    out = tmp_path / "run"
    answer = CliRunner().invoke(app, ["demo", "--out", str(out), "--seed", "3", "--json"])
    assert answer.exit_code == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["settings"]["seed"] == 3
    assert told["certificate"]["passed"] is True
    assert [str(out / "sources.png"), str(out / "sources.svg")] == told["figures"]
    assert (out / "sources.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / demos.SETTINGS).read_text())["seed"] == 3
    again = CliRunner().invoke(app, ["demo", "--out", str(out), "--no-figure"])
    assert again.exit_code == 0, "a demo may be run again"
    assert "How to go on" in again.stdout


def demos_settings(seed, settings=demos.Settings):
    return settings(seed=seed, epochs=2, train_images=300, width=16)
