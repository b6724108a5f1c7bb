"""Continual learning (5.4): what the later task overwrites, and what masking it out gives back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn

import dualform
from dualform_paper.settings import LAYERS, Settings
from dualform_paper.tasks import Task
from dualform_paper.training import accuracy

SUBSETS = {"layer-0 only": LAYERS[:1], "layer-1 only": LAYERS[1:2], "layer-2 only": LAYERS[2:], "all layers": LAYERS}


def without_later(dual: dualform.Dual, settings: Settings, layers: tuple[str, ...]) -> nn.Module:
    """The network without the slots of the later task, in some layers."""
    later = settings.phases[1].datasets[0]
    return dual.masked(drop=pl.col("dataset") == later, layers=list(layers)).eval()


def masks(dual: dualform.Dual, settings: Settings, tasks: Mapping[str, Task]) -> dict[str, dict[str, float]]:
    """Accuracies of the masked network on each test set, for each subset of layers, beside the network as it is."""
    networks = {"no mask": dual.model()}
    networks |= {name: without_later(dual, settings, layers) for name, layers in SUBSETS.items()}
    networks["after the first task"] = dual.at(settings.phases[0].steps).model()
    return {
        name: {task.name: accuracy(model, task.test, task.test_labels) for task in tasks.values()}
        for name, model in networks.items()
    }


def given_back(dual: dualform.Dual, settings: Settings) -> list[dict[str, Any]]:
    """How far the masked network is from the one after the first task, and from that one with its momentum in flight.

    Relative to what the first task has moved, for each parameter. Plain SGD has no momentum: then both are the same.
    """
    switch = settings.phases[0].steps
    masked = without_later(dual, settings, LAYERS).state_dict()
    before, begin = (dual.at(step).model().state_dict() for step in (switch, 0))
    preset = settings.preset
    states = dual.at(switch).optimizer_state()
    found = []
    for name, first in begin.items():
        moved = torch.linalg.vector_norm((before[name] - first).double())
        flight = torch.zeros_like(first, dtype=torch.float64)
        if preset.momentum:
            left = settings.phases[1].steps  # the buffer acts once more in each of these, μ times smaller each time
            reach = preset.momentum * (1 - preset.momentum**left) / (1 - preset.momentum)
            flight = -preset.lr * reach * states[name]["momentum_buffer"].double()
        apart = (masked[name] - before[name]).double()
        found.append(
            {
                "parameter": name,
                "from the network after the first task": float(torch.linalg.vector_norm(apart) / moved),
                "from that network with its momentum in flight": float(
                    torch.linalg.vector_norm(apart - flight) / moved
                ),
            }
        )
    return found


def interference(totals: Tensor, settings: Settings, right: Tensor) -> dict[str, float]:
    """The later task's part of all attention, for right and for wrong answers. totals (queries, datasets, classes)."""
    later = settings.datasets.index(settings.phases[1].datasets[0])
    shares = totals.sum(2)[:, later] / totals.sum((1, 2))

    def mean(of: Tensor) -> float:
        return float(shares[of].mean()) if bool(of.any()) else float("nan")

    return {"right": mean(right), "wrong": mean(~right), "all": float(shares.mean())}


def with_and_without(dual: dualform.Dual, settings: Settings, image: Tensor) -> dict[str, list[float]]:
    """The probabilities of the classes for one image, with and without the later task's slots."""
    networks = {"as trained": dual.model(), "without the later task": without_later(dual, settings, LAYERS)}
    with torch.no_grad():
        return {name: model(image.unsqueeze(0)).softmax(1)[0].tolist() for name, model in networks.items()}
