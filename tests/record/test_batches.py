"""Batches that are empty, tiny, repeated, not announced, or end with an exception."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import BatchError, UnexplainedError
from plain_loops import assert_exact, batches, network, sgd, train

pytestmark = pytest.mark.usefixtures("precision")


class Branches(nn.Module):
    """Two layers of the same sizes, called in any order, or one of them alone."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, names):
        return sum(getattr(self, name)(x).square().sum() for name in names)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("width", [1, 2, 40])
@pytest.mark.parametrize("names", [("ab", "ba"), ("a", "b"), ("ab", "b"), ("aa", "ab")])
def test_memory_that_comes_back_may_go_to_other_layers(path, dtype, width, names):
    model = Branches(width)
    optimizer = sgd(model, lr=0.001)
    with dualform.record(model, optimizer, path, dtype=dtype, chunk_bytes=1 << 12) as recorder:
        for number in range(160):
            ids, x = torch.arange(5) + 5 * number, torch.randn(5, width)
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            model(x, names[number // 20 % 2]).backward()
            optimizer.step()
            if number % 20 == 19:
                recorder.seal()  # so that the writer is done with everything
    certificate = dualform.open(path, model).verify()
    assert certificate.passed, certificate


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_layer_that_is_called_twice_keeps_its_calls_apart(path, dtype):
    first, twice = nn.Linear(6, 8), nn.Linear(8, 8)
    model = nn.Sequential(first, nn.Tanh(), twice, nn.Tanh(), twice)
    optimizer, keys = sgd(model, lr=0.01), []
    twice.register_forward_hook(lambda module, given, _: keys.append(given[0].detach().clone()))
    with dualform.record(model, optimizer, path, dtype=dtype) as recorder:
        for number in range(16):
            recorder.batch(sample_id=torch.arange(5) + 5 * number)
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().sum().backward()
            optimizer.step()
    found = dualform.open(path, model).layer("2").keys
    torch.testing.assert_close(found, torch.cat(keys).to(found.dtype), rtol=1e-3, atol=1e-3)


def test_batches_without_rows_one_after_the_other(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for number in range(6):
            rows = 0 if number % 4 else 3
            recorder.batch(sample_id=torch.arange(rows))
            optimizer.zero_grad()
            model(torch.randn(rows, 4)).square().sum().backward()
            optimizer.step()
    assert dualform.open(path, model).verify().passed


def test_an_optimizer_of_which_nothing_is_recorded(path):
    model = network(4, 8, 2)
    first, second = sgd(model[0]), sgd(model[2])
    with dualform.record(model, [first, second], path, layers=["0"]) as recorder:
        for ids, x, y in batches(5):
            recorder.batch(sample_id=ids)
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            first.step()
            second.step()
    assert dualform.open(path, model).verify().passed


def test_a_parameter_outside_its_module_beside_a_frozen_one(path):
    """As many parameters are reached as the modules that were called have, but they are others."""
    model = nn.ModuleDict({"seen": nn.Linear(4, 4), "past": nn.Linear(4, 4)})
    model["seen"].bias.requires_grad_(False)
    model["past"].weight.requires_grad_(False)
    optimizer = sgd(model)
    x = torch.randn(5, 4)
    with (
        pytest.raises(UnexplainedError, match="past"),
        dualform.record(model, optimizer, path) as recorder,
    ):
        for number in range(3):
            recorder.batch(sample_id=torch.arange(5) + number)
            optimizer.zero_grad()
            (F.linear(x, model["past"].weight, model["past"].bias) + model["seen"](x)).square().sum().backward()
            optimizer.step()


def test_non_finite_values_are_recorded_and_told(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for number, (ids, x, y) in enumerate(batches(5)):
            train(model, optimizer, recorder, [(ids, x * (float("nan") if number == 3 else 1), y)])
    dual = dualform.open(path, model)
    assert dual.end_step == 5
    assert dual.info()["not_finite_from"] == {"0.weight": 3, "0.bias": 3, "2.weight": 3, "2.bias": 3}
    certificate = dual.verify()
    assert not certificate.passed
    assert "not finite from step 3" in certificate.frame["reason"][0]
    assert dual.at(3).end_step == 3


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_batches_and_batches_of_one(path, rows):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for number, (ids, x, y) in enumerate(batches(5)):
            some = slice(0, rows if number % 2 else 6)
            recorder.batch(sample_id=ids[some], name=[f"sample {i}" for i in ids[some].tolist()])
            optimizer.zero_grad()
            F.mse_loss(model(x[some]), y[some], reduction="sum").backward()
            optimizer.step()
    assert_exact(path, model)
    assert dualform.open(path).rows.height == 18 + 2 * rows


def test_negative_and_repeated_ids_and_many_strings(path):
    model = network(4, 2)
    optimizer = sgd(model, lr=1e-6)
    count = 25_000
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    with dualform.record(model, optimizer, path) as recorder:
        for number in range(4):
            recorder.batch(sample_id=torch.arange(count) % 7 - 3, name=[f"distinct {number} {i}" for i in range(count)])
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    dual = dualform.open(path, model)
    assert dual.rows["name"].n_unique() == 100_000
    totals = dual.attend(x[:2])["0"].total("sample_id")
    assert totals["sample_id"].unique().sort().to_list() == [-3, -2, -1, 0, 1, 2, 3]
    assert dual.store.key_count("0") == count  # the same inputs four times, stored once


def test_no_batch_call_is_an_error_at_the_step(path):
    model = network(4, 2)
    optimizer = sgd(model)
    with (
        pytest.raises(BatchError, match=r"no recorder.batch\(\) call"),
        dualform.record(model, optimizer, path),
    ):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()


def test_training_again_without_a_new_batch_call_is_an_error(path):
    model = network(4, 2)
    optimizer = sgd(model)
    with (
        pytest.raises(BatchError, match="without a new"),
        dualform.record(model, optimizer, path) as recorder,
    ):
        recorder.batch(sample_id=[1, 2, 3])
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
