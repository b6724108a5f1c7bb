"""Number groups in the order of their appearance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from dualform.arrays import Array, Ints

Shape = tuple[int, ...]
"""(rows,), or (rows, positions)."""

SMALL = 1 << 27
"""Whole numbers from 0 to below this are looked up in a table, which takes 4 bytes for each number up to the largest that has appeared:
at most half a gigabyte."""

NAN = float("nan")
"""The only NaN used as a key of dictionaries: NaN is not equal to itself, so a dictionary finds it only if it is the same object."""


class Numbering:
    """The groups that some columns make, in the order in which they appear.

    Slots that serve all rows are a group of their own, which has null in all columns.
    """

    def __init__(self, columns: Sequence[str], known: pl.DataFrame | None = None):
        self.columns = tuple(columns)
        self._numbers: dict[tuple[Any, ...], int] = {}
        """By the values of all columns; empty while `_integers` does the numbering."""
        self._integers: _Integers | None = None
        """Numbers the groups of a single column, as long as all its values are small whole numbers."""
        if len(self.columns) == 1:
            self._integers = _Integers()
        if known is not None and known.height:
            self._restore(known.select(self.columns))

    def __len__(self) -> int:
        if self._integers is not None:
            return len(self._integers)
        return len(self._numbers)

    def _restore(self, known: pl.DataFrame) -> None:
        """Give stored groups the numbers that they had, which are their places."""
        is_null = pl.all().is_null()
        has_no_row = known.select(pl.all_horizontal(is_null)).to_series()
        places = has_no_row.arg_true().to_list()
        if not places:
            self._number_table(known)
            return
        (place,) = places
        self._number_table(known[:place])
        self.number_without_row()
        self._number_table(known[place + 1 :])

    def _number_table(self, table: pl.DataFrame) -> None:
        values = {name: table[name].to_numpy() for name in self.columns}
        self.number(values, (table.height,))

    def number_without_row(self) -> int:
        """Return the group of the slots that serve all rows."""
        if self._integers is not None:
            return self._integers.number_without_row()
        nulls = (None,) * len(self.columns)
        return self._number_of(nulls)

    def _number_of(self, values: tuple[Any, ...]) -> int:
        return self._numbers.setdefault(values, len(self._numbers))

    def number(self, values: Mapping[str, Any], shape: Shape) -> Ints:
        """Return the group of each row (rows,) or of each position (rows, positions); new groups get new numbers.

        values: by column, arrays of shape (rows,) or (rows, positions), lists, or a scalar for all.
        """
        if self._integers is not None:
            value = values[self.columns[0]]
            if self._integers.accepts(value):
                return self._integers.number(value, shape)
            self._leave_integers(self._integers)
        columns = [_flat_list(values[name], shape) for name in self.columns]
        numbers = []
        for combination in zip(*columns, strict=True):
            number = self._number_of(combination)
            numbers.append(number)
        return np.array(numbers, np.int64).reshape(shape)

    def _leave_integers(self, integers: _Integers) -> None:
        """Move the numbering to a dictionary, which takes values of any type."""
        for entry in integers.entries().to_list():
            self._number_of((entry,))
        self._integers = None

    def table(self, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
        """Return the groups, one line each, in the order of their numbers."""
        types = {name: schema[name] for name in self.columns}
        if self._integers is None:
            groups = list(self._numbers)
            return pl.DataFrame(groups, types, orient="row")
        (name,) = self.columns
        entries = self._integers.entries()
        return pl.DataFrame({name: entries}, types)


def _broadcast(array: Array, shape: Shape) -> Array:
    """Return one value for each row or position, flat."""
    if array.ndim == 1 and len(shape) == 2:
        array = array[:, None]
    return np.broadcast_to(array, shape).reshape(-1)


def _flat_list(value: Any, shape: Shape) -> list[Any]:
    """Return a column's value for each row or position, as Python's own objects."""
    array = np.asarray(value)
    flat: list[Any] = _broadcast(array, shape).tolist()
    if array.dtype.kind != "f":
        return flat
    return [NAN if math.isnan(number) else number for number in flat]


class _Integers:
    """Numbers groups of small whole numbers by a table. There are millions of token positions; a dictionary would take longer than the sums."""

    def __init__(self) -> None:
        self._table = np.empty(0, np.int32)
        """By value: the number of its group; −1 if it has not appeared."""
        self._entries = [np.empty(0, np.int64)]
        """Values in the order of their numbers, in pieces; 0 for the slots without a row."""
        self._count = 0
        self._without_row: int | None = None

    def __len__(self) -> int:
        return self._count

    def entries(self) -> pl.Series:
        """Return the values in the order of their numbers; null for the slots without a row."""
        entries = pl.Series(np.concatenate(self._entries))
        if self._without_row is not None:
            entries[self._without_row] = None
        return entries

    def number_without_row(self) -> int:
        """Return the number of the slots without a row, which is assigned when they first appear."""
        if self._without_row is None:
            self._without_row = self._count
            self._append(np.zeros(1, np.int64))
        return self._without_row

    def _append(self, entries: Ints) -> None:
        self._entries.append(entries)
        self._count += len(entries)

    @staticmethod
    def accepts(value: Any) -> bool:
        """Whether all of a column's values are small whole numbers."""
        if not isinstance(value, np.ndarray):
            return False
        if value.dtype.kind not in "iu":
            return False
        is_small = (value >= 0) & (value < SMALL)
        return bool(is_small.all())

    def number(self, value: Array, shape: Shape) -> Ints:
        """Return the group of each row or position; new groups get new numbers."""
        flat = _broadcast(value, shape)
        self._make_room(flat.max(initial=-1) + 1)
        unknown = flat[self._table[flat] < 0]
        distinct, first_places = np.unique(unknown, return_index=True)
        in_order_of_appearance = np.argsort(first_places)
        new = distinct[in_order_of_appearance].astype(np.int64)
        first_number = self._count
        self._append(new)
        self._table[new] = np.arange(first_number, self._count)
        numbers: Ints = self._table[flat].astype(np.int64)
        return numbers.reshape(shape)

    def _make_room(self, end: int) -> None:
        """Enlarge the table to hold all values below `end`."""
        length = len(self._table)
        if end > length:
            missing = max(end, 2 * length) - length
            unknown = np.full(missing, -1, np.int32)
            self._table = np.concatenate([self._table, unknown])
