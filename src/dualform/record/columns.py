"""What recorder.batch() is given: any columns, brought to four types, copied."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
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
    """Check and copy the columns of a batch() call."""
    ordinary = None if expected is None else _like_the_last(serial, columns, expected)
    if ordinary is not None:
        return ordinary
    if not columns:
        raise BatchError("batch() got no columns. Give at least one entry per row, e.g. batch(sample_id=ids).")
    for name in columns:
        if name in RESERVED:
            raise BatchError(f"batch(): the name {name!r} is taken by dualform. Taken names: {', '.join(RESERVED)}.")
    values, described, lengths = {}, [], {}
    for name, given in columns.items():
        value = _empty(name, expected) if isinstance(given, (list, tuple)) and not given else _convert(name, given)
        values[name] = value
        if isinstance(value, (np.ndarray, list)):
            lengths[name] = len(value)
        described.append(_column(name, _type(name, value), isinstance(value, np.ndarray) and value.ndim == 2))
    if not lengths:
        raise BatchError(
            f"batch({', '.join(columns)}) got only scalars, so the number of rows is unknown. Give at least one "
            f"column with an entry per row, e.g. sample_id=ids."
        )
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {n}" for name, n in lengths.items())
        raise BatchError(f"batch(): columns differ in their number of rows: {said}.")
    found = tuple(described)
    if found != expected:
        _same_columns(found, expected)
    return Batch(serial, next(iter(lengths.values())), values, found)


def _like_the_last(serial: int, columns: dict[str, Any], expected: tuple[Column, ...]) -> Batch | None:
    """A batch of whole numbers in tensors and of words, the ordinary case; None: it is to be looked at more closely."""
    values: dict[str, ColumnValues] = {}
    rows = None
    for column in expected:
        given = columns.get(column.name)
        if column.per != "row":
            return None
        if type(given) is torch.Tensor and given.dtype is torch.int64 and given.dim() == 1 and given.is_cpu:
            if column.type != "Int64" or rows not in (None, given.size(0)):
                return None
            rows = given.size(0)  # len() of a tensor is a function in Python
            values[column.name] = given.numpy().copy()
        elif type(given) is str and column.type == "String":
            values[column.name] = given
        else:
            return None
    return None if rows is None or len(columns) > len(values) else Batch(serial, rows, values, expected)


@lru_cache(maxsize=256)  # the same for every batch
def _column(name: str, kind: str, per_position: bool) -> Column:
    return Column(name, kind, "position" if per_position else "row")


def _empty(name: str, expected: tuple[Column, ...] | None) -> ColumnValues:
    """An empty list has the type that the column had before."""
    types = {column.name: column.type for column in expected or ()}
    if name not in types:
        raise BatchError(f"batch(): column {name!r} is an empty list, so its type is unknown. Give an array or tensor.")
    kinds: dict[str, Any] = {"Int64": np.int64, "Float64": np.float64, "Boolean": np.bool_}
    return [] if types[name] == "String" else np.empty(0, dtype=kinds[types[name]])


def _same_columns(described: tuple[Column, ...], expected: tuple[Column, ...] | None) -> None:
    if expected is None:
        return
    before, now = {c.name: c for c in expected}, {c.name: c for c in described}
    if set(before) != set(now):
        raise BatchError(
            f"batch() got the columns {sorted(now)}, but the first call had {sorted(before)}. Give the same columns "
            f"each time (a scalar stands for all rows)."
        )
    for name, column in now.items():
        if (column.type, column.per) != (before[name].type, before[name].per):
            raise BatchError(
                f"batch(): column {name!r} was {before[name].type} per {before[name].per} and is now {column.type} "
                f"per {column.per}. Keep one type for each column."
            )


def _convert(name: str, given: Any) -> ColumnValues:
    if isinstance(given, np.generic):
        given = given.item()
    if isinstance(given, torch.Tensor):
        if given.is_floating_point():
            given = given.double()
        given = given.detach().cpu().numpy()
    elif hasattr(given, "to_numpy"):  # Polars and pandas series
        given = given.to_numpy()
    if isinstance(given, (str, bool, int, float)):
        return _scalar(name, given)
    try:
        array: np.ndarray[Any, Any] = np.asarray(given)
    except ValueError as error:
        raise BatchError(f"batch(): column {name!r} has entries of different lengths ({error}).") from None
    if array.dtype.kind == "O":
        array = _strings(name, array)
    if array.dtype.kind not in KINDS:
        raise BatchError(
            f"batch(): column {name!r} has type {array.dtype}; expected integers, floats, strings or booleans."
        )
    if array.ndim == 0:
        return _scalar(name, array.item())
    if array.ndim > 2:
        raise BatchError(f"batch(): column {name!r} has shape {array.shape}; expected (rows,) or (rows, positions).")
    if array.dtype.kind in "UT":
        return array.tolist() if array.ndim == 1 else array.astype(object)
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise BatchError(f"batch(): column {name!r} has integers above 2⁶³ − 1; give them as strings.")
    wide = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}[array.dtype.kind]
    return np.array(array, dtype=wide)


def _strings(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    kinds = {type(item) for item in array.reshape(-1).tolist()}
    if kinds <= {str}:
        return array.astype(str)
    if type(None) in kinds:
        raise BatchError(f"batch(): column {name!r} has None in it. Every row needs an entry.")
    raise BatchError(
        f"batch(): column {name!r} mixes {', '.join(sorted(k.__name__ for k in kinds))}; expected integers, floats, "
        f"strings or booleans, one type a column."
    )


def _scalar(name: str, value: str | bool | int | float) -> ColumnValues:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise BatchError(f"batch(): column {name!r} has an integer beyond 64 bits; give it as a string.")
    return value


def _type(name: str, value: ColumnValues) -> str:
    if isinstance(value, np.ndarray):
        return "String" if value.dtype.kind == "O" else KINDS[value.dtype.kind]
    if isinstance(value, (list, str)):
        return "String"
    return {bool: "Boolean", int: "Int64", float: "Float64"}[type(value)]
