"""Curvature while recording: sums of key ⊗ key and error ⊗ error since the last snapshot, from some of the steps.

Where slots are summed row by row, their curvature is counted before that (`counted`), for it cannot be told from the sums.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dualform.arrays import Bools
from dualform.curvature.loss_mean import RECORDED_MEAN, calls_of_blocks, divisors
from dualform.curvature.maps import linear_maps
from dualform.curvature.sums import Sums, size
from dualform.layers.keys import Keys
from dualform.layers.layer import Layer
from dualform.store.encoding import decode
from dualform.store.records import Step, keys_of_blocks

EVERY = 8
"""One step in so many counts: for each, it costs about as much as the step itself."""


MOST_NUMBERS = 1 << 27
"""If the curvature of all layers has more numbers than this, a gigabyte in float64, it is counted only if the user says so."""


def sizes(layers: Iterable[Layer]) -> int:
    """How many numbers the curvature of some layers has."""
    return sum(size(linear_map) for layer in layers for linear_map in linear_maps(layer))


def counts_summed(curvature: bool | None, layers: Sequence[Layer]) -> bool:
    """Whether the curvature of slots that are summed is counted. curvature: what the user said; None: nothing."""
    if curvature is not None:
        return curvature
    if sizes(layers) <= MOST_NUMBERS:
        return True
    warnings.warn(
        f"the curvature of these layers would take {8 * sizes(layers) / 1e9:.0f} GB of memory, so it is not counted, and influence by "
        f'method="whitened" cannot be asked. Say curvature=True to count it, or False to leave it out without this warning.',
        stacklevel=4,
    )
    return False


def counted(layer: Layer, keys: Keys, errors: Tensor, silent: Bools | None) -> list[tuple[Tensor, Tensor, int]]:
    """Count the curvature of a call whose slots will be summed: of each linear map, as Block.curvature has it."""
    ones = torch.ones(len(errors), dtype=errors.dtype)
    written = None if silent is None else torch.from_numpy(~silent)
    found = []
    for linear_map in linear_maps(layer):
        sums = Sums(linear_map)
        sums.add(keys, errors, ones, written)
        found.append((sums.keys, sums.errors, sums.slots))
    return found


class OnlineCurvature:
    """What snapshots hold of the steps since the one before."""

    def __init__(self, *, only_summed: bool = False) -> None:
        """only_summed: leave out layers none of whose slots were summed: their curvature can be computed later."""
        self._only_summed = only_summed
        self._summed_layers: set[int] = set()
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
            if not block.slots:
                continue
            layer = layers[block.layer]
            if block.curvature is not None:
                self._summed_layers.add(block.layer)
                for one, known in zip(self._of_layer(block.layer, layer), block.curvature, strict=True):
                    one.add_counted(*known, divided_by)
                continue
            if block.errors is None or (self._only_summed and block.layer not in self._summed_layers):
                continue
            sums = self._of_layer(block.layer, layer)
            dtype = torch.float64 if block.errors.data.dtype == torch.float64 else torch.float32
            keys = keys_of_blocks(layer, [block], dtype)
            errors = decode(block.errors.data, block.errors.exponents, dtype)
            divisor = torch.full((len(errors),), divided_by, dtype=dtype)
            written = None if block.silent is None else torch.from_numpy(~block.silent)
            for one in sums:
                one.add(keys, errors, divisor, written)

    def _of_layer(self, number: int, layer: Layer) -> list[Sums]:
        if number not in self._sums:
            self._sums[number] = [Sums(linear_map) for linear_map in linear_maps(layer)]
        return self._sums[number]

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
