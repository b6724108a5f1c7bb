"""Beyond the paper: signed contributions to the answer's logit, where the paper sums attention weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import dualform
from dualform_paper.settings import LAYERS, Settings
from dualform_paper.table import Votes, by_class, votes

BLOCK = 1000
"""How many test images are asked at a time: an answer's gradients take as much memory as its queries."""


def contribution_votes(
    dual: dualform.Dual, settings: Settings, images: Tensor, labels: Tensor, answers: Tensor
) -> dict[str, Votes]:
    """Table 1 with contributions to the answer's logit instead of attention weights, by layer."""
    found: dict[str, list[Tensor]] = {layer: [] for layer in LAYERS}
    for low in range(0, len(images), BLOCK):
        contributions = dual.contributions(images[low : low + BLOCK], target=answers[low : low + BLOCK])
        for layer in LAYERS:
            totals = by_class(contributions[layer].total(["dataset", "label"]), settings.datasets)
            found[layer].append(totals.sum(1))
    return {layer: votes(torch.cat(parts), labels, answers) for layer, parts in found.items()}


def splits(dual: dualform.Dual, settings: Settings, images: Tensor, answers: Tensor) -> list[dict[str, Any]]:
    """For each image and layer: initial part, contributions by dataset and class, remainder; they add up to the answer's logit."""
    contributions = dual.contributions(images, target=answers)
    found: list[dict[str, Any]] = [{} for _ in images]
    for layer in LAYERS:
        totals = by_class(contributions[layer].total(["dataset", "label"]), settings.datasets)
        for place, row in enumerate(contributions[layer].parts().to_dicts()):
            found[place][layer] = {
                "initial": row["initial"],
                "remainder": row["remainder"],
                "logit": row["target"],
                "totals": {name: totals[place, n].tolist() for n, name in enumerate(settings.datasets)},
            }
    return found
