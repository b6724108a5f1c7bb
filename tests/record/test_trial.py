"""Optimizers of other libraries are recognised by their names and by what they do."""

import copy

import pytest
import torch
from torch import nn

from dualform.record.optimizers import NAMED, replay_for
from lion import LerpingLion, Lion


def optimizer_of(kind, **settings):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return kind(model.parameters(), **settings)


def named(name):
    """A class decorator: the name that the class goes by."""

    def rename(kind):
        kind.__name__ = name
        return kind

    return rename


class Mine(Lion):
    """A subclass that leaves the update alone."""


@named("Lion")
class Cautious(Lion):
    """Moves only where the update agrees with the gradient, as an option of timm's does."""

    @torch.no_grad()
    def step(self, closure=None):
        before = {p: p.clone() for group in self.param_groups for p in group["params"]}
        super().step(closure)
        for p, old in before.items():
            p.copy_(torch.where((old - p) * p.grad > 0, p, old))


@named("Lion")
class Elsewhere(Lion):
    """Has its average under another name, as bitsandbytes does."""

    @torch.no_grad()
    def step(self, closure=None):
        for state in self.state.values():
            state["exp_avg"] = state.pop("state1")
        super().step(closure)
        for state in self.state.values():
            state["state1"] = state.pop("exp_avg")


@named("Lion")
class DecaysByItself(Lion):
    """Does not multiply decay by lr, as an option of lion-pytorch does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["weight_decay"]).div_(1 - group["lr"] * group["weight_decay"])
        super().step(closure)


@named("Lion")
class NeedsAnArgument(Lion):
    def step(self, closure):
        return super().step(closure)


@named("Lion")
class HasNoBetas(torch.optim.SGD):
    """Nothing but the name."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [Lion, LerpingLion, Mine])
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.3, "lr": 0.1}, {"betas": (0.0, 0.0)}], ids=str)
def test_a_known_optimizer(kind, settings):
    assert replay_for(optimizer_of(kind, **settings)) is NAMED["Lion"]


@pytest.mark.parametrize("kind", [Cautious, Elsewhere, DecaysByItself, NeedsAnArgument, HasNoBetas])
def test_another_one_of_the_same_name(kind):
    settings = {} if kind is HasNoBetas else {"weight_decay": 0.3}
    assert replay_for(optimizer_of(kind, lr=0.1, **settings)) is None


def test_every_group_is_tried():
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.3}]
    assert replay_for(DecaysByItself(groups, lr=0.1)) is None
    groups[1]["weight_decay"] = 0.0
    assert replay_for(DecaysByItself(groups, lr=0.1)) is NAMED["Lion"]


def test_nothing_of_the_user_changes():
    """Neither the optimizer, nor its hooks, nor the random numbers."""
    optimizer = optimizer_of(Lion, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    scheduler.step()
    calls.clear()
    before = copy.deepcopy(optimizer.state_dict())
    weights = [p.clone() for p in optimizer.param_groups[0]["params"]]
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    assert replay_for(optimizer) is NAMED["Lion"]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert calls == []
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for place, tensors in before["state"].items():
        for name, value in tensors.items():
            assert torch.equal(after["state"][place][name], value)
    for p, weight in zip(optimizer.param_groups[0]["params"], weights, strict=True):
        assert torch.equal(p, weight)


def test_the_adafactor_of_transformers():
    kind = pytest.importorskip("transformers.optimization").Adafactor
    for settings in (
        {},
        {"lr": 1e-3, "scale_parameter": False, "relative_step": False},  # what its Trainer takes
        {"warmup_init": True, "beta1": 0.9},
        {"lr": 1e-3, "relative_step": False, "weight_decay": 0.1, "beta1": 0.0},
    ):
        assert replay_for(optimizer_of(kind, **settings)) is NAMED["Adafactor"]
