"""keep="rows": the slots of a call, summed row by row before they are stored, where that takes less.

A row's part of a gradient is Σ error ⊗ key over its positions. With many positions, that matrix is smaller than the slots that make it
up. Everything that is asked of whole rows needs this sum only, so all such answers stay as they are; single positions are lost.

The audit sees the slots themselves, before they are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Bools
from dualform.errors import BatchError
from dualform.layers.keys import Keys, Patches, Vectors
from dualform.layers.layer import Layer
from dualform.layers.projected import SlotViews
from dualform.store.records import RowSums


@dataclass(frozen=True)
class CallSums:
    """The slots of a call, summed row by row."""

    known: RowSums
    """What is stored beside the sums."""
    keys: Tensor
    """(rows × positions, …): keys, or the gradients of rows."""
    errors: Tensor | None
    """None: there are gradients instead."""
    positions: int
    """How many slots each row has now."""
    silent: Bools | None
    """(rows × positions,): which of these wrote nothing; None: none."""


@dataclass(frozen=True)
class SlotsOfCall:
    """Keys and error signals of a call, one row after the other."""

    layer: Layer
    rows: int
    stored_keys: Tensor
    """(rows × positions, …) as they would be stored; of feature maps, a line for each map."""
    keys: Keys
    """What they stand for."""
    errors: Tensor
    """(rows × positions, kept outputs)"""
    silent: Bools | None
    """(rows × positions,): which slots wrote nothing; None: none."""
    groups: int = 1
    """How many of these stand for one slot: the groups of a projected convolution."""

    @property
    def positions(self) -> int:
        """How many slots each row has."""
        return len(self.errors) // self.rows if self.rows else 0

    @property
    def numbers_a_row(self) -> float:
        """How many numbers the slots of a row take."""
        numbers = self.stored_keys.numel() + self.errors.numel()
        return numbers / self.rows

    @property
    def errors_by_row(self) -> Tensor:
        """(rows, positions, kept outputs)"""
        return torch.unflatten(self.errors, 0, (self.rows, self.positions))

    def silent_rows(self) -> Bools | None:
        """Which rows wrote nothing at any position, (rows,); None: none."""
        if self.silent is None:
            return None
        by_row = self.silent.reshape(self.rows, self.positions)
        found: Bools = np.logical_and.reduce(by_row, axis=1)
        return found if found.any() else None

    def known(self, *, is_gradient: bool) -> RowSums:
        """What is stored beside the sums."""
        written = len(self.errors)
        if self.silent is not None:
            written -= int(self.silent.sum())
        return RowSums(is_gradient, self.positions // self.groups, written // self.groups)


def summed(slots: SlotsOfCall) -> CallSums | None:
    """Sum the slots of each row; None where the slots themselves take less, or there is one for each row."""
    if slots.positions <= 1:
        return None
    if slots.layer.form == "parts":
        return _summed_parts(slots)
    if slots.layer.form == "numbers":
        return _summed_by_number(slots)
    if slots.groups == 1 and not is_smaller(slots.layer, slots.numbers_a_row):
        return None
    known = slots.known(is_gradient=True)
    return CallSums(known, gradients_of_rows(slots), None, 1, slots.silent_rows())


def is_smaller(layer: Layer, numbers: float) -> bool:
    """Whether the gradient of a row takes less than its slots. numbers: how many these have, keys and error signals together."""
    return layer.gradient_size < numbers


def projected(slots: SlotsOfCall, stored: Layer) -> SlotsOfCall:
    """The same slots as a projected layer has them."""
    views = SlotViews.of(stored)
    keys = views.keys(slots.keys)
    errors = views.errors(slots.errors)
    groups = views.groups
    silent = slots.silent if slots.silent is None else np.repeat(slots.silent, groups)
    return SlotsOfCall(stored, slots.rows, keys, Vectors(keys), errors, silent, groups)


def _summed_parts(slots: SlotsOfCall) -> CallSums:
    """What each row adds to an elementwise weight and its bias."""
    parts_by_row = torch.unflatten(slots.stored_keys, 0, (slots.rows, slots.positions))
    parts = parts_by_row.sum(1)
    errors = slots.errors_by_row.sum(1)
    known = slots.known(is_gradient=False)
    return CallSums(known, parts, errors, 1, slots.silent_rows())


# Embeddings


def _summed_by_number(slots: SlotsOfCall) -> CallSums | None:
    """One slot for each number that a row has. Rows with fewer of them than others get silent slots, with the last number again."""
    rows = slots.rows
    positions = slots.positions
    numbers = slots.stored_keys.reshape(rows, positions)
    in_order, order = numbers.sort(1)
    is_new = torch.ones_like(in_order, dtype=torch.bool)
    is_new[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    places = is_new.cumsum(1) - 1
    distinct = int(places[:, -1].max()) + 1
    if distinct == positions:
        return None
    last_numbers = in_order[:, -1:]
    kept = last_numbers.repeat(1, distinct)
    kept.scatter_(1, places, in_order)

    # Slots before and after, by their places in the whole call
    row_numbers = torch.arange(rows, device=numbers.device).unsqueeze(1)
    before = (order + positions * row_numbers).reshape(-1)
    after = (places + distinct * row_numbers).reshape(-1)
    errors = slots.errors.new_zeros(rows * distinct, slots.errors.shape[1])
    errors.index_add_(0, after, slots.errors[before])
    silent = _silent_numbers(slots, before, after, rows * distinct)
    known = slots.known(is_gradient=False)
    return CallSums(known, kept.reshape(-1, 1), errors, distinct, silent)


def _silent_numbers(slots: SlotsOfCall, before: Tensor, after: Tensor, count: int) -> Bools | None:
    """Which of the slots that are left wrote nothing. before, after: where each slot was, and which it is a part of now."""
    has_written = np.zeros(count, np.bool_)
    places = after.cpu().numpy()
    if slots.silent is not None:
        was_silent = slots.silent[before.cpu().numpy()]
        places = places[~was_silent]
    has_written[places] = True
    return None if has_written.all() else ~has_written


# Gradients


def gradients_of_rows(slots: SlotsOfCall) -> Tensor:
    """Σ error ⊗ key of each row, and Σ error behind it where there is a bias, (rows, size)."""
    errors = slots.errors_by_row
    if isinstance(slots.keys, Patches):
        groups = slots.layer.d_in // slots.layer.gradient_width
        weights = slots.keys.outer_by_row(errors, groups)
    else:
        assert isinstance(slots.keys, Vectors)
        keys = torch.unflatten(slots.keys.data, 0, errors.shape[:2])
        weights = torch.bmm(errors.transpose(1, 2), keys)
    if not slots.layer.biases():
        return weights.flatten(1)
    biases = errors.sum(1)
    return torch.cat([weights.flatten(1), biases], 1)


# Columns


def columns_of_rows(columns: Mapping[str, Any]) -> dict[str, Any]:
    """What batch() was given, with one entry for each row: columns per position are taken where they are constant in every row."""
    return {name: _column_of_rows(name, given) for name, given in columns.items()}


def _column_of_rows(name: str, given: Any) -> Any:
    is_nested = isinstance(given, (list, tuple)) and given and not isinstance(given[0], (str, bool, int, float))
    if is_nested:
        given = np.asarray(given)
    if getattr(given, "ndim", 1) != 2:
        return given
    positions = given.shape[1]
    is_constant = positions > 0 and bool((given == given[:, :1]).all())
    if not is_constant:
        raise BatchError(
            f'batch(): column {name!r} has an entry for each position, which differ within a row. keep="rows" sums the positions of each '
            f"row when they are recorded. Give one entry per row; or, for documents packed into one row, one document per row; or "
            f'record with keep="slots".'
        )
    return given[:, 0]
