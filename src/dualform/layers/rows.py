"""Which entries of a layer's input belong to which row.

A slot that carries the wrong sample's name leaves every sum right, so nothing here guesses. Where the rows are is found by experiment:
the model runs again with its rows permuted (or some of them replaced), and the input of each layer must change in the same way along
the axis that holds them. This file has the readings that an input allows, and decides between them; `layers/row_proof.py` runs the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.errors import AxisError

Lead = tuple[int, ...]
"""The shape of a layer's input without its features."""
Fingerprints = np.ndarray[Any, np.dtype[np.float64]]
"""One number for each vector of an input, shaped like its leading axes: equal vectors have equal numbers."""
Flags = np.ndarray[Any, np.dtype[np.bool_]]
RowMap = np.ndarray[Any, np.dtype[np.int64]]
"""(rows,): which row of the batch stands in the place of each row in an experiment."""

WHOLE, ROWS_OUTSIDE, ROWS_INSIDE = "rows", "rows × positions", "positions × rows"
"""What an axis holds: one entry a row; several for each row, which stand together; several for each row, the rows alternating."""

FITTING_SHARE = 0.98
"""A reading fits if this share of the entries does: rounding may flip a few decisions of a network (which expert gets a token)."""
ROUNDING = 1e-5
"""A difference below this part of an input's size is rounding."""
CLEARLY_BETTER = 0.1
"""Where no reading fits to rounding, the best one is taken if it is off by less than this part of what the next one is off by."""


@dataclass(frozen=True)
class Layout:
    """How a tensor (*lead, features) is read as (rows, positions, features)."""

    split: Lead
    """The leading shape, with a flattened axis taken apart."""
    axis: int | None
    """The axis of `split` that holds the rows; None: all rows share these vectors."""

    @property
    def is_shared(self) -> bool:
        """Whether its slots belong to no row in particular."""
        return self.axis is None

    @cached_property
    def rows(self) -> int:
        """How many rows; 1 for vectors that all rows share."""
        return self.split[self.axis] if self.axis is not None and self.split else 1

    @cached_property
    def positions(self) -> int:
        """How many slots a row has: the product of the other axes."""
        return math.prod(length for axis, length in enumerate(self.split) if axis != self.axis)

    def slots(self, tensor: Tensor) -> Tensor:
        """(*lead, features) → (rows × positions, features), row-major; a view where possible."""
        if tensor.dim() == 2 and len(self.split) == 1:
            return tensor
        features = tensor.shape[-1]
        if self.axis is None or not self.split:
            return tensor.reshape(-1, features)
        split = tensor.reshape(*self.split, features)
        return split.movedim(self.axis, 0).reshape(-1, features)


@dataclass(frozen=True)
class RowAxis:
    """Where an input holds the rows, whatever its size."""

    axis: int | None
    """A leading axis; None: all rows share the input."""
    holds: str = WHOLE

    def __str__(self) -> str:
        if self.axis is None:
            return "shared by all rows"
        return f"axis {self.axis}" if self.holds == WHOLE else f"axis {self.axis} ({self.holds})"

    def layout(self, lead: Lead, rows: int) -> Layout | None:
        """How an input of this shape is read; None if it cannot be read this way."""
        return _layout(self, lead, rows)


FIRST = RowAxis(0)
SHARED = RowAxis(None)


