"""What must hold for every training and every question, drawn at random."""

import tempfile
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import dualform
import shared
from reference import ranking
from training import SAMPLES, assert_exact, assert_same_weights, network, samples

INPUTS, LABELS = samples()

batches = st.lists(st.lists(st.integers(0, SAMPLES - 1), max_size=5), min_size=1, max_size=4).filter(any)
"""The samples of each step: some batches are empty, some have a sample twice."""


@contextmanager
def recorded(steps, *, momentum=0.9, ignored=(), **record_settings):
    """ignored: these samples have no label, so their slots write nothing."""
    labels = LABELS.clone()
    labels[list(ignored)] = -100
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        with dualform.record(model, optimizer, path, **{"dtype": "float64", **record_settings}) as recorder:
            for number, step in enumerate(steps):
                ids = torch.tensor(step, dtype=torch.int64)
                recorder.batch(sample_id=ids, label=LABELS[ids], task="even" if number % 2 == 0 else "odd")
                optimizer.zero_grad()
                F.cross_entropy(model(INPUTS[ids]), labels[ids], reduction="sum").backward()
                optimizer.step()
        yield dualform.open(path, model), model


def all_weights(answer):
    pieces = [scores for _, scores in answer.scores()]
    return torch.cat(pieces, dim=-1) if pieces else torch.zeros(*answer.queries.shape[:2], 0)


@given(steps=batches, momentum=st.sampled_from([0.0, 0.9]))
def test_the_dual_is_the_primal(steps, momentum):
    with recorded(steps, momentum=momentum) as (dual, model):
        assert_exact(dual)
        for name in dual.layers:
            queries = dual.attend(INPUTS)[name].queries[:, 0]
            primal = dict(model.named_modules())[name](queries).detach()
            torch.testing.assert_close(dual.layer(name)(queries), primal, rtol=0, atol=1e-13)


@given(steps=batches, chunk_bytes=st.integers(1, 3000), queue_bytes=st.sampled_from([1, 2000, 1 << 20]))
def test_the_size_of_chunks_changes_nothing(steps, chunk_bytes, queue_bytes):
    with (
        recorded(steps) as (one, _),
        recorded(steps, chunk_bytes=chunk_bytes, queue_bytes=queue_bytes) as (many, _),
    ):
        assert many.rows.equals(one.rows)
        for name in one.layers:
            assert torch.equal(many.layer(name).keys, one.layer(name).keys)
            assert torch.equal(many.layer(name).values, one.layer(name).values)
            found, expected = (dual.attend(INPUTS)[name].top(5) for dual in (many, one))
            assert found["weight"].to_list() == pytest.approx(expected["weight"].to_list(), abs=1e-13)
        assert_same_weights(many.masked(drop=pl.col("label") == 1), one.masked(drop=pl.col("label") == 1).state_dict())


@given(ids=st.lists(st.integers(0, SAMPLES - 1), min_size=2, max_size=8), parts=st.integers(1, 8))
def test_the_size_of_batches_changes_nothing(ids, parts):
    """A sum of losses in one batch, or accumulated in parts: the same slots, the same weights."""

    def run(path, pieces):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with dualform.record(model, optimizer, path, dtype="float64") as recorder:
            for _ in range(2):
                optimizer.zero_grad()
                for piece in pieces:
                    recorder.batch(sample_id=piece)
                    F.cross_entropy(model(INPUTS[piece]), LABELS[piece], reduction="sum").backward()
                optimizer.step()
        return dualform.open(path, model)

    whole = torch.tensor(ids)
    with tempfile.TemporaryDirectory() as folder:
        one, many = run(Path(folder) / "one", [whole]), run(Path(folder) / "many", whole.chunk(parts))
        assert one.rows["sample_id"].equals(many.rows["sample_id"])
        for name in one.layers:
            torch.testing.assert_close(many.layer(name).keys, one.layer(name).keys, rtol=0, atol=1e-13)
            torch.testing.assert_close(many.layer(name).values, one.layer(name).values, rtol=0, atol=1e-13)
        assert_same_weights(many.model(), one.model().state_dict(), atol=1e-13)


@given(cuts=st.lists(st.integers(0, SAMPLES), max_size=3), k=st.integers(1, 8))
def test_batching_the_queries_changes_nothing(dual_of_laws, cuts, k):
    edges = sorted({0, SAMPLES, *cuts})
    for name in dual_of_laws.layers:
        whole = dual_of_laws.attend(INPUTS)[name].top(k)
        parts = [
            dual_of_laws.attend(INPUTS[low:high])[name].top(k).with_columns(pl.col("query") + low)
            for low, high in pairwise(edges)
        ]
        together = pl.concat(parts)
        assert together["weight"].to_list() == pytest.approx(whole["weight"].to_list(), abs=1e-13)
        assert together.select("query", "position", "rank").equals(whole.select("query", "position", "rank"))
        totals = [dual_of_laws.attend(INPUTS[low:high])[name].total("label") for low, high in pairwise(edges)]
        expected = dual_of_laws.attend(INPUTS)[name].total("label")["total"].to_list()
        assert pl.concat(totals)["total"].to_list() == pytest.approx(expected, abs=1e-13)


@pytest.fixture(scope="module")
def dual_of_laws():
    with recorded([[0, 1, 2, 3], [4, 5, 0, 0], [6, 7], [8, 9, 10, 11, 1]], chunk_bytes=700) as (dual, _):
        yield dual


conditions = st.sampled_from(
    [
        pl.col("label") == 1,
        pl.col("task") == "odd",
        pl.col("step") >= 2,
        pl.col("sample_id") == 0,
        (pl.col("label") < 2) & (pl.col("task") == "even"),
        pl.col("sample_id") > 99,
    ]
)


