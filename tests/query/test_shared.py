"""Slots that serve all rows at once have no row: null in tables, a group of their own, and no part in what is about rows."""

import io
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from rich.console import Console

import dualform
from dualform.errors import MaskError
from dualform.evaluate import views
from dualform.exports import write_all, write_top
from dualform.query.conditions import Condition
from dualform.query.forward import run
from dualform.terminal import show_influence
from shared import BATCHES, CLASSES, LENGTH, SHARED, STEPS, TEXT, train
from training import assert_exact, assert_same_weights

ADAM = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.02)}
SGD = {}
SLOTS = STEPS * LENGTH


@pytest.fixture(scope="module")
def dual(tmp_path_factory):
    return train(tmp_path_factory.mktemp("shared") / "run", chunk_bytes=1500)


@pytest.fixture(scope="module")
def adam(tmp_path_factory):
    return train(tmp_path_factory.mktemp("shared") / "adam", chunk_bytes=1500, **ADAM)


# The store


@pytest.mark.parametrize("settings", [SGD, ADAM])
def test_the_dual_is_the_primal(tmp_path, settings):
    checkpoints = []
    dual = train(tmp_path / "run", chunk_bytes=1500, checkpoints=checkpoints, **settings)
    assert_exact(dual)
    assert str(dual.store.manifest.rows[SHARED]) == "proved at step 0 (shared by all rows)"
    for step, expected in enumerate(checkpoints):
        assert_same_weights(dual.at(step).model(), expected)


def test_where_slots_come_from(dual):
    found = dual.slots(SHARED)
    assert found["row"].to_list() == [None] * SLOTS
    assert found["step"].to_list() == [step for step in range(STEPS) for _ in range(LENGTH)]
    assert found["position"].to_list() == list(range(LENGTH)) * STEPS
    assert dual.slots("words")["row"].null_count() == 0


# Tables and groups


def test_rows_and_columns_are_null(dual):
    top = dual.attend(TEXT[:1])[SHARED].top(3)
    for name in ("row", "sample_id", "label", "task", "token"):
        assert top[name].null_count() == top.height
    assert top["slot_position"].to_list() == top["position"].to_list()  # a place attends to itself
    assert top["step"].to_list() == [0, 1, 2] * LENGTH
    words = dual.attend(TEXT[:1])["words"].top(3)
    assert not words.select("row", "sample_id", "label", "task", "token").null_count().sum_horizontal().item()


def weights_of(dual, layer, by):
    """Every weight of one query with its slot's columns, summed by the values of some of them."""
    every = dual.attend(TEXT[:1])[layer].top(10_000).filter(pl.col("position") == 1)
    every = every.drop("position").rename({"slot_position": "position"})
    return every.group_by(by).agg(pl.col("weight").sum(), pl.len().alias("visits"))


@pytest.mark.parametrize("layer", [SHARED, "words", "body"])
@pytest.mark.parametrize(
    "by", [["label"], ["step"], ["step", "label"], ["position"], ["token"], ["position", "task"], ["step", "token"]]
)
def test_totals_by_group(dual, layer, by):
    found = dual.attend(TEXT[:1])[layer].total(by).filter(pl.col("position") == 1).drop("query", "position")
    expected = weights_of(dual, layer, by).drop("visits").rename({"weight": "expected"})
    named = found.rename({"slot_position": "position"}, strict=False)
    both = named.join(expected, on=by, how="left", nulls_equal=True)
    assert both["total"].to_list() == pytest.approx(both["expected"].fill_null(0).to_list(), abs=1e-12)
    assert both["expected"].sum() == pytest.approx(expected["expected"].sum())


def test_a_group_of_their_own(dual):
    answer = dual.attend(TEXT[:1])[SHARED]
    best = answer.top(5, by="label").filter(pl.col("position") == 0)
    assert best.select("label", "visits").rows() == [(None, SLOTS)]
    assert answer.top(2, per="label")["label"].to_list() == [None] * 2 * LENGTH
    assert answer.top(2, per="step").filter(pl.col("position") == 0)["step"].to_list() == [
        step for step in range(STEPS) for _ in range(2)
    ]


# Conditions

