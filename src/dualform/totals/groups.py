"""Numbering groups as they appear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

Ints = np.ndarray[Any, np.dtype[np.int64]]


SMALL = 1 << 27
"""Whole numbers from 0 to below this are looked up in a table: half a gigabyte at most, and 4 bytes for each number up to the
largest that has appeared."""


NAN = float("nan")
"""One for all: a dictionary finds it again only by being the same."""


class Numbering:
    """The groups that some columns make, in the order in which they appear.

    Slots that serve all rows are a group of their own, which has null in all columns.
    """

    def __init__(self, columns: Sequence[str], known: pl.DataFrame | None = None):
        self.columns = tuple(columns)
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._integers: _Integers | None = _Integers() if len(self.columns) == 1 else None
        if known is not None and known.height:
            self._number_again(known.select(self.columns))

    def __len__(self) -> int:
        return len(self._numbers) if self._integers is None else len(self._integers)

    def _number_again(self, known: pl.DataFrame) -> None:
        """Give groups that were kept the numbers they had: their places."""
        without = known.select(pl.all_horizontal(pl.all().is_null())).to_series().arg_true().to_list()
        parts = [known[: without[0]], known[without[0] + 1 :]] if without else [known]
        for place, part in enumerate(parts):
            if place:
                self.number_without_row()
            self.number({name: part[name].to_numpy() for name in self.columns}, (part.height,))

    def number_without_row(self) -> int:
        """The group of the slots that serve all rows."""
        if self._integers is not None:
            return self._integers.number_without_row()
        return self._numbers.setdefault((None,) * len(self.columns), len(self._numbers))

    def number(self, values: Mapping[str, Any], shape: tuple[int, ...]) -> Ints:
        """The group of each row (rows,) or of each position (rows, positions); new groups get new numbers.

        values: by column, arrays of shape (rows,) or (rows, positions), lists, or a scalar for all.
        """
        if self._integers is not None:
            value = values[self.columns[0]]
            if self._integers.takes(value):
                return self._integers.number(value, shape)
            self._numbers = {(entry,): number for number, entry in enumerate(self._integers.entries().to_list())}
            self._integers = None
        # One code for each combination of the columns' values
        codes = np.zeros(int(np.prod(shape)), dtype=np.int64)
        entries = []
        for name in self.columns:
            distinct, inverse = _distinct_values(values[name], shape)
            entries.append(distinct)
            codes = codes * len(distinct) + inverse
        distinct_codes, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        numbers = np.empty(len(distinct_codes), dtype=np.int64)
        for place in np.argsort(first).tolist():  # in the order in which they appear
            key = _combination(int(distinct_codes[place]), entries)
            numbers[place] = self._numbers.setdefault(key, len(self._numbers))
        return numbers[inverse.reshape(-1)].reshape(shape)

    def table(self, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
        """The groups, one line each, in the order of their numbers."""
        types = {name: schema[name] for name in self.columns}
        if self._integers is not None:
            return pl.DataFrame({self.columns[0]: self._integers.entries()}, schema=types)
        return pl.DataFrame(list(self._numbers), schema=types, orient="row")


def _broadcast(array: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return one value for each row or position, flat."""
    if array.ndim == 1 and len(shape) == 2:
        array = array[:, None]
    return np.broadcast_to(array, shape).reshape(-1)


def _distinct_values(value: Any, shape: tuple[int, ...]) -> tuple[list[Any], Ints]:
    """Return the distinct values of a column, and the place of each row's or position's value among them."""
    array = np.asarray(value, dtype=object if isinstance(value, (list, str)) else None)
    flat = _broadcast(array, shape)
    if flat.dtype == object:
        flat = flat.astype(str)
    distinct, inverse = np.unique(flat, return_inverse=True)
    entries = [NAN if entry != entry else entry for entry in distinct.tolist()]
    return entries, inverse.reshape(-1)


def _combination(code: int, entries: Sequence[list[Any]]) -> tuple[Any, ...]:
    """Return the values that a code stands for, one of each column."""
    values = []
    for column in reversed(entries):
        code, place = divmod(code, len(column))
        values.append(column[place])
    return tuple(reversed(values))


class _Integers:
    """Numbers for small whole numbers: token positions come by the million, and a dictionary would take longer than the sums."""

    def __init__(self) -> None:
        self._table = np.empty(0, dtype=np.int32)
        self._entries: list[Ints] = []
        self._count = 0
        self._without_row: int | None = None

    def __len__(self) -> int:
        return self._count

    def entries(self) -> pl.Series:
        """In the order of their numbers; null for the slots without a row."""
        entries = pl.Series(np.concatenate([np.empty(0, dtype=np.int64), *self._entries]), dtype=pl.Int64)
        if self._without_row is None:
            return entries
        return entries.set(pl.Series(np.arange(self._count) == self._without_row), None)

    def number_without_row(self) -> int:
        """The number of the slots without a row, which get one when they are first met."""
        if self._without_row is None:
            self._without_row = self._count
            self._entries.append(np.zeros(1, dtype=np.int64))
            self._count += 1
        return self._without_row

    @staticmethod
    def takes(value: Any) -> bool:
        """Whether all of a column's values are small whole numbers."""
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            return False
        return not value.size or (int(value.min()) >= 0 and int(value.max()) < SMALL)

    def number(self, value: np.ndarray[Any, Any], shape: tuple[int, ...]) -> Ints:
        flat = _broadcast(value, shape)
        largest = int(flat.max(initial=-1))
        if largest >= len(self._table):
            size = max(largest + 1, 2 * len(self._table))
            more = np.full(size - len(self._table), -1, dtype=np.int32)
            self._table = np.concatenate([self._table, more])
        unknown = flat[self._table[flat] < 0]
        if len(unknown):
            distinct, first = np.unique(unknown, return_index=True)
            new = distinct[np.argsort(first)].astype(np.int64)
            self._table[new] = np.arange(self._count, self._count + len(new))
            self._entries.append(new)
            self._count += len(new)
        numbers: Ints = self._table[flat].astype(np.int64).reshape(shape)
        return numbers
