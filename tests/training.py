"""A tiny network, trained for real with a recorder."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.layers.layer import Layer, Use

CLASSES = 4
SAMPLES = 12
FEATURES = 5


def network(dtype=torch.float64, *, seed=0, bias=True):
    """5 → 7 → 4; its layers are "0" and "2"."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 7, bias=bias), nn.Tanh(), nn.Linear(7, CLASSES, bias=bias)).to(dtype)


def samples(dtype=torch.float64):
    """Inputs (12, 5) and labels (12,), always the same."""
    generator = torch.Generator().manual_seed(7)
    return (
        torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64).to(dtype),
        torch.arange(SAMPLES) % CLASSES,
    )


def sgd(model):
    """Everything at once: momentum and decay."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


@dataclass
class Run:
    """What a training left behind."""

    path: Path
    model: nn.Module
    ids: list[torch.Tensor] = field(default_factory=list)
    """The samples of each step."""
    checkpoints: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """The state_dict after 0, 1, … steps."""

    @property
    def dual(self):
        return dualform.open(self.path, self.model)


def checkpoint(model):
    return copy.deepcopy(model.state_dict())


def train(
    path,
    *,
    model=None,
    optimizer=sgd,
    steps=6,
    rows=5,
    precision=torch.float64,
    after_backward: Callable[[nn.Module], object] | None = None,
    after_step: Callable[[int], object] | None = None,
    **settings,
):
    """Train and record. `optimizer` makes one optimizer, or a list of them, from the model.

    precision: of the training; the settings of record() may say dtype="float16" for the store.
    """
    model = network(precision) if model is None else model
    inputs, labels = samples(precision)
    made = optimizer(model) if callable(optimizer) else optimizer
    several = made if isinstance(made, list) else [made]
    run = Run(Path(path), model, checkpoints=[checkpoint(model)])
    order = torch.Generator().manual_seed(1)
    with dualform.record(model, made, path, **{"dtype": "float64", **settings}) as recorder:
        for step in range(steps):
            ids = torch.randint(0, SAMPLES, (rows,), generator=order)
            recorder.batch(sample_id=ids, label=labels[ids], task="early" if step < steps // 2 else "late")
            for one in several:
                one.zero_grad()
            loss = F.cross_entropy(model(inputs[ids]), labels[ids])
            loss.backward()
            if after_backward is not None:
                after_backward(model)
            for one in several:
                one.step()
            recorder.log(loss=loss.item())
            run.ids.append(ids)
            run.checkpoints.append(checkpoint(model))
            if after_step is not None:
                after_step(step)
    return run


def assert_exact(dual, bar=1e-12):
    """The certificate passes, and every gap is below the bar."""
    certificate = dual.verify()
    assert certificate.passed, str(certificate)
    assert certificate.frame["gap"].max() <= bar, str(certificate)


def assert_same_weights(model, expected, *, atol=1e-13):
    """A model has the weights of a state_dict; prints which parameter is off, and by how much."""
    found = model.state_dict()
    assert list(found) == list(expected)
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def linear(name, d_in, d_out, weight, bias=None):
    """How a store describes an nn.Linear."""
    uses = [Use(weight, "weight")] + ([Use(bias, "bias")] if bias else [])
    return Layer(name, "linear", d_in, d_out, tuple(uses))
