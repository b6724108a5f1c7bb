"""Curvature that was counted while recording: snapshots hold that of the steps since the snapshot before."""

from __future__ import annotations

from itertools import pairwise

import torch

from dualform.influence.curvature import Factors
from dualform.influence.pairings import pairings
from dualform.influence.segments import Segment
from dualform.layers.streams import Layer
from dualform.store.reader import Store

RECORDED_MEAN = "tokens"
"""What the recorder takes the loss for a mean over, where it counts curvature."""


def recorded_factors(store: Store, layer: Layer, segment: Segment, positions: float) -> list[Factors] | None:
    """The mean over the stretches between snapshots that a segment meets, by how much of them it meets.

    None: nothing was counted in most of it, or stretches are longer than the segment and would tell too little of it.
    """
    number, _ = store.layer(layer.name)
    weights, files, met = [], [], 0
    for begin, end in pairwise(store.snapshot_steps()):
        common = min(end, segment.end) - max(begin, segment.begin)
        if common <= 0:
            continue
        file = store.snapshot(end)
        if end - begin > segment.end - segment.begin:
            return None
        if f"curvature.{number}.slots" not in file:
            continue
        weights.append(common / (end - begin) * float(file[f"curvature.{number}.slots"]))
        files.append(file)
        met += common
    if 2 * met < segment.end - segment.begin or not sum(weights):
        return None
    shares = [weight / sum(weights) for weight in weights]

    def mean(name: str) -> torch.Tensor:
        parts = (share * file[name].double() for share, file in zip(shares, files, strict=True))
        return torch.stack(list(parts)).sum(0)

    return [
        Factors(mean(f"curvature.{number}.{n}.keys"), mean(f"curvature.{number}.{n}.errors"), positions)
        for n in range(len(pairings(layer)))
    ]