OF_ROWS = [
    pl.col("label") == 1,
    pl.col("task") == "early",
    pl.col("token") == 3,
    pl.col("label").is_in([0, 1]) & (pl.col("task") != "late"),
]
OF_STEPS = [
    (pl.col("step") >= 2, lambda step, position: step >= 2),
    ((pl.col("label") == 1) | (pl.col("step") < 2), lambda step, position: step < 2),
    ((pl.col("label") == 1) & (pl.col("step") < 2), lambda step, position: False),
    (~((pl.col("label") == 1) & (pl.col("step") < 2)), lambda step, position: step >= 2),  # as in SQL
    ((pl.col("position") == 1) & (pl.col("step") != 0), lambda step, position: position == 1 and step != 0),
    (pl.col("sample_id").is_null(), lambda step, position: True),
    (pl.lit(True), lambda step, position: True),
    (pl.col("label").is_null() & (pl.col("step") == 3), lambda step, position: step == 3),
]


def matching(dual, condition):
    mask = Condition(dual.store, condition, dual.end_step)
    return np.concatenate([mask(chunk) for chunk in dual.store.addresses(SHARED)]).tolist()


@pytest.mark.parametrize("condition", [*OF_ROWS, *(~one for one in OF_ROWS)], ids=str)
def test_what_is_said_of_rows_is_not_said_of_them(dual, condition):
    assert matching(dual, condition) == [False] * SLOTS
    assert not dual.attend(TEXT[:1])[SHARED].top(3, where=condition).height


@pytest.mark.parametrize(("condition", "expected"), OF_STEPS, ids=[str(one) for one, _ in OF_STEPS])
def test_what_is_said_of_steps_is(dual, condition, expected):
    wanted = [expected(step, position) for step in range(STEPS) for position in range(LENGTH)]
    assert matching(dual, condition) == wanted


def test_what_compares_rows_is_not_said_of_them(dual):
    assert not any(matching(dual, pl.col("step") >= pl.col("step").mean()))


def test_columns_per_position_are_still_checked(dual):
    with pytest.raises(MaskError, match="another number of positions"):
        dual.attend(TEXT[:1])["head"].top(3, where=pl.col("token") == 3)


CONDITIONS = [*OF_ROWS, *(condition for condition, _ in OF_STEPS)]


