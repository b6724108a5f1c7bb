"""A run of two ranks gives the answers of the same training on one, to rounding."""

import tempfile
from pathlib import Path

import polars as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

import dualform
from parallel_training import Case, network, on_one_rank, on_two_ranks, samples

BAR = 1e-9

cases = st.builds(
    Case,
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    steps=st.integers(1, 6),
    accumulated=st.integers(1, 3),
    no_sync=st.booleans(),
    optimizer=st.sampled_from(["sgd", "adamw"]),
    clip=st.sampled_from([0.0, 0.01]),
    chunk_bytes=st.sampled_from([1, 1500, 1 << 20]),
    seed=st.integers(0, 3),
)


def same(found, expected, by):
    """Two tables of numbers by some columns are the same, to rounding."""
    assert_frame_equal(found.sort(by), expected.sort(by), check_row_order=True, rel_tol=1e-6, abs_tol=BAR)


def totals(answer, by):
    return answer.total(by)


def check(run, plain, case):
    """All questions, asked of both."""
    inputs, _ = samples(case)
    x = inputs[:3]
    assert run.verify().passed, str(run.verify())
    by = ["query", "position", "visit"]
    same(run.rows.select("step", "sample_id", "label", "visit"), plain.rows, ["visit"])
    for layer in ("0", "3"):
        same(run.attend(x)[layer].total("visit"), plain.attend(x)[layer].total("visit"), by)
        same(
            run.attend(x)[layer].total(["label", "step"]),
            plain.attend(x)[layer].total(["label", "step"]),
            ["query", "label", "step"],
        )
        top, expected = (one.attend(x)[layer].top(2, by="sample_id") for one in (run, plain))
        torch.testing.assert_close(top["weight"].to_torch(), expected["weight"].to_torch(), rtol=1e-6, atol=BAR)
    same(
        run.contributions(x, target=1).total("visit"),
        plain.contributions(x, target=1).total("visit"),
        ["query", "visit"],
    )
    same(run.influence(x, target=1).total("visit"), plain.influence(x, target=1).total("visit"), ["query", "visit"])
    drop = pl.col("label") == 1
    masked, expected = (one.masked(drop=drop).state_dict() for one in (run, plain))
    for name, weight in masked.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-8)
    half = run.end_step // 2
    same(run.at(half).attend(x)["0"].total("visit"), plain.at(half).attend(x)["0"].total("visit"), by)


@settings(max_examples=12)
@given(case=cases)
def test_any_training_gives_the_answers_of_one_rank(ranks, case):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        ranks.run(on_two_ranks, case, path / "two")
        on_one_rank(case, path / "one")
        model = network(case)
        check(dualform.open(path / "two", model), dualform.open(path / "one", model), case)
