"""What the audit finds."""

import polars as pl
import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from dualform.errors import UnexplainedError
from recorded_samples import INPUTS, LABELS, record
from training import SAMPLES, network, sgd, train


def break_the_step(path, change):
    model = network()
    optimizer = sgd(model)
    with record(model, path, optimizer) as recorder:
        for step in range(3):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            F.cross_entropy(model(INPUTS), LABELS).backward()
            if step == 2:
                change(model)
            optimizer.step()


def clip_values(model):
    clip_grad_value_(model.parameters(), 0.01)


def add_noise(model):
    model[2].weight.grad += 1e-6 * torch.randn(4, 7, dtype=torch.float64)


def use_outside(model):
    F.linear(INPUTS, model[0].weight).sum().backward()


@pytest.mark.parametrize(
    ("change", "name"), [(clip_values, r"[02]\.(weight|bias)"), (add_noise, r"2\.weight"), (use_outside, r"0\.weight")]
)
def test_a_gradient_that_the_slots_do_not_explain(tmp_path, change, name):
    with pytest.raises(UnexplainedError, match=rf"step 2.*'{name}'.*residual.*Likely causes.*clipped by value"):
        break_the_step(tmp_path / "run", change)


def through_data(model):
    model[0].weight.data.mul_(0.5)


def in_place(model):
    with torch.no_grad():
        model[2].bias.clamp_(-1e-9, 1e-9)


def load(model):
    model.load_state_dict(network(seed=5).state_dict())


@pytest.mark.parametrize("change", [through_data, in_place, load])
def test_weights_changed_by_something_else(tmp_path, change):
    with pytest.raises(UnexplainedError, match=r"step 2.*changed.*load_state_dict"):
        break_the_step(tmp_path / "run", change)


def test_weights_changed_after_the_last_step_are_not_taken_for_the_trained_ones(tmp_path):
    model = network()
    recorder = record(model, tmp_path / "run")
    through_data(model)
    with pytest.warns(UserWarning, match=r"changed.*last step"):
        recorder.close()


def test_the_audit_of_each_step_is_kept(tmp_path):
    run = train(tmp_path / "run", after_backward=lambda m: clip_grad_norm_(m.parameters(), 0.05))
    updates = run.dual.store.updates
    assert updates.height == 6 * 4
    assert updates["residual"].max() < 1e-13
    factors = updates["factors"].list.first()
    assert 0 < factors.min() <= factors.max() < 1  # clipped in each step
    by_step = updates.with_columns(factors).group_by("step").agg(pl.col("factors").max() / pl.col("factors").min())
    assert by_step["factors"].max() < 1 + 1e-10  # one factor for all parameters
