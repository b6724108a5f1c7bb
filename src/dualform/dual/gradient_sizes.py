"""Check that the stored slots of each update give a gradient of the size that the recorder saw.

The final weights say little about a single slot if all slots are rounded to 16 bits, or if a parameter has hardly moved. But the
recorder stores the size of every gradient, ‖gradient @ R‖, and an update has few slots, so that a wrong one shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.dual.coefficients import recorded_updates, update_table
from dualform.dual.gradients import Call, Replayed, description
from dualform.dual.rounding import roundoff, storage_roundoff
from dualform.dual.rows import kept_rows
from dualform.layers.keys import KeysOrGradients, RowGradients, in_groups, select_columns
from dualform.layers.layer import Use
from dualform.layers.written import used_rows
from dualform.projection import SLACK, UNDERFLOW, Projection
from dualform.store.reader import Store
from dualform.store.unkept import why_not_rebuilt

EVENLY_SPREAD = 3.0
"""Of an error spread evenly between −1 and 1, the mean square is 1 / 3."""
STORAGE_SLACK = 4.0
"""How many standard deviations of the rounding of stored slots pass."""


@dataclass(frozen=True)
class WrongSize:
    """An update whose slots give a gradient of another size."""

    step: int
    stored: float
    """‖gradient @ R‖ / √(columns of R), as the recorder saw it."""
    found: float
    """The same, computed from the stored slots."""

    def __str__(self) -> str:
        return f"its slots at step {self.step} give a gradient of size {self.found:.4g} instead of {self.stored:.4g}"


def wrong_size(store: Store, parameter: str, end: int) -> WrongSize | None:
    """Return the first update before `end` whose slots give a gradient of another size than recorded, or None."""
    is_rebuilt = store.manifest.keep != "totals" and why_not_rebuilt(store, parameter) is None
    if not is_rebuilt or store.is_vector(parameter):
        return None
    if kept_rows(store, parameter) is not None:  # sizes are those of all rows
        return None
    check = _Check(store, parameter, end)
    recorded = _seen_sizes(store, parameter, end)
    for place, (step, size, residual, is_rounded) in enumerate(recorded.iter_rows()):
        # Under autocast the gradient itself was rounded to 16 bits, and its factor is known to as many
        if is_rounded or not math.isfinite(size) or not math.isfinite(residual):
            continue
        calls = check.read(place)
        computed = check.size_of(calls)
        difference = abs(computed - size)
        allowed = max(residual * size, UNDERFLOW)
        if difference <= allowed:
            continue  # the usual case; what rounding explains takes longer to compute than the size
        # `not <=`, so that a difference that is not a number fails
        if not difference <= allowed + check.rounding_of(calls):
            return WrongSize(step, size, computed)
    return None


def _seen_sizes(store: Store, parameter: str, end: int) -> pl.DataFrame:
    """Return what the recorder stored of each update: step, size, residual, is_rounded."""
    updates = update_table(store, parameter, 0, end)
    has_autocast = "autocast" in updates.columns
    is_rounded = pl.col("autocast").is_not_null() if has_autocast else pl.lit(False)
    return updates.select("step", "size", "residual", is_rounded.alias("is_rounded"))


def projection_of(store: Store, parameter: str) -> Projection:
    """Return the private random matrix R that the recorder multiplied a parameter's gradients by."""
    described = description(store, parameter)
    dtype = getattr(torch, described.dtype)
    seed = int(store.manifest.settings["seed"])
    return Projection.of(parameter, described.shape, dtype, seed, vector=store.is_vector(parameter))


