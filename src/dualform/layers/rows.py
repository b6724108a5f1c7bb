"""Decide which vectors of a layer's input belong to which row of the batch.

A slot with the wrong sample's name changes no sum, so names are not guessed. The model runs again with its rows permuted, and with some of
them replaced (`layers/row_proof.py`); the input of each layer must change in the same way. This file lists the ways in which an input can
hold the rows (its readings), and decides between them by these experiments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Array, Bools, Floats, Ints
from dualform.errors import AxisError
from dualform.projection import has_float64

Lead = tuple[int, ...]
"""The shape of a layer's input without its features."""
Fingerprints = Floats
"""One number for each vector of an input, shaped like its leading axes. Equal vectors have equal numbers."""
RowMap = Ints
"""(rows,): the row of the original batch that stands in each place of an experiment's batch."""

WHOLE = "rows"
"""The axis has one entry for each row."""
ROWS_OUTSIDE = "rows × positions"
"""The axis has several entries for each row, next to each other: x.flatten(0, 1) of (rows, positions, …)."""
ROWS_INSIDE = "positions × rows"
"""The axis has several entries for each row, and the rows alternate: x.flatten(0, 1) of (positions, rows, …)."""

MIXING_SHARE = 0.75
"""Rows depend on each other if at least this share of all vectors changes when about half of the rows are replaced."""
FITTING_SHARE = 0.98
"""A reading must fit at least this share of the vectors. Rounding can flip a decision of a network, such as which expert gets a token."""
ROUNDING = 1e-5
"""Differences below this fraction of an input's root mean square are rounding."""
SAME_VECTOR = 1e-6
"""Vectors are the same if they differ by less than this fraction of the root mean square. Few of many vectors are so close by accident."""
CLEARLY_BETTER = 1e-2
"""If no reading fits up to ROUNDING, the best one is taken if its error is below this fraction of the second best one's. A batch normalisation
enlarges rounding errors where the deviation of its inputs is far below their mean."""
CLEARLY_BETTER_IN_16_BITS = 0.1
"""The same for 16-bit arithmetic."""


VECTORS_AT_ONCE = 4096
"""Vectors are converted to float64 this many at a time, to bound memory."""


@dataclass(frozen=True)
class Layout:
    """How to read a tensor (*lead, features) as (rows, positions, features)."""

    split: Lead
    """The leading shape, with a flattened axis split into two."""
    axis: int | None
    """The axis of `split` that holds the rows. None: all rows share these vectors."""

    @property
    def is_shared(self) -> bool:
        """Whether its slots belong to no single row."""
        return self.axis is None

    @cached_property
    def rows(self) -> int:
        """The number of rows; 1 for vectors that all rows share."""
        if self.axis is None or not self.split:
            return 1
        return self.split[self.axis]

    @cached_property
    def positions(self) -> int:
        """The number of slots per row: the product of the other axes."""
        return math.prod(length for axis, length in enumerate(self.split) if axis != self.axis)

    def slots(self, tensor: Tensor) -> Tensor:
        """(*lead, features) → (rows × positions, features), row by row; a view where possible."""
        if tensor.dim() == 2 and len(self.split) == 1:
            return tensor
        features = tensor.shape[-1]
        if self.axis is None or not self.split:
            return tensor.reshape(-1, features)
        split = tensor.reshape(*self.split, features)
        return split.movedim(self.axis, 0).reshape(-1, features)


@dataclass(frozen=True)
class RowAxis:
    """Where an input holds the rows, for inputs of any size."""

    axis: int | None
    """A leading axis. None: all rows share the input."""
    holds: str = WHOLE
    """WHOLE, ROWS_OUTSIDE or ROWS_INSIDE."""

    def __str__(self) -> str:
        if self.axis is None:
            return "shared by all rows"
        if self.holds == WHOLE:
            return f"axis {self.axis}"
        return f"axis {self.axis} ({self.holds})"

    def layout(self, lead: Lead, rows: int) -> Layout | None:
        """Return the layout of an input of this shape, or None if it cannot be read this way."""
        return _layout(self, lead, rows)


