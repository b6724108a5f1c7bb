"""What a step can look like: accumulation, clipping, scaling, closures, several optimizers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import dualform
from recorded_samples import INPUTS, LABELS, record, slot_frame
from training import FEATURES, SAMPLES, assert_exact, assert_same_weights, network, sgd, train


@pytest.mark.parametrize("microbatches", [2, 3])
@pytest.mark.parametrize("averaged", ["in the loss", "in the gradient"])
def test_gradient_accumulation(tmp_path, microbatches, averaged):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for step in range(4):
            optimizer.zero_grad()
            for part in range(microbatches):
                ids = torch.arange(3) + 3 * (part + step % 2)
                recorder.batch(sample_id=ids)
                loss = F.cross_entropy(model(INPUTS[ids]), LABELS[ids])
                (loss / microbatches if averaged == "in the loss" else loss).backward()
            if averaged == "in the gradient":
                for parameter in model.parameters():
                    parameter.grad /= microbatches
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert_exact(dual)
    slots = slot_frame(dual, "2")
    assert slots["backward"].to_list() == sorted(list(range(microbatches)) * 3) * 4
    assert torch.equal(dual.layer("0").keys, INPUTS[slots["sample_id"].to_list()])


def test_clipping_by_norm(tmp_path):
    norms = []
    run = train(tmp_path / "run", after_backward=lambda m: norms.append(clip_grad_norm_(m.parameters(), 0.05)))
    assert min(norms) > 0.05
    assert_exact(run.dual)
    assert_same_weights(run.dual.at(3).model(), run.checkpoints[3])


def test_accumulation_with_clipping_of_the_sum(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for _ in range(4):
            optimizer.zero_grad()
            for ids in (torch.arange(4), torch.arange(4, 9)):
                recorder.batch(sample_id=ids)
                F.cross_entropy(model(INPUTS[ids]), LABELS[ids]).backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    assert_exact(dualform.open(tmp_path / "run", model))


def test_gradients_scaled_and_scaled_back(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            (1024 * F.cross_entropy(model(INPUTS), LABELS)).backward()
            for parameter in model.parameters():
                parameter.grad /= 1024
            optimizer.step()
    assert_exact(dualform.open(tmp_path / "run", model))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_backward_pass_that_was_thrown_away(tmp_path, set_to_none):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for _ in range(3):
            for ids in (torch.arange(4), torch.arange(4, 9)):
                recorder.batch(sample_id=ids)
                optimizer.zero_grad(set_to_none=set_to_none)
                F.cross_entropy(model(INPUTS[ids]), LABELS[ids]).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert_exact(dual)
    assert dual.rows["sample_id"].unique().to_list() == [4, 5, 6, 7, 8]


def test_a_gradient_by_autograd_grad_does_not_count(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            inputs = INPUTS.clone().requires_grad_()
            torch.autograd.grad(model(inputs).sum(), inputs)
            F.cross_entropy(model(INPUTS), LABELS).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert_exact(dual)
    assert dual.layer("0").slots == 3 * SAMPLES


@pytest.mark.parametrize("named", [False, True])
def test_a_step_with_a_closure(tmp_path, named):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:

        def closure():
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(INPUTS), LABELS)
            loss.backward()
            return loss

        losses = [optimizer.step(closure=closure) if named else optimizer.step(closure) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert_exact(dualform.open(tmp_path / "run", model))


def test_rows_of_another_number_in_each_step(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for rows in (5, 1, SAMPLES, 0, 3):
            recorder.batch(sample_id=torch.arange(rows))
            optimizer.zero_grad()
            F.cross_entropy(model(INPUTS[:rows]), LABELS[:rows], reduction="sum").backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert_exact(dual)
    assert dual.rows["step"].value_counts().sort("step")["count"].to_list() == [5, 1, 12, 3]
    assert dual.info()["steps"] == 5


def test_two_networks_with_their_own_optimizers_trained_in_turn(tmp_path):
    """As in adversarial training: the second's loss goes through the first, whose gradients are thrown away."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"judge": nn.Linear(FEATURES, 1), "maker": nn.Linear(3, FEATURES)}).double()
    judging = torch.optim.SGD(model["judge"].parameters(), lr=0.1, momentum=0.9)
    making = torch.optim.SGD(model["maker"].parameters(), lr=0.1, momentum=0.5)
    with record(model, tmp_path / "run", [judging, making]) as recorder:
        for _ in range(4):
            noise = torch.randn(SAMPLES, 3).double()
            recorder.batch(sample_id=range(SAMPLES))
            judging.zero_grad()
            F.softplus(model["judge"](model["maker"](noise).detach())).mean().backward()
            judging.step()
            recorder.batch(sample_id=range(SAMPLES))
            making.zero_grad()
            F.softplus(-model["judge"](model["maker"](noise))).mean().backward()
            making.step()
    dual = dualform.open(tmp_path / "run", model)
    assert_exact(dual)
    assert dual.layer("judge").slots == dual.layer("maker").slots == 4 * SAMPLES