class _Check:
    """Computes the sizes of one parameter's gradients from its slots."""

    def __init__(
        self,
        store: Store,
        parameter: str,
        end: int,
    ):
        self._projection = projection_of(store, parameter)
        self._gradients = Replayed(store, recorded_updates(store, parameter, end=end))
        self._roundoff = roundoff(description(store, parameter).dtype)
        self._storage = storage_roundoff(store, parameter)

    def read(self, place: int) -> Sequence[Call]:
        """Return the slots of an update, call by call."""
        return self._gradients.read(place).calls

    def size_of(self, calls: Sequence[Call]) -> float:
        """Return the size of the gradient that slots give, multiplied by R."""
        projection = self._projection
        total = np.zeros((projection.rows, projection.columns))
        for call in calls:
            random = projection.random_like(call.errors)
            for use in self._gradients.uses(call.layer):
                projected = _projected(use, call.keys, call.errors, random)
                own = used_rows(use, total)
                own += call.factor * projected.double().numpy()
        return float(np.linalg.norm(total)) / math.sqrt(projection.columns)

    def rounding_of(self, calls: Sequence[Call]) -> float:
        """Return how far rounding may have moved that size."""
        calls = [_in_float64(call) for call in calls]
        terms = 0.0
        for call in calls:
            key_squares = call.keys.square_norms()
            error_squares = call.errors.square().sum(1)
            sizes = (key_squares * error_squares).sqrt()
            terms += abs(call.factor) * float(sizes.sum())
        computing = SLACK * self._roundoff * terms
        if not self._storage:
            return computing
        spread = self._storage * math.sqrt(self._variance_of(calls))
        return computing + STORAGE_SLACK * spread

    def _variance_of(self, calls: Sequence[Call]) -> float:
        """Return the variance of gradient @ R if each stored number is off by up to its own size, spread evenly.

        Equal slots (a sample that is in several micro-batches) have equal errors, which add up.
        """
        key_counts = _counts_of_equals([call.keys.square_norms() for call in calls])
        error_counts = _counts_of_equals([call.errors.square().sum(1) for call in calls])
        total = 0.0
        for call, equal_keys, equal_errors in zip(calls, key_counts, error_counts, strict=True):
            random = self._projection.random_like(call.errors)
            for use in self._gradients.uses(call.layer):
                of_keys, of_errors = _squares_through(use, call.keys, call.errors, random)
                squares = equal_keys * of_keys + equal_errors * of_errors
                total += call.factor**2 * float(squares.sum())
        return total / (EVENLY_SPREAD * self._projection.columns)


def _in_float64(call: Call) -> Call:
    """Return a call with its slots in float64, so that their squares do not underflow."""
    return replace(call, keys=call.keys.to(torch.float64), errors=call.errors.double())


def _counts_of_equals(square_norms: Sequence[Tensor]) -> list[Tensor]:
    """Return how many of all vectors are equal to each one, by their norms. square_norms: (n,) for each call."""
    if not square_norms:
        return []
    norms = torch.cat(list(square_norms)).numpy()
    _, places, counts = np.unique(norms, return_inverse=True, return_counts=True)
    ends = np.cumsum([len(of_call) for of_call in square_norms])
    by_call = np.split(counts[places], ends[:-1])
    return [torch.from_numpy(of_call) for of_call in by_call]


def _squares_through(
    use: Use,
    keys: KeysOrGradients,
    errors: Tensor,
    random: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return ‖error of slot @ R‖² of each slot if its key, or its error signal, is off by its own size: two tensors (n,)."""
    square_rows = random.square().sum(1, keepdim=True)
    if isinstance(keys, RowGradients):  # one number is stored for each entry, and none for its error signal
        of_entries = (keys.added_to(use).square() @ square_rows).flatten(1).sum(1)
        return of_entries, torch.zeros_like(of_entries)
    used = select_columns(errors, use.errors)
    if use.role == "table":  # keys are one-hot: exact
        of_errors = (used.square() @ square_rows)[:, 0]
        return torch.zeros_like(of_errors), of_errors
    in_key = keys.squared().project(square_rows, use.keys, use.groups)
    in_key = in_key[..., 0]
    seen_key = keys.project(random, use.keys, use.groups)
    seen_key = seen_key.square().sum(-1)
    sizes = in_groups(used, use.groups).square().sum(-1)
    sizes = sizes.reshape(in_key.shape)
    of_keys = (in_key * sizes).reshape(len(used), -1).sum(1)
    of_errors = (seen_key * sizes).reshape(len(used), -1).sum(1)
    return of_keys, of_errors


def _projected(
    use: Use,
    keys: KeysOrGradients,
    errors: Tensor,
    random: Tensor,
) -> Tensor:
    """Return what slots add to a weight, multiplied by R: (rows, columns of R)."""
    if isinstance(keys, RowGradients):
        return keys.summed(use, errors[:, 0]) @ random
    used = select_columns(errors, use.errors)
    if use.role == "table":
        return keys.outer(used @ random).T
    projected = keys.project(random, use.keys, use.groups)
    if use.groups == 1:
        return used.T @ projected
    product = torch.einsum("ngo,ngk->gok", in_groups(used, use.groups), projected)
    return product.reshape(-1, random.shape[1])
