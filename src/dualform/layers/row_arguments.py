"""The rows of a batch in the arguments of a model: in tensors, and in lists with one entry for each row."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dualform.layers.rows import RowMap
from dualform.layers.slot_source import Arguments

LONGEST_OPTION = 32
"""Texts up to this long may be options of a forward pass, such as mode="train"."""


def tensors_in(value: object) -> list[Tensor]:
    """List the tensors among a forward's arguments: in tuples, lists, dictionaries and dataclasses too."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for inner in _parts_of(value) for tensor in tensors_in(inner)]


def _parts_of(value: object) -> Collection[object]:
    """What a container among the arguments holds; nothing for any other argument."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (tuple, list)):
        return value
    return vars(value).values() if _is_dataclass(value) else ()


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")


def options_in(value: object) -> tuple[Hashable, ...]:
    """List the switches among a forward's arguments, which may change how it arranges rows: booleans, None, enums and short texts."""
    if value is None or isinstance(value, (bool, Enum)):
        return (value,)
    if isinstance(value, str):
        return (value,) if len(value) <= LONGEST_OPTION else ()
    options: list[Hashable] = []
    if isinstance(value, Mapping):
        for name, inner in value.items():
            options += [str(name), *options_in(inner)]
    elif isinstance(value, tuple):  # not a list: its length and texts may be data
        for inner in value:
            options += options_in(inner)
    return tuple(options)


@dataclass(frozen=True)
class Placement:
    """Where the rows are in the arguments of a forward pass."""

    axes: tuple[int | None, ...]
    """For each tensor, in the order of `tensors_in`: the axis of the rows; None: it has none."""
    rows_of_lists: int = 0
    """Lists and tuples of this length have an entry for each row, and their tensors have no axis of rows; 0: no list has."""

    @property
    def is_first_axis(self) -> bool:
        """Whether the rows are along first axes only, or in lists."""
        return all(axis in (None, 0) for axis in self.axes)

    @property
    def has_rows(self) -> bool:
        """Whether anything holds the rows."""
        return bool(self.rows_of_lists) or any(axis is not None for axis in self.axes)


def placements(arguments: Arguments, rows: int, axis: int | None = None) -> list[Placement]:
    """List where the rows may be in the arguments, the likeliest first. axis: what the user names.

    A tensor holds them along its first axis, or along the only axis of that length (the state of a recurrent layer). Sequence-first models
    have them along the second. A list of as many images or texts holds one in each entry.
    """
    tensors = tensors_in(arguments)
    if axis is not None:
        return [Placement(_axes_along(tensors, rows, axis))]
    first = _axes_along(tensors, rows, 0)
    # A square tensor after the first, such as a mask over positions, may only look as if it held rows
    without_squares = list(first)
    for number, tensor in enumerate(tensors):
        if number > 0 and tensor.shape == (rows, rows):
            without_squares[number] = None
    second = _axes_along(tensors, rows, 1)
    candidates = [Placement(first), Placement(tuple(without_squares)), Placement(second)]
    if has_list_of_rows(arguments, rows):
        # First, since the tensors of such a list may have other axes that happen to be as long
        candidates.insert(0, Placement(_axes_outside_lists(arguments, rows), rows))
    return [candidate for candidate in dict.fromkeys(candidates) if candidate.has_rows]


def _axes_along(tensors: Sequence[Tensor], rows: int, preferred: int) -> tuple[int | None, ...]:
    """The axis of the rows in each tensor: the preferred one, if it is as long."""
    return tuple(preferred if length(tensor, preferred) == rows else _axis_of_rows(tensor, rows) for tensor in tensors)


def are_rows_equal(arguments: Arguments, placement: Placement) -> bool:
    """Whether all rows are equal, in every tensor that holds them; False where they are in lists."""
    if placement.rows_of_lists:
        return False
    for tensor, axis in zip(tensors_in(arguments), placement.axes, strict=True):
        if axis is None:
            continue
        first_row = tensor.narrow(axis, 0, 1)
        if not torch.equal(tensor, first_row.expand_as(tensor)):
            return False
    return True


def length(tensor: Tensor, axis: int) -> int:
    """The length of an axis, or −1 if there is no such axis."""
    return tensor.shape[axis] if axis < tensor.dim() else -1


