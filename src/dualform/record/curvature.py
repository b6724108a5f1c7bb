"""Curvature while recording: sums of key ⊗ key and error ⊗ error since the last snapshot, from some of the steps."""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.curvature.loss_mean import RECORDED_MEAN, calls_of_blocks, divisors
from dualform.curvature.maps import linear_maps
from dualform.curvature.sums import Sums
from dualform.layers.streams import Layer
from dualform.store.encoding import decode
from dualform.store.records import Step, keys_of_blocks

EVERY = 8
"""One step in so many counts: for each, it costs about as much as the step itself."""


class OnlineCurvature:
    """What snapshots hold of the steps since the one before."""

    def __init__(self) -> None:
        self._sums: dict[int, list[Sums]] = {}
        self._last_step = -1
        self._is_whole = True
        """False: an exception came while a step was counted, so that a part of it is in the sums."""

    def add(self, step: Step, layers: list[Layer]) -> None:
        """Count a step, if it is its turn; only once. layers: by their number."""
        if step.number % EVERY or step.number <= self._last_step:
            return
        self._last_step = step.number
        self._is_whole = False
        self._count(step, layers)
        self._is_whole = True

    def _count(self, step: Step, layers: list[Layer]) -> None:
        loss_divisors = divisors(calls_of_blocks(step.blocks), RECORDED_MEAN)
        for block, divided_by in zip(step.blocks, loss_divisors.tolist(), strict=True):
            if block.errors is None or not block.slots:
                continue
            layer = layers[block.layer]
            sums = self._sums.setdefault(block.layer, [Sums(linear_map) for linear_map in linear_maps(layer)])
            dtype = torch.float64 if block.errors.data.dtype == torch.float64 else torch.float32
            keys = keys_of_blocks(layer, [block], dtype)
            errors = decode(block.errors.data, block.errors.exponents, dtype)
            divisor = torch.full((len(errors),), divided_by, dtype=dtype)
            written = None if block.silent is None else torch.from_numpy(~block.silent)
            for one in sums:
                one.add(keys, errors, divisor, written)

    def tensors(self) -> dict[str, Tensor]:
        """Means and counts for a snapshot, by names that begin with `curvature.`."""
        found: dict[str, Tensor] = {}
        if not self._is_whole:
            return found
        for layer, sums in self._sums.items():
            for number, one in enumerate(sums):
                means = one.factors(1.0)
                found[f"curvature.{layer}.{number}.keys"] = means.keys.float()
                found[f"curvature.{layer}.{number}.errors"] = means.errors.float()
            found[f"curvature.{layer}.slots"] = torch.tensor([sums[0].slots], dtype=torch.int64)
        return found

    def clear(self) -> None:
        """A snapshot has them: from now on, another stretch is counted."""
        self._sums = {}
        self._is_whole = True
