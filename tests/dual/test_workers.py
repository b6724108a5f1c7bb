import polars as pl
import pytest
import torch
from sealed import OPTIMIZERS, STEPS, train

from dualform.dual.masked import rebuild_each
from dualform.dual.weights import rebuilt
from dualform.errors import QuestionError


def test_several_workers_rebuild_what_one_rebuilds(with_snapshots):
    store = with_snapshots.dual.store
    names = [p.name for p in store.manifest.parameters]
    for name, found in zip(names, rebuild_each(store, names, end=24, workers=2), strict=True):
        assert torch.equal(found, rebuilt(store, name, begin=0, end=24))


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "2"])
def test_the_number_of_workers_is_checked(dual, workers):
    with pytest.raises(QuestionError, match=r"workers=.*whole number from 1 on"):
        dual.verify(workers=workers)


def test_progress_reaches_its_end(dual):
    for ask in (dual.verify, lambda **how: dual.masked(drop="label = 1", **how)):
        seen = []
        ask(workers=2, progress=lambda what, done, of, seen=seen: seen.append((done, of)))
        assert seen == [(done, 4) for done in range(5)]


@pytest.fixture(scope="module", params=OPTIMIZERS)
def sealed_run(request, tmp_path_factory):
    return train(tmp_path_factory.mktemp("parallel") / "run", request.param)


@pytest.mark.parametrize("end", [2, 6, 7, STEPS])
def test_masks_and_certificates_do_not_depend_on_the_number_of_workers(sealed_run, end):
    dual = sealed_run.at(end)
    one, several = (dual.masked(drop=pl.col("label") == 1, workers=workers) for workers in (1, 3))
    for expected, found in zip(one.parameters(), several.parameters(), strict=True):
        assert torch.equal(expected, found)
    assert dual.verify(workers=1).frame.equals(dual.verify(workers=3).frame)


def test_a_damaged_snapshot_on_the_way_does_not_matter(tmp_path):
    """The certificate is about the way from the beginning: weights and state in between may be anything."""
    dual = train(tmp_path / "run")
    snapshot = dual.store.snapshot(6)
    snapshot._checked["model.body.weight"] = snapshot["model.body.weight"] * 1.5
    assert dual.verify(workers=2).frame["gap"].max() <= 1e-11


def test_slots_that_do_not_make_the_weights_fail_on_any_number_of_workers(tmp_path):
    dual = train(tmp_path / "run")
    number, _ = dual.store.layer("body")
    errors = next(dual.store.chunks("body")).file[f"{number}.errors"]
    next(dual.store.chunks("body")).file._checked[f"{number}.errors"] = errors * 1.001
    for workers in (1, 2):
        assert "fail" in dual.verify(workers=workers).frame["verdict"]
