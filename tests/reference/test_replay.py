"""The plain replay of optimizers is what PyTorch does."""

import numpy as np
import pytest
import torch

from reference.replay import Replay, Track

SETTINGS = {
    "SGD": {"momentum": 0.9, "dampening": 0.3, "nesterov": False},
    "Adam": {"betas": (0.8, 0.9), "eps": 1e-3, "amsgrad": True},
    "AdamW": {"betas": (0.8, 0.9), "eps": 1e-3, "amsgrad": False},
    "NAdam": {"betas": (0.8, 0.9), "eps": 1e-3, "momentum_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"betas": (0.8, 0.9), "eps": 1e-3, "decoupled_weight_decay": False},
    "Adagrad": {"eps": 1e-3, "lr_decay": 0.1, "initial_accumulator_value": 0.2},
    "RMSprop": {"eps": 1e-3, "alpha": 0.8, "centered": True, "momentum": 0.5},
    "Adadelta": {"eps": 1e-3, "rho": 0.8},
    "Adamax": {"betas": (0.8, 0.9), "eps": 1e-3},
}


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_replay_is_pytorch_and_its_parts_add_up(kind, maximize):
    random = np.random.default_rng(0)
    first = random.standard_normal((3, 2))
    parameter = torch.nn.Parameter(torch.tensor(first))
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.1, weight_decay=0.05, maximize=maximize, **SETTINGS[kind])
    whole = Track(first)
    initial, one, other = Track(first), Track(np.zeros_like(first)), Track(np.zeros_like(first))
    replay = Replay(kind, [whole, initial, one, other])
    for step in range(8):
        parts = random.standard_normal((2, 3, 2))
        parameter.grad = torch.tensor(parts.sum(0))
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.step()
        zero = np.zeros_like(first)
        replay.step([parts.sum(0), zero, parts[0], parts[1]], **optimizer.param_groups[0])
    rounding = 1e-7 if kind == "NAdam" else 1e-12  # PyTorch keeps NAdam's product of momenta in float32
    np.testing.assert_allclose(whole.theta, parameter.detach().numpy(), rtol=0, atol=rounding)
    np.testing.assert_allclose(initial.theta + one.theta + other.theta, whole.theta, rtol=1e-11, atol=1e-11)
