"""Masks that read the fewer slots, against the initial part plus every slot that is kept."""

import polars as pl
import pytest
import torch
from sealed import STEPS, train

import dualform
from dualform.dual.masked import masked, plan
from dualform.dual.weights import rebuilt
from dualform.query.conditions import Condition
from dualform.store.slots import SlotChunk

CONDITIONS = {
    "one label": pl.col("label") == 1,
    "all but one label": pl.col("label") != 1,
    "one token": pl.col("token") == 2,
    "one step": pl.col("step") == 4,
    "all but one step": pl.col("step") != 4,
    "from one snapshot to another": pl.col("step").is_between(3, 8),
    "across snapshots": pl.col("step").is_between(2, 6),
    "steps and labels": (pl.col("step") < 6) | (pl.col("label") == 2),
    "everything": pl.lit(True),
    "nothing": pl.lit(False),
}


@pytest.fixture(scope="module", params=["sgd", "plain", "nesterov"])
def dual(request, tmp_path_factory):
    return train(tmp_path_factory.mktemp("masked") / "run", request.param)


def mask(dual, condition):
    return Condition(dual.store, condition, dual.end_step)


def parameters(dual):
    return [parameter.name for parameter in dual.store.manifest.parameters]


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("end", [2, 6, 7, STEPS])
def test_it_is_the_initial_part_and_what_is_kept(dual, condition, end):
    then = dual.at(end)
    keep, trained = mask(then, condition), then.model().state_dict()
    for name in parameters(dual):
        found = masked(dual.store, name, trained[name], end=end, keep=keep)
        expected = rebuilt(dual.store, name, begin=0, end=end, keep=keep)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
def test_the_fewer_are_read(dual, condition):
    """Counted slot by slot, stretch by stretch."""
    keep = mask(dual, condition)
    for name in parameters(dual):
        kept, left = dict.fromkeys([0, 3, 6, 9], 0), dict.fromkeys([0, 3, 6, 9], 0)
        for layer in dual.store.users(name):
            for chunk in dual.store.chunks(layer.name):
                for step, taken in zip(chunk.per_slot(chunk.blocks[:, 0]), keep(chunk), strict=True):
                    (kept if taken else left)[step // 3 * 3] += 1
        expected = sum(min(kept[begin], left[begin]) for begin in kept)
        assert plan(dual.store, name, end=STEPS, keep=keep).slots == expected
        assert dual.mask_reads(only=condition)[name] == expected


@pytest.mark.parametrize("condition", ["step < 6", "step BETWEEN 3 AND 8", "true", "false"])
def test_whole_stretches_need_no_slots(dual, condition, monkeypatch):
    expected = [rebuilt(dual.store, n, begin=0, end=STEPS, keep=mask(dual, condition)) for n in parameters(dual)]

    def refuse(*_):
        raise AssertionError("a slot is read")

    for name in ("keys", "errors", "some_keys", "some_errors"):
        monkeypatch.setattr(SlotChunk, name, refuse)
    found = dual.masked(only=condition).state_dict()
    for name, value in zip(parameters(dual), expected, strict=True):
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-13)


def test_a_sample_is_read_at_its_visits_only(dual, monkeypatch):
    read, some_errors = [], SlotChunk.some_errors
    monkeypatch.setattr(
        SlotChunk,
        "some_errors",
        lambda self, places, *rest: (read.append(len(places)), some_errors(self, places, *rest))[1],
    )
    dual.masked(drop="step = 4 AND label = 1", layers="body")
    visits = dual.rows.filter(pl.col("step") == 4, pl.col("label") == 1).height
    assert 0 < sum(read) == 2 * 3 * visits  # weight and bias, three positions


def test_where_an_optimizer_is_replayed_everything_is_read(tmp_path):
    dual = train(tmp_path / "run", "adam")
    assert plan(dual.store, "body.weight", end=STEPS, keep=mask(dual, "label = 1")) is None
    assert dual.mask_reads(drop="label = 1")["body.weight"] == dual.store.slots("body")


def test_group_deltas_need_no_slots(tmp_path):
    dual = train(tmp_path / "run", "sgd", totals=["label"])
    assert set(dual.mask_reads(drop="label = 1").values()) == {0}
    assert sum(dual.mask_reads(drop="step = 4").values()) > 0


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("condition", ["label = 1", "label <> 1", "true", "false"])
def test_of_groups_too_the_fewer_are_taken(tmp_path, optimizer, condition):
    """Those left out from the trained weights, or those kept on top of the initial part."""
    dual = train(tmp_path / "run", optimizer, totals=["label"])
    found, expected = (dual.masked(only=condition, read=read).state_dict() for read in ("fewest", "kept"))
    for name in parameters(dual):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)


def test_what_moved_without_slots_is_no_memory(tmp_path):
    """A layer that is marked as inexact: as before, its initial part and what is kept."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", dtype="float64", on_unexplained="mark") as recorder:
        for step in range(4):
            recorder.batch(sample_id=range(4))
            optimizer.zero_grad()
            model(torch.ones(4, 3).double()).sum().backward()
            if step == 2:
                model[0].weight.data += 1
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    with pytest.warns(dualform.errors.InexactWarning):
        found = dual.masked(drop="sample_id = 1")[0].weight
    expected = rebuilt(dual.store, "0.weight", begin=0, end=4, keep=mask(dual, "sample_id <> 1"))
    torch.testing.assert_close(found.detach(), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_in_less_than_double_precision(tmp_path, dtype):
    dual = train(tmp_path / "run", "sgd", precision=torch.float32, dtype=dtype)
    for condition in CONDITIONS.values():
        found = dual.masked(only=condition).state_dict()
        for name in parameters(dual):
            expected = rebuilt(dual.store, name, begin=0, end=STEPS, keep=mask(dual, condition))
            bar = 1e-6 if dtype == "float32" else 1e-3
            torch.testing.assert_close(found[name].double(), expected, rtol=0, atol=bar)