FIRST = RowAxis(0)
SHARED = RowAxis(None)


@lru_cache(maxsize=1024)  # the shapes of a training run repeat at every step
def _layout(where: RowAxis, lead: Lead, rows: int) -> Layout | None:
    if rows == 1:  # a single row owns every vector
        return Layout((1, math.prod(lead)), 0)
    if rows == 0:
        return Layout((0, 1), 0) if math.prod(lead) == 0 else None
    if where.axis is None:
        return Layout(lead, None)
    if where.axis >= len(lead):
        return None
    before = lead[: where.axis]
    length = lead[where.axis]
    after = lead[where.axis + 1 :]
    if where.holds == WHOLE:
        return Layout(lead, where.axis) if length == rows else None
    if length % rows:
        return None
    if where.holds == ROWS_OUTSIDE:
        return Layout((*before, rows, length // rows, *after), where.axis)
    return Layout((*before, length // rows, rows, *after), where.axis + 1)


def readings(lead: Lead, rows: int, axis: int | None = None) -> list[RowAxis]:
    """List every way in which an input of this shape can hold the rows. axis: the one that the module itself names, if it does."""
    axes = range(len(lead)) if axis is None else (axis,)
    whole = [RowAxis(one) for one in axes if lead[one] == rows]
    for one in axes:
        if lead[one] > rows and _is_multiple(lead[one], rows):
            whole += [RowAxis(one, ROWS_OUTSIDE), RowAxis(one, ROWS_INSIDE)]
    return [*whole, SHARED]


def _is_multiple(length: int, rows: int) -> bool:
    return rows > 0 and length % rows == 0


def reading_of_batch_axis(lead: Lead, rows: int, axis: int, layer: str) -> RowAxis:
    """Return what batch_axis={layer: axis} means for an input of this shape.

    For a flattened input (vectors, features), 0 means that each row's positions stand together, and 1 that the rows alternate.
    """
    is_flattened = len(lead) == 1 and lead[0] != rows and _is_multiple(lead[0], rows)
    if is_flattened and axis in (0, 1):
        return RowAxis(0, ROWS_OUTSIDE if axis == 0 else ROWS_INSIDE)
    if axis >= len(lead):
        raise AxisError(
            f"batch_axis={{{layer!r}: {axis}}} names no leading axis of an input of shape {shape_text(lead)}."
        )
    length = lead[axis]
    if length == rows:
        return RowAxis(axis)
    if _is_multiple(length, rows):
        return RowAxis(axis, ROWS_OUTSIDE)
    raise AxisError(
        f"batch_axis={{{layer!r}: {axis}}} names an axis of length {length}, which is no multiple of the {rows} rows "
        f"that batch() announced."
    )


def reading_of_module(lead: Lead, rows: int, axis: int, batch_axis: int) -> RowAxis:
    """Return the same for a module that names the axis of its batch itself (recurrent layers, attention).

    Where its batch is a multiple of the rows, batch_axis 0 means that each row's entries stand together, and 1 that the rows alternate.
    """
    if lead[axis] == rows or batch_axis not in (0, 1):
        return RowAxis(axis)
    return RowAxis(axis, ROWS_OUTSIDE if batch_axis == 0 else ROWS_INSIDE)


def reading_by_length(lead: Lead, rows: int, axis: int | None) -> RowAxis | None:
    """Return the reading without an experiment: axis 0, or the axis that the module names, if it is as long as the batch."""
    if rows == 1:
        return FIRST
    first = 0 if axis is None else axis
    fits = first < len(lead) and lead[first] == rows
    return RowAxis(first) if fits else None


def shape_text(lead: Lead) -> str:
    """Format a shape for messages."""
    return f"({', '.join([*map(str, lead), 'features'])})"


# Experiments

FOLLOWS_NOTHING = "its input does not follow the rows along any axis"
SAME_FOR_ALL_ROWS = "its input was the same for all rows"
SAME_AND_OF_ALL_ROWS = "its input is the same for all rows, and depends on all of them"
PLACES = "places"
"""Something stays in place when rows move, such as random numbers. Replacing further rows may decide."""
ORDER = "order"
"""Either the model reorders its rows, or rows depend on each other. Replacing further rows may decide."""
MIXING = "mixing"
"""Every vector depends on every row, and on something that stays in place. Evaluation mode may decide."""


@dataclass(frozen=True)
class Decision:
    """The reading of an input that the experiments show, if they do."""

    where: RowAxis | None
    """None: none of them, or several."""
    why: str = ""
    """Why it is not proved, if it is not."""
    hidden_by: str = ""
    """What hides the answer, if something does: PLACES, ORDER or MIXING."""
    may_differ: bool = False
    """Whether another batch of the same shapes may give another answer."""

    @property
    def is_proved(self) -> bool:
        """Whether the experiments leave a single reading."""
        return self.where is not None and not self.why

    @property
    def proves_rows(self) -> bool:
        """Whether they leave a single reading, in which each vector belongs to one row."""
        return self.is_proved and self.where != SHARED


@dataclass(frozen=True)
class Experiment:
    """A layer's input in a run of the model whose row i was row rows[i] of the original batch."""

    rows: RowMap
    numbers: Fingerprints

    @property
    def is_moved(self) -> Bools:
        """(rows,): whether another row stands in this place."""
        moved: Bools = self.rows != np.arange(len(self.rows))
        return moved


def decide(
    allowed: Sequence[RowAxis],
    before: Fingerprints,
    permuted: Experiment,
    replaced: Sequence[Experiment],
    *,
    is_coarse: bool = False,
    module_axis: int | None = None,
) -> Decision:
    """Decide between the readings of an input from experiments.

    Permuted rows show along which axis the input follows them. Replaced rows show that no other vector depends on them, so that a model
    that reorders its rows is found out. Where something stays in place when rows move (random numbers, a state that the model keeps for
    each row), replaced rows have to decide alone: then each row needs its own pattern of being replaced (`row_proof.coded_rows`).
    is_coarse: whether 16-bit arithmetic may round the same row differently in another place. module_axis: the axis of the rows, if the
    module itself names it (recurrent layers, attention).
    """
    following = _following(allowed, before, permuted, is_coarse=is_coarse)
    if not following:
        return _decide_by_replaced_rows(allowed, before, permuted, replaced)
    if following == [SHARED]:
        # An input of sorted vectors does not change under a permutation either, but it does when rows are replaced
        stays = _other_rows_stay(SHARED, before, replaced)
        return Decision(SHARED) if stays else _undecided()
    if len(following) == 1:
        return _confirm(following[0], before, replaced)
    consistent = [where for where in following if _other_rows_stay(where, before, replaced)]
    if len(consistent) == 1:
        return Decision(consistent[0])
    return _choose_among_equal(consistent, module_axis)


def _undecided(hidden_by: str = "") -> Decision:
    return Decision(None, FOLLOWS_NOTHING, hidden_by)


def _confirm(where: RowAxis, before: Fingerprints, replaced: Sequence[Experiment]) -> Decision:
    """Confirm by replaced rows the only reading in which an input follows permuted rows."""
    if _mixes_rows(before, replaced) or _other_rows_stay(where, before, replaced):
        return Decision(where)
    # Reordering the rows changes no more vectors than were replaced
    is_mixed = all(_changes_more_than_replaced(before, experiment) for experiment in replaced)
    if is_mixed or _depend_on_several_rows(before, replaced):
        return _undecided(MIXING)
    hidden_by = "" if _tell_rows_apart(replaced) else ORDER
    return _undecided(hidden_by)


def _decide_by_replaced_rows(
    allowed: Sequence[RowAxis], before: Fingerprints, permuted: Experiment, replaced: Sequence[Experiment]
) -> Decision:
    """Decide if there is no reading in which the input follows permuted rows."""
    if _has_same_vectors(before, permuted):  # the model puts its rows into an order of its own
        return _undecided()
    if not _tell_rows_apart(replaced):
        return _undecided(PLACES)
    if _mixes_rows(before, replaced):
        return _undecided(MIXING)
    depending = _depending(allowed, before, replaced)
    return Decision(depending[0]) if len(depending) == 1 else _undecided()


def _other_rows_stay(where: RowAxis, before: Fingerprints, replaced: Sequence[Experiment]) -> bool:
    """Whether in each experiment, vectors of rows that were not replaced are unchanged."""
    return all(_others_stay(where, before, experiment) for experiment in replaced)


def _mixes_rows(before: Fingerprints, replaced: Sequence[Experiment]) -> bool:
    """Whether rows depend on each other, as they do behind a batch normalisation."""
    return all(_changes_everywhere(before, experiment) for experiment in replaced)


def _tell_rows_apart(replaced: Sequence[Experiment]) -> bool:
    """Whether each row is replaced at least once, in a set of experiments of its own, so that changes show which row is where."""
    patterns = np.stack([experiment.is_moved for experiment in replaced], axis=1)
    is_each_replaced = bool(patterns.any(axis=1).all())
    return is_each_replaced and len(np.unique(patterns, axis=0)) == len(patterns)


def _choose_among_equal(fitting: Sequence[RowAxis], module_axis: int | None) -> Decision:
    """Decide between readings that fit equally well, because all rows are equal.

    The first axis, or the axis that the module itself names, may then be taken by its length, but no other.
    """
    if module_axis is not None and RowAxis(module_axis) in fitting:
        return Decision(RowAxis(module_axis), SAME_FOR_ALL_ROWS, may_differ=True)
    if FIRST in fitting:
        return Decision(FIRST, SAME_FOR_ALL_ROWS)
    if SHARED in fitting:
        return Decision(SHARED, SAME_FOR_ALL_ROWS, may_differ=True)
    if not fitting:
        # Normalisation may make a few rows equal up to rounding; in evaluation mode, or in another batch, they differ
        return Decision(None, SAME_AND_OF_ALL_ROWS, hidden_by=MIXING, may_differ=True)
    why = f"its input can be read in several ways: {', '.join(map(str, fitting))}"
    return Decision(None, why, may_differ=True)


def _following(
    allowed: Sequence[RowAxis], before: Fingerprints, permuted: Experiment, *, is_coarse: bool
) -> list[RowAxis]:
    """The readings in which an input follows permuted rows."""
    expected_by_reading = {}
    for where in allowed:
        expected = _moved(before, where, permuted.rows)
        if expected is not None:
            expected_by_reading[where] = expected
    tolerance = ROUNDING * _root_mean_square(before)
    exact = []
    nearly = []
    for where, expected in expected_by_reading.items():
        is_off = np.abs(permuted.numbers - expected) > tolerance
        if not is_off.any():
            exact.append(where)
        elif _is_flipped_by_rounding(is_off, permuted.numbers, before):
            nearly.append(where)
    if exact or nearly:
        return exact or nearly
    share = CLEARLY_BETTER_IN_16_BITS if is_coarse else CLEARLY_BETTER
    return _clearly_best(expected_by_reading, permuted, share)


def _clearly_best(
    expected_by_reading: dict[RowAxis, Fingerprints], permuted: Experiment, share: float
) -> list[RowAxis]:
    """Return the reading that fits every row far better than all others, for arithmetic that rounds more than ROUNDING.

    share: its error may be this fraction of the second best one's.
    """
    rows = len(permuted.rows)
    errors = {
        where: np.abs(permuted.numbers - expected) for where, expected in expected_by_reading.items() if expected.size
    }
    usual = {where: float(np.quantile(error, FITTING_SHARE)) for where, error in errors.items()}
    if len(usual) < 2:
        return []
    best, second = sorted(usual, key=usual.__getitem__)[:2]
    by_row = _by_row(errors[best], best, rows)
    if best == SHARED or by_row is None:
        return []
    worst_row = float(np.median(by_row, axis=1).max())
    is_clear = max(worst_row, usual[best]) <= share * usual[second]
    return [best] if is_clear else []


def _is_flipped_by_rounding(is_off: Bools, after: Fingerprints, before: Fingerprints) -> bool:
    """Whether the vectors that are off are few, and most of them are new.

    A vector that stood elsewhere in the original input has been moved by the model; rounding makes new vectors.
    """
    if is_off.mean() > 1 - FITTING_SHARE:
        return False
    sorted_before = np.sort(before, axis=None)
    values = after[is_off]
    right = np.searchsorted(sorted_before, values).clip(max=sorted_before.size - 1)
    left = (right - 1).clip(min=0)
    to_left = np.abs(sorted_before[left] - values)
    to_right = np.abs(sorted_before[right] - values)
    is_known = np.minimum(to_left, to_right) <= SAME_VECTOR * _root_mean_square(before)
    return bool(is_known.mean() < 0.5)


def _others_stay(where: RowAxis, before: Fingerprints, replaced: Experiment) -> bool:
    """Whether vectors of rows that were not replaced are unchanged."""
    is_changed = _is_changed(before, replaced)
    by_row = _by_row(is_changed, where, len(replaced.rows))
    if by_row is None:
        return False
    if where != SHARED:
        by_row[replaced.is_moved] = False
    is_off = _like_input(by_row, where, before.shape)
    return not is_off.any() or _is_flipped_by_rounding(is_off, replaced.numbers, before)


def _depending(allowed: Sequence[RowAxis], before: Fingerprints, replaced: Sequence[Experiment]) -> list[RowAxis]:
    """The readings in which vectors of replaced rows have changed, and no others."""
    return [
        where
        for where in allowed
        if where != SHARED and all(_only_replaced_change(where, before, experiment) for experiment in replaced)
    ]


def _only_replaced_change(where: RowAxis, before: Fingerprints, replaced: Experiment) -> bool:
    by_row = _by_row(_is_changed(before, replaced), where, len(replaced.rows))
    if by_row is None:
        return False
    # Not all of them must change: a row may have been replaced by an equal one
    return bool(by_row[replaced.is_moved].any()) and _others_stay(where, before, replaced)


def _by_row(values: Array, where: RowAxis, rows: int) -> Array | None:
    """Return a copy of shape (rows, positions), or (1, positions) for shared vectors; None if it cannot be read this way."""
    layout = where.layout(values.shape, rows)
    if layout is None:
        return None
    if layout.axis is None:
        return values.reshape(1, -1).copy()
    split = values.reshape(layout.split)
    return np.moveaxis(split, layout.axis, 0).reshape(rows, -1).copy()


def _like_input(by_row: Bools, where: RowAxis, lead: Lead) -> Bools:
    """The inverse of `_by_row`."""
    layout = where.layout(lead, len(by_row))
    if layout is None or layout.axis is None:
        return by_row.reshape(lead)
    others = [length for axis, length in enumerate(layout.split) if axis != layout.axis]
    return np.moveaxis(by_row.reshape(len(by_row), *others), 0, layout.axis).reshape(lead)


def _has_same_vectors(before: Fingerprints, permuted: Experiment) -> bool:
    """Whether an input has the same vectors as before, in whatever order."""
    if not before.size:
        return True
    values = np.sort(before, axis=None)
    permuted_values = np.sort(permuted.numbers, axis=None)
    difference = np.abs(permuted_values - values)
    return float(np.quantile(difference, FITTING_SHARE)) <= ROUNDING * _root_mean_square(before)


def _changes_everywhere(before: Fingerprints, replaced: Experiment) -> bool:
    """Whether rows depend on each other: more vectors change than those of the replaced rows, which are about half of them.

    Not all of them need to, and vectors that stay zero say nothing: behind a ReLU they may belong to replaced rows.
    """
    tolerance = ROUNDING * _root_mean_square(before)
    is_zero = (np.abs(before) <= tolerance) & (np.abs(replaced.numbers) <= tolerance)
    is_changed = _is_changed(before, replaced)[~is_zero]
    return bool(is_changed.size) and float(is_changed.mean()) >= MIXING_SHARE


def _changes_more_than_replaced(before: Fingerprints, replaced: Experiment) -> bool:
    """Whether more vectors change than the replaced rows have: in a small batch, that may be less than MIXING_SHARE of them."""
    changed = float(_is_changed(before, replaced).mean())
    moved = float(replaced.is_moved.mean())
    return changed > moved + 1 - FITTING_SHARE


def _depend_on_several_rows(before: Fingerprints, replaced: Sequence[Experiment]) -> bool:
    """Whether some vectors depend on more than one row: no row was replaced in every experiment in which such a vector changed.

    A model that puts its rows into another order has no such vectors, but a batch normalisation has them, even of two rows.
    """
    changes = np.stack([_is_changed(before, experiment).reshape(-1) for experiment in replaced], axis=1)
    in_place = np.stack([~experiment.is_moved for experiment in replaced], axis=1)
    patterns, counts = np.unique(changes, axis=0, return_counts=True)
    of_several = 0
    for pattern, count in zip(patterns, counts, strict=True):
        # Such a row is not the one, or not the only one, that these vectors depend on
        was_in_place = (pattern & in_place).any(axis=1)
        if was_in_place.all():
            of_several += int(count)
    return of_several > (1 - FITTING_SHARE) * len(changes)


def _is_changed(before: Fingerprints, replaced: Experiment) -> Bools:
    changed: Bools = np.abs(replaced.numbers - before) > ROUNDING * _root_mean_square(before)
    return changed


def _moved(before: Fingerprints, where: RowAxis, rows: RowMap) -> Fingerprints | None:
    """Return what the input should be after its rows were moved; None if it cannot be read this way."""
    layout = where.layout(before.shape, len(rows))
    if layout is None:
        return None
    if layout.axis is None:
        return before
    split = before.reshape(layout.split)
    moved: Fingerprints = split.take(rows, axis=layout.axis).reshape(before.shape)
    return moved


def _root_mean_square(values: Fingerprints) -> float:
    return math.sqrt(float(np.square(values).mean())) if values.size else 0.0


def fingerprints(keys: Tensor, lead: int) -> Fingerprints:
    """Reduce each vector of a layer's input to one number: its product with a fixed random vector.

    lead: how many axes of `keys` are leading ones.
    """
    keys = keys.detach()
    if not has_float64(keys.device.type):
        keys = keys.cpu()
    flat = keys.flatten(lead) if keys.dim() > lead else keys.unsqueeze(-1)
    if flat.is_floating_point():
        # One infinite feature must not hide which row a vector belongs to
        flat = torch.nan_to_num(flat.float(), nan=0.5, posinf=1.0, neginf=-1.0)
    if flat.shape[-1] == 1:
        products = flat[..., 0].double()
    else:
        # In float64: a product may cancel, and float32 may round it differently in another place
        direction = _direction(flat.shape[-1]).to(flat.device).double()
        vectors = flat.reshape(-1, flat.shape[-1])
        with torch.autocast(flat.device.type, enabled=False):  # an experiment may run within the user's autocast
            pieces = torch.split(vectors, VECTORS_AT_ONCE)
            parts = [piece.double() @ direction for piece in pieces]
        products = torch.cat(parts).reshape(flat.shape[:-1])
    numbers: Fingerprints = products.cpu().numpy()
    return numbers


@lru_cache(maxsize=64)
def _direction(features: int) -> Tensor:
    """A fixed random vector, whatever the default type and device are when it is first needed."""
    generator = torch.Generator().manual_seed(features)
    return torch.randn(features, generator=generator, dtype=torch.float32, device="cpu")
