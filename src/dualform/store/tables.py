"""The Parquet tables of a chunk: rows, updates and the scalars of each step."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from dualform.arrays import Array, Floats, Ints
from dualform.store.files import WritableFiles
from dualform.store.format import NO_ROW, Column, File, checksum
from dualform.store.labels import LABEL

if TYPE_CHECKING:
    from dualform.store.records import Rows, Step

Schema = dict[str, pl.DataType]

TYPES: Schema = {
    "Int64": pl.Int64(),
    "Float64": pl.Float64(),
    "String": pl.String(),
    "Boolean": pl.Boolean(),
}
"""What a user's column may hold, as Polars calls it, …"""
NUMPY_TYPES: dict[str, Any] = {
    "Int64": np.int64,
    "Float64": np.float64,
    "String": object,
    "Boolean": np.bool_,
}
"""… and as NumPy does."""
UPDATE_TYPES: Schema = {
    "step": pl.Int64(),
    "parameter": pl.Int64(),
    "optimizer": pl.String(),
    "factors": pl.List(pl.Float64()),
    "residual": pl.Float64(),
    "size": pl.Float64(),
    "after": pl.Float64(),
    "gradient_kept": pl.Boolean(),
}
"""The columns of the updates that are not settings of the optimizer."""


def row_types(columns: Sequence[Column]) -> Schema:
    """Return the Polars types of the row table, `step` first."""
    types: Schema = {"step": pl.Int64()}
    for column in columns:
        dtype = TYPES[column.type]
        if column.per == "position":
            dtype = pl.List(dtype)
        types[column.name] = dtype
    return types


def group_types(columns: Sequence[Column]) -> Schema:
    """Return the types of the columns' entries: a column per position has one group for each entry."""
    return {column.name: TYPES[column.type] for column in columns}


def row_series(rows: Ints) -> pl.Series:
    """Return the numbers of rows; null for NO_ROW."""
    numbers = pl.Series(rows, dtype=pl.Int64)
    has_no_row = rows == NO_ROW
    if not has_no_row.any():  # nearly always, and NumPy finds out in a tenth of the time
        return numbers
    return numbers.set(pl.Series(has_no_row), None)


def write_table(files: WritableFiles, name: str, table: pl.DataFrame, label: str) -> File:
    """Write and flush a table. label: see store/labels.py."""
    buffer = io.BytesIO()
    table.write_parquet(
        buffer,
        compression="zstd",
        statistics=False,
        metadata={LABEL: label},
    )
    data = buffer.getvalue()
    files.write(name, data)
    return File(len(data), checksum(data), table.height)


def rows_table(steps: Sequence[Step], columns: Sequence[Column]) -> pl.DataFrame:
    """Build one line for each row; the number of a row is its place, counted over all chunks."""
    batches: list[Rows] = []
    step_numbers: list[int] = []
    for step in steps:
        batches += step.rows
        for rows in step.rows:
            step_numbers += [step.number] * rows.count
    table: dict[str, Any] = {"step": step_numbers}
    for column in columns:
        if column.per == "row":
            table[column.name] = _row_values(column, batches)
        else:
            table[column.name] = _position_lists(column, batches)
    return pl.DataFrame(table, schema=row_types(columns))


def _row_values(column: Column, batches: Sequence[Rows]) -> Array:
    """Return a column with a value for each row. A scalar stands for all rows of its batch."""
    # Joined by NumPy: a series for each batch would hold up the training
    dtype = NUMPY_TYPES[column.type]
    pieces = [np.empty(0, dtype)]
    for rows in batches:
        values = np.asarray(rows.columns[column.name], dtype)
        pieces.append(np.broadcast_to(values, rows.count))
    return np.concatenate(pieces)


def _position_lists(column: Column, batches: Sequence[Rows]) -> pl.Series:
    """Return a column with a list for each row; batches may differ in their number of positions."""
    dtype = pl.List(TYPES[column.type])
    joined = pl.Series([], dtype=dtype)
    for rows in batches:
        values = np.asarray(rows.columns[column.name])
        joined.append(_lists(values, dtype))
    return joined


def _lists(values: Array, dtype: pl.List) -> pl.Series:
    """Return a list for each line of a table."""
    if values.dtype.kind == "O" or not values.size:
        return pl.Series(values.tolist(), dtype=dtype)
    # From one array: many times as fast as from lists of Python
    return pl.Series(values).cast(dtype)


def updates_table(steps: Sequence[Step]) -> pl.DataFrame:
    """Build one line for each (step, parameter) that was updated: the optimizer's settings, factors, residual."""
    columns: dict[str, list[Any]] = {name: [] for name in UPDATE_TYPES}
    settings: list[dict[str, float]] = []
    for step in steps:
        for update in step.updates:
            count = len(update.parameters)
            columns["step"] += [step.number] * count
            columns["parameter"] += update.parameters
            columns["optimizer"] += [update.optimizer] * count
            columns["factors"] += update.factors
            columns["residual"] += update.residuals
            columns["size"] += update.sizes
            columns["after"] += map(step.after.get, update.parameters)
            columns["gradient_kept"] += [gradient is not None for gradient in update.gradients]
            settings += update.settings
    factors = _factor_lists(columns.pop("factors"))
    table = pl.DataFrame({**columns, "factors": factors}, schema=UPDATE_TYPES)
    return table.with_columns(_float_columns(settings))


def _factor_lists(factors: Sequence[list[float]]) -> pl.Series:
    """Return a list for each update; all are of one length, unless updates differ in their number of backward passes."""
    dtype = pl.List(pl.Float64())
    lengths = set(map(len, factors))
    if len(lengths) > 1:
        return pl.Series(factors, dtype=dtype)
    return _lists(np.array(factors), dtype)


def steps_table(steps: Sequence[Step]) -> pl.DataFrame:
    """Build one line for each step, with what recorder.log() was given."""
    numbers = [step.number for step in steps]
    logs = [step.log for step in steps]
    table = pl.DataFrame({"step": numbers}, schema={"step": pl.Int64()})
    return table.with_columns(_float_columns(logs))


def _float_columns(lines: Sequence[dict[str, float]]) -> list[pl.Series]:
    """Return a column for each name in some lines, null where a line has no such name."""
    names: set[str] = set()
    for line in lines:
        names.update(line)
    columns = []
    for name in sorted(names):
        values = [line.get(name) for line in lines]
        columns.append(pl.Series(name, values, pl.Float64()))
    return columns


def settings_of(updates: pl.DataFrame) -> dict[str, Floats]:
    """Return the settings of some updates of one parameter, (updates,) each."""
    settings = {}
    for name in updates.columns:
        if name in UPDATE_TYPES:
            continue
        values = updates[name]
        if not values.null_count():
            settings[name] = values.to_numpy()
    return settings


def factor_table(lists: pl.Series) -> Floats:
    """Return the factors of some updates, (updates, backward passes), shorter lists filled up with zeros."""
    lengths = lists.list.len().to_numpy()
    backward_passes = int(lengths.max(initial=0))
    table = np.zeros((len(lists), backward_passes))
    for backward in range(backward_passes):
        factors = lists.list.get(backward, null_on_oob=True)
        table[:, backward] = factors.fill_null(0.0)
    return table
