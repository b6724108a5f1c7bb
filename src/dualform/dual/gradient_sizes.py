"""Do the stored slots of each update give a gradient of the size that the recorder has seen?

The weights at the end tell little about a single slot where all slots together are rounded to 16 bits, or where a parameter has hardly moved.
But the recorder stores the size of every gradient, ‖gradient @ R‖, and the slots of one update are few: a wrong one among them shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.dual.gradients import Replayed, Slots, kept_rows, updates_of
from dualform.dual.rounding import BOTH_ROUNDED, storage_roundoff
from dualform.layers.keys import Keys, in_groups, part
from dualform.layers.streams import Use
from dualform.projection import Projection
from dualform.store.reader import Store

AUDIT_SLACK = 64.0
"""The recorder takes this many roundoffs of the sum of absolute terms for rounding."""
STORAGE_SLACK = 4.0
"""This many standard deviations of the rounding of stored slots pass."""


@dataclass(frozen=True)
class WrongSize:
    """An update whose slots give a gradient of another size."""

    step: int
    stored: float
    """‖gradient @ R‖ as the recorder saw it, relative to R."""
    found: float
    """The same of the stored slots."""

    def __str__(self) -> str:
        return f"its slots at step {self.step} give a gradient of size {self.found:.4g} instead of {self.stored:.4g}"


def wrong_size(store: Store, parameter: str, end: int) -> WrongSize | None:
    """Return the first update before `end` whose slots are not those that the recorder has seen, or None."""
    is_partial = kept_rows(store, parameter) is not None  # sizes are those of all rows
    if store.manifest.keep != "slots" or store.is_vector(parameter) or is_partial:
        return None
    check = _Check(store, parameter, end)
    seen = _seen_sizes(store, parameter, end)
    for place, (step, size, residual, is_rounded) in enumerate(seen.iter_rows()):
        # Under autocast the gradient itself was rounded to 16 bits, and its factor is known to as many
        if is_rounded or not math.isfinite(size) or not math.isfinite(residual):
            continue
        slots = check.read(place)
        found = check.size_of(slots)
        allowed = residual * size
        if abs(found - size) <= allowed:
            continue  # as nearly always: what rounding explains takes longer to find than the size itself
        if not abs(found - size) <= allowed + check.rounding_of(slots):
            return WrongSize(step, size, found)
    return None


def _seen_sizes(store: Store, parameter: str, end: int) -> pl.DataFrame:
    """What the recorder wrote down of each update: step, size, residual, is_rounded."""
    mine = store.updates.filter((pl.col("parameter") == store.parameter(parameter)) & (pl.col("step") < end))
    has_autocast = "autocast" in mine.columns
    is_rounded = pl.col("autocast").is_not_null() if has_autocast else pl.lit(False)
    return mine.select("step", "size", "residual", is_rounded.alias("is_rounded"))


class _Check:
    """Sizes of one parameter's gradients, from its slots."""

    def __init__(self, store: Store, parameter: str, end: int):
        described = store.manifest.parameters[store.parameter(parameter)]
        dtype = getattr(torch, described.dtype)
        seed = int(store.manifest.settings["seed"])
        self._projection = Projection.of(parameter, described.shape, dtype, seed, vector=False)
        self._gradients = Replayed(store, updates_of(store, parameter, end=end))
        self._roundoff = torch.finfo(dtype).eps / 2
        self._storage = storage_roundoff(store, parameter)

    def read(self, place: int) -> Sequence[Slots]:
        """The slots of an update."""
        return self._gradients.read(place).slots

    def size_of(self, slots: Sequence[Slots]) -> float:
        """The size of the gradient that slots give, seen through R."""
        projection = self._projection
        total = np.zeros((projection.rows, projection.columns))
        for factor, layer, keys, errors, _ in slots:
            for use in self._gradients.uses(layer):
                looked = _look(use, keys, errors, projection.random_like(errors))
                own = total[use.rows[0] : use.rows[1]] if use.rows else total
                own += factor * looked.double().numpy()
        return float(np.linalg.norm(total)) / math.sqrt(projection.columns)

    def rounding_of(self, slots: Sequence[Slots]) -> float:
        """How far rounding may have moved that size."""
        terms = 0.0
        variance = 0.0
        for factor, layer, keys, errors, _ in slots:
            of_keys = keys.square_norms().double()
            squares = of_keys * errors.double().square().sum(1)
            terms += abs(factor) * float(squares.sqrt().sum())
            if self._storage:
                repeats = _most_repeats(of_keys[squares > 0]) if layer.form == "vectors" else 1
                variance += repeats * factor**2 * float(squares.sum())
        spread = BOTH_ROUNDED * self._storage * math.sqrt(variance)
        return AUDIT_SLACK * self._roundoff * terms + STORAGE_SLACK * spread


def _most_repeats(square_norms: Tensor) -> int:
    """How often a key occurs among some, at most: equal keys are off by the same rounding. They have the same norm."""
    if not len(square_norms):
        return 1
    _, counts = np.unique(square_norms.numpy(), return_counts=True)
    return int(counts.max())


def _look(use: Use, keys: Keys, errors: Tensor, random: Tensor) -> Tensor:
    """What slots add to a weight, seen through R: (rows, columns of R)."""
    used = part(errors, use.errors)
    if use.role == "table":
        return keys.outer(used @ random).T
    projected = keys.project(random, use.keys, use.groups)
    if use.groups == 1:
        return used.T @ projected
    looked = torch.einsum("ngo,ngk->gok", in_groups(used, use.groups), projected)
    return looked.reshape(-1, random.shape[1])