@given(steps=batches, condition=conditions)
def test_a_mask_and_its_opposite_add_up(steps, condition):
    with recorded(steps) as (dual, model):
        kept, dropped = (dual.masked(only=where, read="kept").state_dict() for where in (condition, ~condition))
        nothing = dual.masked(only=pl.col("step") < 0, read="kept").state_dict()
        for name, full in model.state_dict().items():
            torch.testing.assert_close(kept[name] + dropped[name], full + nothing[name], rtol=0, atol=1e-13)
        for name in dual.layers:
            totals = [
                dual.attend(INPUTS)[name].total("label", where=where)["total"] for where in (condition, ~condition)
            ]
            whole = dual.attend(INPUTS)[name].total("label")["total"]
            assert (totals[0] + totals[1]).to_list() == pytest.approx(whole.to_list(), abs=1e-12)


@pytest.fixture(scope="module")
def dual_of_shared_slots(tmp_path_factory):
    return shared.train(tmp_path_factory.mktemp("laws") / "run", now_and_then=True, chunk_bytes=2000)


@given(condition=conditions)
def test_a_mask_and_its_opposite_add_up_with_slots_that_have_no_row(dual_of_shared_slots, condition):
    dual = dual_of_shared_slots
    kept, dropped = (dual.masked(**{name: condition}).state_dict() for name in ("only", "drop"))
    nothing = dual.masked(only=pl.lit(False), read="kept").state_dict()
    for name, full in dual.model().state_dict().items():
        torch.testing.assert_close(kept[name] + dropped[name], full + nothing[name], rtol=0, atol=1e-13)


@given(steps=batches, k=st.integers(1, 12), absolute=st.booleans())
def test_the_top_k_are_the_head_of_a_full_sort(steps, k, absolute):
    with recorded(steps, chunk_bytes=1) as (dual, _):
        for name in dual.layers:
            answer = dual.attend(INPUTS)[name]
            scores = all_weights(answer)[:, 0]
            found = answer.top(k, absolute=absolute)
            for query in range(SAMPLES):
                row = scores[query].abs() if absolute else scores[query]
                mine = found.filter(pl.col("query") == query)
                assert mine["slot"].to_list() == ranking.top(row.tolist(), k)


@given(steps=batches, ignored=st.sets(st.integers(0, SAMPLES - 1), max_size=8), chunk_bytes=st.sampled_from([1, 900]))
def test_slots_that_wrote_nothing_are_left_out_unless_asked_for(steps, ignored, chunk_bytes):
    with recorded(steps, ignored=ignored, chunk_bytes=chunk_bytes) as (dual, _):
        assert_exact(dual)
        samples = dual.rows["sample_id"].to_list()
        wrote = [slot for slot, sample in enumerate(samples) if sample not in ignored]
        for name in dual.layers:
            default, every = (dual.attend(INPUTS, silent=silent)[name] for silent in (False, True))
            assert torch.equal(all_weights(default), all_weights(every)[..., wrote])
            for answer in (default, every):
                tops = answer.top(max(1, len(samples))).group_by("query", "sample_id").agg(pl.col("weight").sum())
                sums = answer.total("sample_id").join(tops, on=["query", "sample_id"], how="left")
                assert sums["total"].to_list() == pytest.approx(sums["weight"].fill_null(0).to_list(), abs=1e-12)
            mine, others = (
                every.total("sample_id", where=pl.col("sample_id").is_in(some))
                for some in (wrote_by(samples, wrote), sorted(ignored))
            )
            assert default.total("sample_id")["total"].to_list() == pytest.approx(mine["total"].to_list(), abs=1e-12)
            both = (mine["total"] + others["total"]).to_list()
            assert every.total("sample_id")["total"].to_list() == pytest.approx(both, abs=1e-12)


def wrote_by(samples, slots):
    return sorted({samples[slot] for slot in slots})


@given(st.integers(0, SAMPLES - 1))
@settings(max_examples=5)
def test_a_single_slot(sample):
    with recorded([[sample]]) as (dual, model):
        assert_exact(dual)
        layer = dual.layer("0")
        assert layer.slots == 1
        assert torch.equal(layer.keys, INPUTS[[sample]])
        assert dual.attend(INPUTS)["0"].top(5).height == SAMPLES
        learned = model[0].weight.detach() - layer.initial_weight
        torch.testing.assert_close(learned, torch.outer(layer.values[0], layer.keys[0]), rtol=0, atol=1e-14)


@given(times=st.integers(2, 6), rows=st.integers(1, 3))
@settings(max_examples=10)
def test_one_sample_many_times(times, rows):
    with recorded([[3] * rows] * times) as (dual, _):
        assert_exact(dual)
        answer = dual.attend(INPUTS)["0"]
        slots = answer.top(times * rows)
        assert slots.filter(pl.col("query") == 0)["slot"].to_list() == list(range(times * rows))  # all are ties
        found = answer.top(3, by="sample_id")
        assert found["visits"].to_list() == [times * rows] * SAMPLES
        expected = times * rows * (INPUTS @ INPUTS[3])
        assert found["weight"].to_list() == pytest.approx(expected.tolist(), abs=1e-12)


def test_an_empty_batch():
    with recorded([[], [1, 2], []]) as (dual, _):
        assert_exact(dual)
        assert dual.info()["steps"] == 3
        assert dual.layer("0").slots == 2
        assert dual.rows["step"].to_list() == [1, 1]


def test_nothing_but_an_empty_batch():
    with recorded([[]]) as (dual, _):
        assert dual.verify().passed
        assert dual.attend(INPUTS)["0"].top(3).height == 0
        assert dual.contributions(INPUTS)["2"].parts()["slots"].to_list() == [0.0] * SAMPLES