@lru_cache(maxsize=1024)  # the same at every step
def _layout(where: RowAxis, lead: Lead, rows: int) -> Layout | None:
    if rows == 1:  # everything belongs to the one row, however it is arranged
        return Layout((1, math.prod(lead)), 0)
    if rows == 0:
        return Layout((0, 1), 0) if math.prod(lead) == 0 else None
    if where.axis is None:
        return Layout(lead, None)
    if where.axis >= len(lead):
        return None
    before, length, after = lead[: where.axis], lead[where.axis], lead[where.axis + 1 :]
    if where.holds == WHOLE:
        return Layout(lead, where.axis) if length == rows else None
    if rows == 0 or length % rows:
        return None
    if where.holds == ROWS_OUTSIDE:
        return Layout((*before, rows, length // rows, *after), where.axis)
    return Layout((*before, length // rows, rows, *after), where.axis + 1)


def readings(lead: Lead, rows: int, axis: int | None = None) -> list[RowAxis]:
    """Every way in which an input of this shape may hold the rows. axis: the module itself says that they are there."""
    axes = range(len(lead)) if axis is None else (axis,)
    found = [RowAxis(one) for one in axes if lead[one] == rows]
    for one in axes:
        if lead[one] > rows > 0 and lead[one] % rows == 0:
            found += [RowAxis(one, ROWS_OUTSIDE), RowAxis(one, ROWS_INSIDE)]
    return [*found, SHARED]


def told_reading(lead: Lead, rows: int, axis: int, layer: str) -> RowAxis:
    """The reading that batch_axis={layer: axis} means. For a flattened input, (vectors, features), 0 means that each row's positions
    stand together, 1 that the rows alternate."""
    if len(lead) == 1 and lead[0] != rows and axis in (0, 1) and rows and lead[0] % rows == 0:
        return RowAxis(0, ROWS_OUTSIDE if axis == 0 else ROWS_INSIDE)
    if axis >= len(lead):
        raise AxisError(
            f"batch_axis={{{layer!r}: {axis}}} names no leading axis of an input of shape {shape_text(lead)}."
        )
    length = lead[axis]
    if length == rows:
        return RowAxis(axis)
    if rows and length % rows == 0:
        return RowAxis(axis, ROWS_OUTSIDE)
    raise AxisError(
        f"batch_axis={{{layer!r}: {axis}}} names an axis of length {length}, which is no multiple of the {rows} rows "
        f"that batch() announced."
    )


def told_of_module(lead: Lead, rows: int, axis: int, told_axis: int) -> RowAxis:
    """The same for modules that say themselves which axis the batch is (recurrent layers, attention): where their batch is a multiple of
    the rows, 0 means that each row's entries stand together, 1 that the rows alternate."""
    if lead[axis] == rows or told_axis not in (0, 1):
        return RowAxis(axis)
    return RowAxis(axis, ROWS_OUTSIDE if told_axis == 0 else ROWS_INSIDE)


def by_length(lead: Lead, rows: int, axis: int | None) -> RowAxis | None:
    """The reading where no experiment was made: axis 0, or the axis that the module names, if its length is the number of rows."""
    if rows == 1:
        return FIRST
    first = 0 if axis is None else axis
    return RowAxis(first) if first < len(lead) and lead[first] == rows else None


def shape_text(lead: Lead) -> str:
    """A shape, as messages show it."""
    return f"({', '.join([*map(str, lead), 'features'])})"


# Experiments


@dataclass(frozen=True)
class Decision:
    """Which reading of an input an experiment has shown."""

    where: RowAxis | None
    """None: none of them, or several."""
    why: str = ""
    """Why it is not proved, if it is not."""

    @property
    def is_proved(self) -> bool:
        """Whether the experiment leaves one reading only."""
        return self.where is not None and not self.why


@dataclass(frozen=True)
class Experiment:
    """An input of a layer in a run of the model with its rows moved: row i of that batch was row rows[i] of the first."""

    rows: RowMap
    numbers: Fingerprints


def decide(allowed: Sequence[RowAxis], before: Fingerprints, permuted: Experiment, replaced: Experiment) -> Decision:
    """Which reading of an input two experiments show.

    Permuted rows show along which axis an input follows them. Replaced rows show that nothing else depends on them, so that a model
    that puts its rows into another order is not believed; and they decide where the forward pass draws random numbers, which are not
    permuted with the rows.
    """
    follows = _following(allowed, before, permuted)
    if follows == [SHARED]:  # or a sorted list of all vectors, which a permutation does not change either
        return Decision(SHARED) if _others_stay(SHARED, before, replaced) else Decision(None, FOLLOWS_NOTHING)
    if len(follows) > 1:
        return _choose_among_equal(follows)
    if not follows and _has_same_vectors(before, permuted):
        return Decision(None, FOLLOWS_NOTHING)  # the model has put its rows into an order of its own
    if follows:
        # Rows that depend on each other, as in a batch normalisation, change everywhere
        fits = _others_stay(follows[0], before, replaced) or _changes_everywhere(before, replaced)
        return Decision(follows[0]) if fits else Decision(None, FOLLOWS_NOTHING)
    fitting = _depending([where for where in allowed if where != SHARED], before, replaced)
    return Decision(fitting[0]) if len(fitting) == 1 else Decision(None, FOLLOWS_NOTHING)


FOLLOWS_NOTHING = "its input does not follow the rows along any axis"


def _choose_among_equal(fitting: Sequence[RowAxis]) -> Decision:
    """Vectors that are all equal stay the same however they are moved. The first axis is then taken for the rows if it is as long, and
    another one never."""
    why = "its input was the same for all rows"
    for where in (FIRST, SHARED):
        if where in fitting:
            return Decision(where, why)
    return Decision(None, f"its input can be read in several ways: {', '.join(map(str, fitting))}")


def _following(allowed: Sequence[RowAxis], before: Fingerprints, permuted: Experiment) -> list[RowAxis]:
    """The readings in which an input follows permuted rows."""
    errors = {}
    for where in allowed:
        expected = _moved(before, where, permuted.rows)
        if expected is not None:
            errors[where] = _largest_usual(np.abs(permuted.numbers - expected))
    exact = [where for where, error in errors.items() if error <= ROUNDING * _size(before)]
    if exact or len(errors) < 2:
        return exact
    best, second = sorted(errors, key=errors.__getitem__)[:2]
    is_clear = best != SHARED and errors[best] <= CLEARLY_BETTER * errors[second]
    return [best] if is_clear else []


def _others_stay(where: RowAxis, before: Fingerprints, replaced: Experiment) -> bool:
    """Whether vectors that do not belong to replaced rows have stayed what they were."""
    changed = _by_row(_changed(before, replaced), where, len(replaced.rows))
    if changed is None:
        return False
    is_other = replaced.rows == np.arange(len(replaced.rows))
    others = changed if where == SHARED else changed[is_other]
    return _share(others) <= 1 - FITTING_SHARE


def _depending(allowed: Sequence[RowAxis], before: Fingerprints, replaced: Experiment) -> list[RowAxis]:
    """The readings in which vectors of replaced rows have changed, and no others."""
    is_replaced = replaced.rows != np.arange(len(replaced.rows))
    found = []
    for where in allowed:
        changed = _by_row(_changed(before, replaced), where, len(replaced.rows))
        if changed is not None and changed[is_replaced].any() and _others_stay(where, before, replaced):
            found.append(where)
    return found


def _by_row(flags: Flags, where: RowAxis, rows: int) -> Flags | None:
    """(rows, positions), or (1, positions) of what all rows share; None if it cannot be read this way."""
    split = where.layout(flags.shape, rows)
    if split is None:
        return None
    if split.axis is None:
        return flags.reshape(1, -1)
    return np.moveaxis(flags.reshape(split.split), split.axis, 0).reshape(rows, -1)


def _has_same_vectors(before: Fingerprints, permuted: Experiment) -> bool:
    """Whether an input has the same vectors as before, wherever they are."""
    apart = np.abs(np.sort(permuted.numbers, axis=None) - np.sort(before, axis=None))
    return _largest_usual(apart) <= ROUNDING * _size(before)


def _changes_everywhere(before: Fingerprints, replaced: Experiment) -> bool:
    return _share(_changed(before, replaced)) >= FITTING_SHARE


def _changed(before: Fingerprints, replaced: Experiment) -> Flags:
    changed: Flags = np.abs(replaced.numbers - before) > ROUNDING * _size(before)
    return changed


def _share(flags: Flags) -> float:
    return float(flags.mean()) if flags.size else 0.0


def _moved(before: Fingerprints, where: RowAxis, rows: RowMap) -> Fingerprints | None:
    split = where.layout(before.shape, len(rows))
    if split is None:
        return None
    if split.axis is None:
        return before
    moved: Fingerprints = before.reshape(split.split).take(rows, axis=split.axis).reshape(before.shape)
    return moved


def _largest_usual(errors: Fingerprints) -> float:
    return float(np.quantile(errors, FITTING_SHARE)) if errors.size else 0.0


def _size(values: Fingerprints) -> float:
    return math.sqrt(float(np.square(values).mean())) if values.size else 0.0


def fingerprints(keys: Tensor, lead: int) -> Fingerprints:
    """One number for each vector of a layer's input, whose first `lead` axes are the leading ones."""
    flat = keys.detach().flatten(lead) if keys.dim() > lead else keys.detach().unsqueeze(-1)
    if flat.shape[-1] == 1:
        found = flat[..., 0].double()
    else:
        generator = torch.Generator().manual_seed(flat.shape[-1])
        directions = torch.randn(flat.shape[-1], generator=generator, dtype=torch.float32).to(flat.device)
        found = (flat.float() @ directions).double()
    numbers: Fingerprints = found.cpu().numpy()
    return numbers


# The model's arguments


def tensors_in(value: object) -> list[Tensor]:
    """The tensors among a forward's arguments: in tuples, lists and dictionaries too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for inner in value.values() for tensor in tensors_in(inner)]
    if isinstance(value, (tuple, list)):
        return [tensor for inner in value for tensor in tensors_in(inner)]
    return []
