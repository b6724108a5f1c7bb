"""Networks people train on two ranks: parameters are put together again, and rows have the names of their samples."""

import polars as pl
import pytest
import torch

import dualform
import rank_networks
from dualform.store.slots import SlotChunk
from halves import require
from rank_networks import Branches, dataset, make
from recorded_networks import target


def check_names(dual, name, seen):
    """Each row is named by a sample that its rank saw, in the order in which it saw it."""
    for rank, batches in enumerate(seen):
        mine = dual.rows.filter(pl.col("process") == rank)
        assert mine["sample_id"].to_list() == [sample for batch in batches for sample in batch][: mine.height]
    evidence = dual.info()["row_evidence"]
    # Positions are the same for all rows: nothing can be shown of them
    assert {layer for layer, how in evidence.items() if "proved" not in how} <= {"places"}, evidence


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", ["digits", "cnn", "gpt"])
def test_parameters_are_put_together_again(ranks, tmp_path, name, optimizer):
    path = tmp_path / "run"
    seen = ranks.run(rank_networks.train, name, path, optimizer=optimizer, chunk_bytes=20_000)
    dual = dualform.open(path, make(name))
    certificate = dual.verify()
    assert certificate.passed, str(certificate)
    check_names(dual, name, seen)
    assert len(dual.store.log) == dual.end_step


def test_the_keys_of_a_sample_are_its_inputs(ranks, tmp_path):
    """The first layer's keys are the images themselves."""
    path = tmp_path / "run"
    ranks.run(rank_networks.train, "digits", path)
    dual = dualform.open(path, make("digits"))
    images, _, _ = dataset("digits")
    keys = dual.layer("0").keys
    ids = dual.rows["sample_id"].to_torch()
    torch.testing.assert_close(keys, images[ids].to(keys.dtype), rtol=0, atol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulated": 2},
        {"wrapper": {"static_graph": True}},
        {"wrapper": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1}},
        {"keep": "rows"},
        {"keep": "keys"},
        {"every": 2},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_ways_of_training_and_of_storing(ranks, tmp_path, settings):
    path = tmp_path / "run"
    ranks.run(rank_networks.train, "gpt", path, optimizer="adamw", **settings)
    dual = dualform.open(path, make("gpt"))
    inputs, _, _ = dataset("gpt")
    if "every" in settings or settings.get("keep") == "keys":
        kept = [step for step in range(dual.end_step) if dual.store.manifest.keeps_step(step)]
        [chunk] = dual.store.addresses("up")
        # Each has slots of both ranks, whose backward passes are numbered by rank
        assert chunk.blocks[:, :2].tolist() == [[step, rank] for step in kept for rank in range(2)]
        assert dual.attend(inputs[:2])["up"].top(2).height == 2 * 2 * inputs.shape[1]
        return
    assert dual.verify().passed, str(dual.verify())
    assert dual.contributions(inputs[:2], target=target).top(2, by="sample_id").height


def test_bfloat16_autocast(ranks, tmp_path):
    require(torch.bfloat16)
    path = tmp_path / "run"
    ranks.run(rank_networks.train, "digits", path, autocast=True)
    assert dualform.open(path, make("digits")).verify().passed


def test_a_layer_that_one_rank_does_not_use(ranks, tmp_path):
    path = tmp_path / "run"
    ranks.run(rank_networks.train_branches, path)
    dual = dualform.open(path, Branches().double())
    assert dual.verify().passed, str(dual.verify())
    top = dual.attend(torch.ones(1, 4, dtype=torch.float64))["second"].top(100)
    assert set(top["sample_id"]) == {0, 1, 2, 6, 7, 8}


def test_chunks_that_end_at_other_steps_on_each_rank(ranks, tmp_path):
    path = tmp_path / "run"
    ranks.run(rank_networks.seal_apart, path)
    dual = dualform.open(path)
    assert [chunk.end_step for chunk in dual.store.manifest.chunks] == [2, 8]
    assert dual.verify().passed
    assert dual.at(4).verify().passed
    for chunk in dual.store.chunks(""):
        assert isinstance(chunk, SlotChunk)
        steps = chunk.blocks[:, 0].tolist()
        assert steps == sorted(steps)
    ids = dual.rows["sample_id"].to_list()
    assert ids == [(4 * step + row) % 24 for step in range(8) for row in range(4)]