@pytest.mark.parametrize("condition", CONDITIONS, ids=str)
@pytest.mark.parametrize("read", ["kept", "fewest"])
def test_a_mask_and_its_opposite_add_up(dual, condition, read):
    positional = {"token", "position"} & set(condition.meta.root_names())
    layers = [SHARED, "words", "body"] if positional else dual.layers
    kept, dropped = (dual.masked(**{name: condition}, layers=layers, read=read) for name in ("only", "drop"))
    nothing = dual.masked(only=pl.lit(False), layers=layers, read="kept").state_dict()
    for name, whole in dual.model().state_dict().items():
        if name.split(".")[0] in layers:
            both = kept.state_dict()[name] + dropped.state_dict()[name] - nothing[name]
            torch.testing.assert_close(both, whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("settings", [SGD, ADAM])
def test_what_masks_leave_of_a_shared_layer(tmp_path, settings):
    dual = train(tmp_path / "run", **settings)
    initial = dual.masked(only=pl.lit(False), read="kept").state_dict()["places.weight"]
    trained = dual.model().state_dict()["places.weight"]
    for condition in (pl.col("label") == 1, pl.col("label") != 1):
        torch.testing.assert_close(dual.masked(only=condition).state_dict()["places.weight"], initial)
        torch.testing.assert_close(dual.masked(drop=condition).state_dict()["places.weight"], trained)
    early = dual.masked(only=pl.col("step") < 2).state_dict()["places.weight"]
    late = dual.masked(only=pl.col("step") >= 2).state_dict()["places.weight"]
    torch.testing.assert_close(early + late - initial, trained)
    assert (early - late).abs().max() > 1e-4


# Totals that were kept


@pytest.fixture(params=["online", "built", "only"])
def kept(request, tmp_path):
    by = ["label", ("task", "label"), "sample_id"]
    if request.param == "built":
        dual = train(tmp_path / "run", chunk_bytes=1500)
        for columns in by:
            dualform.build_totals(tmp_path / "run", columns)
        return dual.reopened()
    return train(tmp_path / "run", keep="totals" if request.param == "only" else "slots", totals=by)


@pytest.mark.parametrize("by", [["label"], ["task", "label"], ["sample_id"]])
def test_kept_totals_are_those_of_a_scan(dual, kept, by):
    assert_exact(kept)
    for layer in (SHARED, "words", "head"):
        one, other = (some.attend(TEXT[:2])[layer] for some in (dual, kept))
        assert_frame_equal(one.total(by), other.total(by), abs_tol=1e-6)
        columns = ["query", "position", "rank", *by, "weight", "visits"]
        assert_frame_equal(one.top(3, by=by).select(columns), other.top(3, by=by).select(columns), abs_tol=1e-6)
        first, second = (some.contributions(TEXT[:2])[layer].total(by) for some in (dual, kept))
        assert_frame_equal(first, second, abs_tol=1e-10)
        parts = (some.contributions(TEXT[:2])[layer].parts() for some in (dual, kept))
        assert_frame_equal(*parts, abs_tol=1e-10)


@pytest.mark.parametrize("condition", [pl.col("label") == 1, pl.col("label") != 1, pl.col("label").is_null()], ids=str)
def test_masks_from_kept_totals(dual, kept, condition):
    for name in ("only", "drop"):
        found, expected = (some.masked(**{name: condition}).state_dict() for some in (kept, dual))
        for parameter, value in expected.items():
            torch.testing.assert_close(found[parameter], value, rtol=0, atol=1e-12)


# Contributions and influence


def by_autograd(dual, unit, parameter):
    """⟨∂target/∂parameter, what its slots wrote⟩ for each example."""
    model = dual.model()
    initial = dual.masked(only=pl.lit(False), read="kept").get_parameter(parameter).detach()
    learned = model.get_parameter(parameter).detach() - initial
    found = []
    for tokens in TEXT[:3]:
        model.zero_grad()
        model(tokens[None])[0, unit].backward()
        found.append(float((model.get_parameter(parameter).grad * learned).sum()))
    return found


def test_contributions_of_several_examples(dual, adam):
    for some in (dual, adam):
        answers = some.contributions(TEXT[:3], target=1)
        for layer in (SHARED, "words"):
            expected = by_autograd(some, 1, f"{layer}.weight")
            assert answers[layer].parts()["slots"].to_list() == pytest.approx(expected, abs=1e-12)
            totals = answers[layer].total("label").group_by("query", maintain_order=True).agg(pl.col("total").sum())
            assert totals["total"].to_list() == pytest.approx(expected, abs=1e-12)
        assert answers["head"].parts()["remainder"].abs().max() < 1e-12


def test_as_many_examples_as_positions(tmp_path):
    """No axis of (1, T) is the examples, even if one has their number."""
    dual = train(tmp_path / "run", batch_axis={"words": 0, "body": 0})
    some = dual.contributions(TEXT[:LENGTH], target=1)[SHARED].parts()
    each = [dual.contributions(TEXT[n : n + 1], target=1)[SHARED].parts() for n in range(LENGTH)]
    for name in ("initial", "slots", "target"):
        assert some[name].to_list() == pytest.approx([float(one[name][0]) for one in each], abs=1e-12)
    assert dual.attend(TEXT[:LENGTH])[SHARED].queries.shape == (LENGTH, LENGTH, 1)


def test_queries_that_serve_all_examples_or_one_each(dual):
    layers = dual.store.manifest.layers
    found = []
    for by_row in (False, True):
        inputs = {"tokens": TEXT[:3], "by_row": by_row}
        found.append(run(dual.model(), layers, inputs, 3, {}, lambda output: output[:, 1]).layers[SHARED])
    torch.testing.assert_close(found[0].queries, found[1].queries)
    torch.testing.assert_close(found[0].gradients, found[1].gradients)


# A layer that serves all rows now and then


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("shared") / "mixed", now_and_then=True, chunk_bytes=3000)


def test_now_and_then(mixed):
    assert_exact(mixed)
    slots = mixed.slots(SHARED)
    assert slots.filter(pl.col("row").is_null())["step"].unique().sort().to_list() == [0, 2, 4]
    assert slots.filter(pl.col("row").is_not_null())["step"].unique().sort().to_list() == [1, 3]


@pytest.mark.parametrize("by", [["label"], ["step"], ["step", "label"], ["position"], ["token"]])
def test_totals_by_group_now_and_then(mixed, by):
    found = mixed.attend(TEXT[:1])[SHARED].total(by).filter(pl.col("position") == 1).drop("query", "position")
    expected = weights_of(mixed, SHARED, by).drop("visits").rename({"weight": "expected"})
    named = found.rename({"slot_position": "position"}, strict=False)
    both = named.join(expected, on=by, how="left", nulls_equal=True)
    assert both["total"].to_list() == pytest.approx(both["expected"].fill_null(0).to_list(), abs=1e-12)
    assert both["expected"].sum() == pytest.approx(expected["expected"].sum())


