"""Random trainings for the differential fuzz campaign."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from campaigns.fuzz_networks import SAMPLES, Spec, build, draw_spec

PARTS = 3
"""The rows are divided into so many parts, at random."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass."""

    ids: list[int]
    parts: list[int]
    """The part that each row belongs to."""
    weight: float
    """What the loss is multiplied by."""


@dataclass(frozen=True)
class Step:
    """One update: some backward passes, then clipping, a learning rate and an optimizer step."""

    batches: list[MicroBatch]
    lr_factor: float
    clip: float | None
    seal: bool


@dataclass(frozen=True)
class Group:
    """Some parameters, by their places in model.parameters(), and the settings they are trained with."""

    optimizer: int
    """Which of the optimizers has the group."""
    parameters: list[int]
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class Case:
    """A training, and how it is recorded."""

    seed: int
    spec: Spec
    precision: str
    autocast: bool
    kind: str
    settings: dict[str, Any]
    """Of the optimizer, but for those of its groups."""
    groups: list[Group]
    frozen: list[int]
    scale: float
    """Losses are multiplied, and gradients divided again, by this."""
    steps: list[Step]
    record: dict[str, Any] = field(default_factory=dict)
    """The settings of record()."""

    @property
    def dtype(self) -> torch.dtype:
        """In which the network is trained."""
        found: torch.dtype = getattr(torch, self.precision)
        return found

    @property
    def is_exact(self) -> bool:
        """Whether everything is in float64, so that comparisons are sharp."""
        return self.precision == "float64" and self.record["dtype"] == "float64"

    def network(self) -> nn.Module:
        """The network, untrained, with some of its parameters frozen."""
        model = build(self.spec, self.seed, self.dtype)
        for place, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(place not in self.frozen)
        return model

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Its optimizers."""
        parameters = list(model.parameters())
        found = []
        for number in sorted({group.optimizer for group in self.groups}):
            groups = [
                {
                    "params": [parameters[n] for n in group.parameters],
                    "lr": group.lr,
                    "weight_decay": group.weight_decay,
                }
                for group in self.groups
                if group.optimizer == number
            ]
            found.append(getattr(torch.optim, self.kind)(groups, **self.settings))
        return found


OPTIMIZERS = ("SGD", "SGD", "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop", "Adadelta", "Adamax")


def draw_case(draw: random.Random) -> Case:
    """A training."""
    spec = draw_spec(draw)
    seed = draw.randrange(1 << 30)
    precision = draw.choice(["float64", "float64", "float32"])
    count = len(list(build(spec, 0, torch.float32).parameters()))
    frozen = _drawn_frozen(draw, count)
    trained = [place for place in range(count) if place not in frozen]
    kind = draw.choice(OPTIMIZERS)
    record = _drawn_recording(draw, precision)
    if spec.tied or "head.weight" not in _trained_names(spec, trained):
        record["outputs"] = None
    return Case(
        seed=seed,
        spec=spec,
        precision=precision,
        autocast=precision == "float32" and spec.kind != "images" and draw.random() < 0.2,
        kind=kind,
        settings=_drawn_settings(draw, kind),
        groups=list(_drawn_groups(draw, trained, kind)),
        frozen=frozen,
        scale=draw.choice([1.0, 1.0, 1.0, 65536.0, 1e-3]),
        steps=[_drawn_step(draw, spec) for _ in range(draw.randint(1, 6))],
        record=record,
    )


def _trained_names(spec: Spec, trained: list[int]) -> list[str]:
    names = [name for name, _ in build(spec, 0, torch.float32).named_parameters()]
    return [names[place] for place in trained]


def _drawn_frozen(draw: random.Random, count: int) -> list[int]:
    if draw.random() < 0.7:
        return []
    return sorted(draw.sample(range(count), draw.randint(1, max(1, count - 1))))[: count - 1]


def _drawn_settings(draw: random.Random, kind: str) -> dict[str, Any]:
    common: dict[str, Any] = {"maximize": draw.random() < 0.15, "foreach": draw.random() < 0.5}
    betas = {"betas": (draw.choice([0.0, 0.5, 0.9]), draw.choice([0.5, 0.9, 0.999]))}
    eps = {"eps": draw.choice([1e-8, 1e-6, 1e-3])}
    momentum = draw.choice([0.0, 0.5, 0.9])
    nesterov = momentum > 0 and draw.random() < 0.3
    of_kind: dict[str, dict[str, Any]] = {
        "SGD": {
            "momentum": momentum,
            "nesterov": nesterov,
            "dampening": 0.0 if nesterov or not momentum else draw.choice([0.0, 0.5]),
        },
        "Adam": {**betas, **eps, "amsgrad": draw.random() < 0.3},
        "AdamW": {**betas, **eps, "amsgrad": draw.random() < 0.3},
        "NAdam": {**betas, **eps, "momentum_decay": 4e-3, "decoupled_weight_decay": draw.random() < 0.5},
        "RAdam": {**betas, **eps, "decoupled_weight_decay": draw.random() < 0.5},
        "Adagrad": {**eps, "lr_decay": draw.choice([0.0, 0.1]), "initial_accumulator_value": draw.choice([0.0, 0.1])},
        "RMSprop": {**eps, "alpha": draw.choice([0.5, 0.99]), "centered": draw.random() < 0.3, "momentum": momentum},
        "Adadelta": {"rho": draw.choice([0.5, 0.9]), "eps": draw.choice([1e-6, 1e-3])},
        "Adamax": {**betas, **eps},
    }
    settings = {**common, **of_kind[kind]}
    if kind in ("Adam", "AdamW", "SGD") and draw.random() < 0.2:
        settings.update(foreach=False, fused=True)
    return settings


def _drawn_groups(draw: random.Random, trained: list[int], kind: str) -> Iterator[Group]:
    lr = {"SGD": 0.1, "Adadelta": 1.0, "Adagrad": 0.1}.get(kind, 0.01)
    homes = [draw.choice([(0, 0), (0, 0), (0, 1), (1, 0)]) for _ in trained]
    if draw.random() < 0.6:
        homes = [(0, 0)] * len(trained)
    for home in sorted(set(homes)):
        places = [place for place, its in zip(trained, homes, strict=True) if its == home]
        yield Group(home[0], places, lr * draw.choice([0.3, 1.0, 2.0]), draw.choice([0.0, 0.0, 0.01, 0.1]))


def _drawn_step(draw: random.Random, spec: Spec) -> Step:
    # A batch of one has no variance; recurrent layers refuse empty batches
    sizes = [2, 3, 5] if spec.norm == "batch" else [1, 2, 3, 5]
    is_sequence = spec.kind == "words" and spec.body != "linear"
    may_be_empty = spec.norm != "batch" and not is_sequence
    batches = []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        size = 0 if may_be_empty and draw.random() < 0.08 else draw.choice(sizes)
        ids = [draw.randrange(SAMPLES) for _ in range(size)]
        weight = draw.choice([1.0, 1 / max(size, 1), 0.25])
        batches.append(MicroBatch(ids, [draw.randrange(PARTS) for _ in ids], weight))
    return Step(
        batches,
        lr_factor=draw.choice([1.0, 1.0, 0.9, 0.5, 1.5]),
        clip=draw.choice([None, None, 1e-3, 0.1, 1.0]),
        seal=draw.random() < 0.2,
    )


def _drawn_recording(draw: random.Random, precision: str) -> dict[str, Any]:
    keep = draw.choice(["slots"] * 8 + ["keys", "totals"])
    totals = draw.choice([None, None, None, ["part"], ["part", "label"], {"part": "keys"}])
    if keep == "totals" and totals is None:
        totals = ["part"]
    return {
        "dtype": draw.choice([precision, precision, "float64", "float16"]),
        "keep": keep,
        "totals": totals,
        "chunk_bytes": draw.choice([1, 500, 3000, 64 << 20]),
        "queue_bytes": draw.choice([1, 2000, 256 << 20]),
        "curvature": keep == "slots" and draw.random() < 0.1,
        "outputs": {"head": [0, 2]} if keep == "slots" and totals is None and draw.random() < 0.15 else None,
    }
