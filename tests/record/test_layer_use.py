"""What a layer can go through: used twice, frozen, skipped, evaluated in between."""

import copy

import polars as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
from recorded_samples import INPUTS, LABELS, record, slot_frame
from training import FEATURES, SAMPLES, assert_exact, assert_same_weights, checkpoint, network, sgd, train


class Reused(nn.Module):
    """One linear map, used as often as asked."""

    def __init__(self, times):
        super().__init__()
        self.times = times
        self.map = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, 4)

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.map(x))
        return self.head(x)


def test_a_module_used_several_times_in_a_step(tmp_path):
    torch.manual_seed(0)
    run = train(tmp_path / "run", model=Reused(3).double(), steps=3)
    assert_exact(run.dual)
    slots = slot_frame(run.dual, "map")
    assert slots["call"].to_list() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2] * 3
    # the first call sees the data, so call numbers are in the order of the forward pass
    ids = slots.filter(pl.col("call") == 0)["sample_id"].to_list()
    first = run.dual.layer("map").keys[slots.filter(pl.col("call") == 0)["slot"].to_list()]
    assert torch.equal(first, INPUTS[ids])


def test_a_frozen_layer_keeps_still_and_may_be_thawed(tmp_path):
    model = network()
    model[0].requires_grad_(False)
    run = train(tmp_path / "run", model=model, after_step=lambda step: model[0].requires_grad_(step >= 2), steps=6)
    assert_exact(run.dual)
    slots = slot_frame(run.dual, "0")
    assert slots["step"].unique().sort().to_list() == [3, 4, 5]
    assert torch.equal(run.checkpoints[3]["0.weight"], run.checkpoints[0]["0.weight"])
    assert_same_weights(run.dual.at(5).model(), run.checkpoints[5])


def test_frozen_in_the_middle(tmp_path):
    model = network()
    run = train(tmp_path / "run", model=model, after_step=lambda step: model[2].requires_grad_(step < 2), steps=6)
    assert_exact(run.dual)
    assert_same_weights(run.dual.at(5).model(), run.checkpoints[5])


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_only_one_parameter_of_a_layer_is_trained(tmp_path, frozen):
    model = network()
    getattr(model[2], frozen).requires_grad_(False)
    run = train(tmp_path / "run", model=model)
    assert_exact(run.dual)
    assert_same_weights(run.dual.at(4).model(), run.checkpoints[4])


class Sometimes(nn.Module):
    """Takes a detour through a layer of its own in some steps."""

    def __init__(self):
        super().__init__()
        self.stem, self.detour, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = torch.tanh(self.stem(x))
        return self.head(self.detour(x) if self.calls % 3 == 0 else x)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_layer_skipped_in_some_steps(tmp_path, set_to_none):
    """A gradient that is None stops the momentum of a layer; a zero gradient does not."""
    torch.manual_seed(0)
    model = Sometimes().double()
    optimizer = sgd(model)
    checkpoints = [checkpoint(model)]
    with record(model, tmp_path / "run", optimizer) as recorder:
        for _ in range(8):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad(set_to_none=set_to_none)
            F.cross_entropy(model(INPUTS), LABELS).backward()
            optimizer.step()
            checkpoints.append(checkpoint(model))
    dual = dualform.open(tmp_path / "run", model)
    assert_exact(dual)
    assert_same_weights(dual.at(7).model(), checkpoints[7])
    assert slot_frame(dual, "detour")["step"].unique().to_list() == [2, 5]
    assert torch.equal(checkpoints[4]["detour.weight"], checkpoints[3]["detour.weight"]) is set_to_none


@pytest.mark.parametrize("no_grad", [True, False])
@pytest.mark.parametrize("rows", [3, 5, SAMPLES])
def test_evaluation_in_the_middle_of_training(tmp_path, no_grad, rows):
    model = network()

    def evaluate(_):
        model.eval()
        with torch.set_grad_enabled(not no_grad):
            F.cross_entropy(model(INPUTS[:rows]), LABELS[:rows])
        model.train()

    run = train(tmp_path / "run", model=model, after_step=evaluate)
    assert_exact(run.dual)
    assert run.dual.layer("0").slots == 6 * 5


@pytest.mark.parametrize("no_grad", [True, False])
def test_evaluation_between_batch_and_forward(tmp_path, no_grad):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(5))
            with torch.set_grad_enabled(not no_grad):
                model(INPUTS[5:])
            optimizer.zero_grad()
            F.cross_entropy(model(INPUTS[:5]), LABELS[:5]).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert_exact(dual)
    assert torch.equal(dual.layer("0").keys, INPUTS[:5].repeat(3, 1))


def test_a_copy_of_the_model_made_and_run_in_the_middle(tmp_path):
    model = network()
    copies = []

    def keep_a_copy(_):
        copies.append(copy.deepcopy(model))
        copies[-1](INPUTS)

    run = train(tmp_path / "run", model=model, after_step=keep_a_copy, steps=3)
    assert_exact(run.dual)
    for number, copied in enumerate(copies):
        assert_same_weights(copied, run.checkpoints[number + 1])


@pytest.mark.parametrize("bias", [True, False])
def test_with_and_without_a_bias(tmp_path, bias):
    run = train(tmp_path / "run", model=network(bias=bias))
    assert_exact(run.dual)
    assert ("0.bias" in run.dual.info()["layers"][0]["parameters"]) is bias


def test_an_activation_in_place(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(inplace=True), nn.Linear(7, 4)).double()
    assert_exact(train(tmp_path / "run", model=model).dual)


def test_the_users_buffers_may_be_used_again(tmp_path):
    model = network()
    optimizer = sgd(model)
    inputs, ids = torch.empty(4, FEATURES, dtype=torch.float64), torch.empty(4, dtype=torch.int64)
    expected = []
    with record(model, tmp_path / "run", optimizer) as recorder:
        for step in range(3):
            ids.copy_(torch.arange(4) + step)
            inputs.copy_(INPUTS[ids])
            expected.append(INPUTS[ids])
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), LABELS[ids]).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert torch.equal(dual.layer("0").keys, torch.cat(expected))
    assert dual.rows["sample_id"].to_list() == [0, 1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 5]


def test_a_gradient_of_exactly_zero(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for factor in (1.0, 0.0, 1.0):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            (factor * F.cross_entropy(model(INPUTS), LABELS)).backward()
            optimizer.step()
    assert_exact(dualform.open(tmp_path / "run", model))


def test_a_bias_that_moves_on_rounding_noise_alone(tmp_path):
    """Before batch normalisation a bias has no true gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 4))
    run = train(tmp_path / "run", model=model, precision=torch.float32, dtype="float32", rows=8, steps=10)
    assert run.dual.verify().passed, str(run.dual.verify())