def _axis_of_rows(tensor: Tensor, rows: int) -> int | None:
    fitting = [axis for axis, size in enumerate(tensor.shape) if size == rows]
    if not fitting:
        return None
    is_clear = fitting[0] == 0 or len(fitting) == 1
    return fitting[0] if is_clear else None


def has_list_of_rows(arguments: Arguments, rows: int) -> bool:
    """Whether a list or tuple among the arguments has an entry for each row."""
    positional, named = arguments
    values = chain.from_iterable(map(_nested, (*positional, *named.values())))
    return any(_is_list_of_rows(value, rows) for value in values)


def _nested(value: object) -> Iterator[object]:
    yield value
    if isinstance(value, (Mapping, tuple, list)):
        for inner in _parts_of(value):
            yield from _nested(inner)


def _is_list_of_rows(value: object, rows: int) -> bool:
    if isinstance(value, list):
        return len(value) == rows
    if type(value) is not tuple or len(value) != rows:
        return False
    # A pair of tensors that hold the rows themselves, such as the state of an LSTM, is no pair of rows
    return not all(isinstance(entry, Tensor) and rows in entry.shape for entry in value)


def _axes_outside_lists(arguments: Arguments, rows: int) -> tuple[int | None, ...]:
    """The axes of tensors where lists of rows are moved as a whole: their tensors have none."""
    positional, named = arguments
    return tuple(axis for value in (*positional, *named.values()) for axis in _axes_of_argument(value, rows))


def _axes_of_argument(value: object, rows: int) -> list[int | None]:
    if isinstance(value, Tensor):
        return [_axis_of_rows(value, rows)]
    if _is_list_of_rows(value, rows):
        return [None] * len(tensors_in(value))
    return [axis for inner in _parts_of(value) for axis in _axes_of_argument(inner, rows)]


def move_rows(arguments: Arguments, placement: Placement, rows: RowMap) -> Arguments:
    """Return the arguments with row rows[i] of the batch in place i."""
    mover = _Mover(placement, rows)
    positional, named = arguments
    moved = tuple(mover.move(value) for value in positional)
    return moved, {name: mover.move(value) for name, value in named.items()}


class _Mover:
    """Moves the rows of one argument after the other."""

    def __init__(self, placement: Placement, rows: RowMap):
        self._rows = rows
        self._order = torch.from_numpy(rows)
        self._axes = iter(placement.axes)
        self._rows_of_lists = placement.rows_of_lists

    def move(self, value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return self._move_packed(value)
        if isinstance(value, Tensor):
            return self._move_tensor(value)
        if isinstance(value, np.ndarray):
            is_by_row = bool(value.ndim) and len(value) == len(self._rows)
            return value[self._rows] if is_by_row else value
        if isinstance(value, Mapping):
            moved = self._move_named(value)
            return moved if type(value) is dict else type(value)(moved)  # type: ignore[call-arg]
        if isinstance(value, (tuple, list)):
            return self._move_list(value)
        if _is_dataclass(value):
            copied = copy.copy(value)
            vars(copied).update(self._move_named(vars(value)))
            return copied
        return value

    def _move_tensor(self, tensor: Tensor) -> Tensor:
        axis = next(self._axes)
        if axis is None:
            return tensor
        return tensor.index_select(axis, self._order.to(tensor.device))

    def _move_named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.move(inner) for name, inner in values.items()}

    def _move_list(self, value: Sequence[Any]) -> Any:
        items = [self.move(inner) for inner in value]
        if self._rows_of_lists and _is_list_of_rows(value, self._rows_of_lists):
            items = [items[row] for row in self._rows]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)  # type: ignore[call-arg]

    def _move_packed(self, value: PackedSequence) -> PackedSequence:
        for _ in tensors_in(value):
            next(self._axes)
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        return pack_padded_sequence(padded[self._order], lengths[self._order], batch_first=True, enforce_sorted=False)


def holds_rows(arguments: Arguments, rows: int) -> bool:
    """Whether a tensor has the rows along its first axis, or a list has an entry for each."""
    is_first_axis = any(length(tensor, 0) == rows for tensor in tensors_in(arguments))
    return is_first_axis or has_list_of_rows(arguments, rows)