@pytest.mark.parametrize("condition", CONDITIONS, ids=str)
def test_a_mask_and_its_opposite_add_up_now_and_then(mixed, condition):
    kept, dropped = (mixed.masked(**{name: condition}, layers=SHARED) for name in ("only", "drop"))
    nothing = mixed.masked(only=pl.lit(False), layers=SHARED).state_dict()["places.weight"]
    both = kept.state_dict()["places.weight"] + dropped.state_dict()["places.weight"] - nothing
    torch.testing.assert_close(both, mixed.model().state_dict()["places.weight"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("online", [True, False])
def test_kept_totals_now_and_then(tmp_path, mixed, online):
    kept = train(tmp_path / "run", now_and_then=True, totals=["label"] if online else [])
    if not online:
        dualform.build_totals(tmp_path / "run", "label")
        kept = kept.reopened()
    for question in ("attend", "contributions"):
        one, other = (getattr(some, question)(TEXT[:2])[SHARED].total("label") for some in (mixed, kept))
        assert_frame_equal(one, other, abs_tol=1e-10)
    assert_same_weights(kept.masked(drop=pl.col("label") == 1), mixed.masked(drop=pl.col("label") == 1).state_dict())


@pytest.mark.parametrize("method", ["whitened", "kernel", "sketch"])
def test_rows_have_no_influence_through_them(dual, method):
    answer = dual.influence(TEXT[:2], target=1, method=method)
    assert SHARED in list(answer)
    assert answer.top(1000)["row"].null_count() == 0
    total = answer.total("label")
    assert total["label"].to_list() == list(range(CLASSES)) * 2
    others = dual.influence(TEXT[:2], target=1, method=method, layers=["words", "body", "head"])
    if method == "whitened":  # the others solve for all layers together
        assert total["total"].to_list() == pytest.approx(others.total("label")["total"].to_list(), rel=1e-10)


def test_influence_of_a_layer_shows_them(dual):
    answer = dual.influence(TEXT[:2], target=1)
    best = answer[SHARED].top(3)
    assert best["row"].null_count() == best.height
    assert best["influence"].abs().min() > 0
    assert answer[SHARED].total("label").filter(pl.col("label").is_null())["total"].abs().min() > 0
    by_position = answer.total("position")
    parts = [answer[layer].total("position", where=pl.col("label").is_not_null()) for layer in ("words", "body")]
    heads = answer["head"].total("position")
    first = sum(
        float(part.filter((pl.col("query") == 0) & (pl.col("slot_position") == 0))["total"].sum())
        for part in [*parts, heads]
    )
    assert float(by_position["total"][0]) == pytest.approx(first)


# What people see


def test_exports(dual, tmp_path):
    bare = dualform.open(dual.store.location)
    queries = torch.eye(LENGTH, dtype=torch.float64)[:2]
    write_top(bare, SHARED, queries, tmp_path, k=2)
    found = pl.read_parquet(tmp_path / f"attention-{SHARED}.parquet")
    assert found.select("row", "label").null_count().row(0) == (found.height, found.height)
    write_all(bare, SHARED, queries, tmp_path)
    every = pl.read_parquet(tmp_path / f"attention-{SHARED}" / "*.parquet")
    assert every.height == 2 * SLOTS
    assert every["row"].null_count() == every.height


def test_in_a_terminal_they_are_called_shared(dual):
    answer = dual.influence(TEXT[:1], target=1)
    for frame in (answer[SHARED].top(1), answer[SHARED].top(1, by=["label", "task"])):
        console = Console(file=io.StringIO(), width=250)
        show_influence(console, {"segments": answer.segments, "method": "whitened"}, frame)
        assert "shared" in console.file.getvalue()
        assert "None" not in console.file.getvalue()


def test_samples_of_an_evaluation(dual):
    study = SimpleNamespace(column="sample_id", inputs=TEXT[:2], target=1)
    seen = {int(sample) for ids in BATCHES for sample in ids}
    assert views.contribution(dual, study).shape == (2, len(seen))
