"""Segments replayed side by side, against one walk through training."""

import polars as pl
import pytest
import torch
from sealed import OPTIMIZERS, STEPS, train

from dualform.dual import segments, side_by_side
from dualform.dual.gradients import updates_of
from dualform.dual.weights import rebuilt


@pytest.fixture(scope="module", params=OPTIMIZERS)
def dual(request, tmp_path_factory):
    found = train(tmp_path_factory.mktemp("segments") / "run", request.param)
    assert found.store.snapshot_steps() == [0, 3, 6, 9, STEPS]
    return found


def assert_same(found, expected, atol=1e-12):
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture
def walks(monkeypatch):
    """The parameters that were rebuilt in one walk."""
    seen = []

    def watched(store, name, **where):
        seen.append(name)
        return rebuilt(store, name, **where)

    monkeypatch.setattr(side_by_side, "rebuilt", watched)
    return seen


@pytest.mark.parametrize("drop", [pl.col("label") == 1, pl.col("token") == 2, pl.col("step") < 4, pl.lit(True)])
@pytest.mark.parametrize("end", [2, 6, 7, STEPS])
def test_masks_are_those_of_one_walk(dual, drop, end):
    then = dual.until(end)
    assert_same(then.masked(drop=drop, workers=3), then.masked(drop=drop, read="kept"))


def test_a_mask_edits_something(dual):
    masked = dual.masked(drop=pl.col("label") == 1, workers=2)
    assert all((dual.primal().get_parameter(n) - p).abs().max() > 1e-4 for n, p in masked.named_parameters())


def test_no_parameter_needs_a_walk_of_its_own(dual, walks):
    dual.verify(workers=2)
    elementwise = updates_of(dual.store, "body.weight").kind != "sgd"
    assert bool(walks) != elementwise


@pytest.mark.parametrize("end", [2, 6, 7, STEPS])
def test_the_certificate_is_that_of_one_walk(dual, end):
    one, several = (dual.until(end).verify(workers=workers) for workers in (1, 3))
    assert one.frame.drop("gap", "distance", "reason").equals(several.frame.drop("gap", "distance", "reason"))
    assert several.compared_with == one.compared_with
    if end > 2:
        assert several.passed, str(several)
        assert several.frame["gap"].max() <= 1e-11, str(several)


def test_with_the_first_and_last_snapshot_only(tmp_path, walks):
    dual = train(tmp_path / "run", every=0)
    assert dual.store.snapshot_steps() == [0, STEPS]
    assert dual.verify(workers=2).passed
    assert walks == [p.name for p in dual.store.manifest.parameters]
    assert_same(dual.masked(drop="label = 1", workers=2), dual.masked(drop="label = 1"), atol=0)


def test_a_snapshot_of_every_step(tmp_path):
    dual = train(tmp_path / "run", "adam", every=1)
    assert dual.verify(workers=2).passed
    assert_same(dual.masked(drop="label = 1", workers=2), dual.masked(drop="label = 1"))


def test_some_outputs(tmp_path):
    dual = train(tmp_path / "run", outputs={"body": [0, 2]})
    one, several = (dual.verify(workers=workers) for workers in (1, 2))
    assert several.passed, str(several)
    assert "2 of 4 rows" in str(several)
    assert one.frame["verdict"].equals(several.frame["verdict"])


@pytest.mark.parametrize("store", ["float32", "float16"])
def test_in_less_than_double_precision(tmp_path, store, walks):
    dual = train(tmp_path / "run", precision=torch.float32, dtype=store)
    assert dual.verify(workers=2).passed
    assert walks == []
    bar = 1e-5 if store == "float32" else 1e-3
    assert_same(dual.masked(drop="label = 1", workers=2), dual.masked(drop="label = 1"), atol=bar)


@pytest.mark.parametrize("what", ["model", "exp_avg", "exp_avg_sq"])
def test_a_snapshot_on_the_way_proves_nothing(tmp_path, walks, what):
    """The certificate is about the way from the beginning: weights and state on the way may be anything."""
    dual = train(tmp_path / "run")
    expected, masked = dual.verify(), dual.masked(drop="label = 1")
    walks.clear()
    snapshot = dual.store.snapshot(6)
    name = "model.body.weight" if what == "model" else f"state.body.weight.{what}"
    snapshot._checked[name] = snapshot[name] * 1.5
    found = dual.verify(workers=2)
    assert found.frame["verdict"].equals(expected.frame["verdict"])
    assert found.frame["gap"].max() <= 1e-11, str(found)
    assert_same(dual.masked(drop="label = 1", workers=2), masked)
    assert walks == ["body.weight"] * 2


def test_slots_that_do_not_make_the_weights_are_found_out(tmp_path):
    """An error in the first segment is still there at the end, though each later segment is right."""
    dual = train(tmp_path / "run")
    number, _ = dual.store.layer("body")
    errors = next(dual.store.chunks("body")).file[f"{number}.errors"]
    next(dual.store.chunks("body")).file._checked[f"{number}.errors"] = errors * 1.001
    one, several = (dual.verify(workers=workers).frame for workers in (1, 2))
    assert several["verdict"].equals(one["verdict"])
    assert "fail" in several["verdict"]
    assert several["gap"].to_list() == pytest.approx(one["gap"].to_list(), rel=1e-9, abs=1e-12)


def test_a_transfer_is_the_updates_without_gradients(dual):
    updates = updates_of(dual.store, "body.weight", end=6)
    if updates.kind == "sgd":
        return
    first, now = torch.randn(2, 4, 4, dtype=torch.float64).repeat(2, 1, 1, 1)
    transfer = segments.Transfer()
    segments.forward(dual.store, updates, None, lambda linear: (transfer.on(linear), linear.apply(*now, None)))
    torch.testing.assert_close(torch.stack(transfer(*first)), now, rtol=0, atol=1e-13)
