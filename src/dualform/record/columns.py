"""What recorder.batch() is given: columns, converted to four types and copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dualform.errors import BatchError
from dualform.store.format import Column
from dualform.store.records import ColumnValues

RESERVED = (
    "query", "position", "rank", "weight", "contribution", "slot", "step", "backward", "call", "row",
    "slot_position", "visits", "total", "group", "influence",
)  # fmt: skip
KINDS = {"b": "Boolean", "i": "Int64", "u": "Int64", "f": "Float64", "U": "String", "T": "String"}
"""The type of a column by the kind of NumPy's array."""
ARRAYS: dict[str, type[np.generic]] = {"Boolean": np.bool_, "Int64": np.int64, "Float64": np.float64}
"""NumPy's types of columns that are arrays of numbers."""
SCALARS = {bool: "Boolean", int: "Int64", float: "Float64"}


@dataclass(eq=False, slots=True)
class Batch:
    """One batch() call: how many rows, and their columns."""

    serial: int
    rows: int
    values: dict[str, ColumnValues]
    columns: tuple[Column, ...]
    step: int = 0
    """The number of the step that it will be a part of."""
    uses: int = 0
    """How many forward passes with gradients have begun since."""
    is_used: bool = False
    """Whether a recorded module has been called since, with gradients or without."""


def read_batch(serial: int, columns: dict[str, Any], expected: tuple[Column, ...] | None) -> Batch:
    """Check and copy the columns of a batch() call. expected: those of earlier calls, if there were any."""
    if not columns:
        raise BatchError("batch() got no columns. Give at least one entry per row, e.g. batch(sample_id=ids).")
    for name in columns:
        if name in RESERVED:
            raise BatchError(f"batch(): the name {name!r} is taken by dualform. Taken names: {', '.join(RESERVED)}.")
    values: dict[str, ColumnValues] = {}
    for name, given in columns.items():
        is_empty = isinstance(given, (list, tuple)) and not given
        values[name] = _empty(name, expected) if is_empty else _convert(name, given)
    rows = _count_rows(values)
    described = tuple(_described(name, value) for name, value in values.items())
    if expected is not None:
        _refuse_other_columns(described, expected)
    return Batch(serial, rows, values, described)


def _count_rows(values: dict[str, ColumnValues]) -> int:
    lengths = {}
    for name, value in values.items():
        if isinstance(value, (np.ndarray, list)):
            lengths[name] = len(value)
    if not lengths:
        raise BatchError(
            f"batch({', '.join(values)}) got only scalars, so the number of rows is unknown. Give at least one "
            f"column with an entry per row, e.g. sample_id=ids."
        )
    counts = set(lengths.values())
    if len(counts) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise BatchError(f"batch(): columns differ in their number of rows: {listed}.")
    return counts.pop()


def _described(name: str, value: ColumnValues) -> Column:
    if isinstance(value, np.ndarray):
        per = "position" if value.ndim == 2 else "row"
        return Column(name, KINDS.get(value.dtype.kind, "String"), per)
    if isinstance(value, (list, str)):
        return Column(name, "String", "row")
    return Column(name, SCALARS[type(value)], "row")


def _refuse_other_columns(described: tuple[Column, ...], expected: tuple[Column, ...]) -> None:
    """Refuse columns of other names or types than those of earlier calls. The order may be another one."""
    if described == expected:
        return
    before = {column.name: column for column in expected}
    now = {column.name: column for column in described}
    if set(before) != set(now):
        raise BatchError(
            f"batch() got the columns {sorted(now)}, but the first call had {sorted(before)}. Give the same columns "
            f"each time (a scalar stands for all rows)."
        )
    for name, column in now.items():
        earlier = before[name]
        if column != earlier:
            raise BatchError(
                f"batch(): column {name!r} was {earlier.type} per {earlier.per} and is now {column.type} "
                f"per {column.per}. Keep one type for each column."
            )


def _empty(name: str, expected: tuple[Column, ...] | None) -> ColumnValues:
    """An empty list has the type that the column had before."""
    types = {column.name: column.type for column in expected or ()}
    if name not in types:
        raise BatchError(f"batch(): column {name!r} is an empty list, so its type is unknown. Give an array or tensor.")
    if types[name] == "String":
        return []
    return np.empty(0, dtype=ARRAYS[types[name]])


def _convert(name: str, given: Any) -> ColumnValues:
    """A copy of a column: an array of numbers, strings (for a column per position, in an array), or a scalar."""
    values = _without_frameworks(given)
    if isinstance(values, (str, bool, int, float)):
        return _scalar(name, values)
    array = _array(name, values)
    if array.ndim == 0:
        return _scalar(name, array.item())
    if array.ndim > 2:
        raise BatchError(f"batch(): column {name!r} has shape {array.shape}; expected (rows,) or (rows, positions).")
    type_ = KINDS[array.dtype.kind]
    if type_ == "String":
        return array.tolist() if array.ndim == 1 else array.astype(object)
    largest = array.max(initial=0) if array.dtype.kind == "u" else 0
    if largest > np.iinfo(np.int64).max:
        raise BatchError(f"batch(): column {name!r} has integers above 2⁶³ − 1; give them as strings.")
    return np.array(array, dtype=ARRAYS[type_])


def _without_frameworks(given: Any) -> Any:
    """Tensors and series as NumPy arrays, and NumPy's scalars as Python's."""
    if isinstance(given, np.generic):
        return given.item()
    if isinstance(given, torch.Tensor):
        tensor = given.double() if given.is_floating_point() else given
        return tensor.detach().cpu().numpy()
    if hasattr(given, "to_numpy"):  # Polars and pandas series
        return given.to_numpy()
    return given


def _array(name: str, values: Any) -> np.ndarray[Any, Any]:
    """An array of one of the types that columns can have."""
    try:
        array: np.ndarray[Any, Any] = np.asarray(values)
    except ValueError as error:
        raise BatchError(f"batch(): column {name!r} has entries of different lengths ({error}).") from None
    if array.dtype.kind == "O":
        array = _strings(name, array)
    if array.dtype.kind not in KINDS:
        raise BatchError(
            f"batch(): column {name!r} has type {array.dtype}; expected integers, floats, strings or booleans."
        )
    return array


def _strings(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    types = {type(entry) for entry in array.reshape(-1).tolist()}
    if types <= {str}:
        return array.astype(str)
    if type(None) in types:
        raise BatchError(f"batch(): column {name!r} has None in it. Every row needs an entry.")
    names = sorted(entry.__name__ for entry in types)
    raise BatchError(
        f"batch(): column {name!r} mixes {', '.join(names)}; expected integers, floats, "
        f"strings or booleans, one type per column."
    )


def _scalar(name: str, value: str | bool | int | float) -> ColumnValues:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise BatchError(f"batch(): column {name!r} has an integer beyond 64 bits; give it as a string.")
    return value
