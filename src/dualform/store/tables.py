"""The Parquet tables of a chunk: rows, updates and the scalars of each step."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from dualform.store.files import WritableFiles
from dualform.store.format import Column, File, checksum
from dualform.store.labels import LABEL

if TYPE_CHECKING:
    from dualform.store.records import ColumnValues, Rows, Step, Update

Floats = np.ndarray[Any, np.dtype[np.float64]]

TYPES: dict[str, pl.DataType] = {
    "Int64": pl.Int64(),
    "Float64": pl.Float64(),
    "String": pl.String(),
    "Boolean": pl.Boolean(),
}
"""What a user's column may hold."""
UPDATE_TYPES: dict[str, pl.DataType] = {
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


def row_types(columns: Sequence[Column]) -> dict[str, pl.DataType]:
    """Return the Polars types of the row table, `step` first."""
    types: dict[str, pl.DataType] = {"step": pl.Int64()}
    for column in columns:
        inner = TYPES[column.type]
        types[column.name] = inner if column.per == "row" else pl.List(inner)
    return types


def write_table(files: WritableFiles, name: str, table: pl.DataFrame, label: str) -> File:
    """Write and flush a table. label: see store/labels.py."""
    buffer = io.BytesIO()
    table.write_parquet(buffer, compression="zstd", statistics=False, metadata={LABEL: label})
    data = buffer.getvalue()
    files.write(name, data)
    return File(len(data), checksum(data), table.height)


def rows_table(steps: Sequence[Step], columns: Sequence[Column]) -> pl.DataFrame:
    """Build one line for each row; the number of a row is its place, counted over all chunks."""
    types = row_types(columns)
    batches = [rows for step in steps for rows in step.rows]
    counts = [rows.count for rows in batches]
    step_numbers = [step.number for step in steps for _ in step.rows]
    table = {"step": pl.Series("step", np.repeat(step_numbers, counts), types["step"])}
    for column in columns:
        table[column.name] = _column(column, batches)
    return pl.DataFrame(table, schema=types)


def _column(column: Column, batches: Sequence[Rows]) -> pl.Series:
    values = [rows.columns[column.name] for rows in batches]
    flat = [value for value in values if isinstance(value, np.ndarray) and value.ndim == 1]
    if len(flat) < len(values):
        return pl.concat([_batch_column(column, rows) for rows in batches])
    # Joined by NumPy: a series for each batch would hold up the training
    return pl.Series(column.name, np.concatenate(flat) if flat else [], row_types([column])[column.name])


def _batch_column(column: Column, rows: Rows) -> pl.Series:
    values: ColumnValues = rows.columns[column.name]
    inner = TYPES[column.type]
    if not isinstance(values, (np.ndarray, list)):
        return pl.repeat(values, rows.count, dtype=inner, eager=True).alias(column.name)
    if isinstance(values, list) or values.ndim == 1:
        return pl.Series(column.name, values, inner)
    if values.dtype.kind == "O" or not values.size:
        return pl.Series(column.name, values.tolist(), pl.List(inner))
    return pl.Series(column.name, values.reshape(-1), inner).reshape(values.shape).cast(pl.List(inner))


def updates_table(steps: Sequence[Step]) -> pl.DataFrame:
    """Build one line for each (step, parameter) that was updated: the optimizer's settings, factors, residual."""
    step_numbers: list[int] = []
    parameters: list[int] = []
    optimizers: list[str] = []
    after: list[float | None] = []
    kept: list[bool] = []
    updates: list[Update] = []
    for step in steps:
        for update in step.updates:
            count = len(update.parameters)
            step_numbers += [step.number] * count
            parameters += update.parameters
            optimizers += [update.optimizer] * count
            after += [step.after.get(number) for number in update.parameters]
            kept += [gradient is not None for gradient in update.gradients]
        updates += step.updates
    table = {
        "step": pl.Series(step_numbers, dtype=pl.Int64),
        "parameter": pl.Series(parameters, dtype=pl.Int64),
        "optimizer": pl.Series(optimizers, dtype=pl.String),
        "factors": _factor_lists([update.factors for update in updates]),
        "residual": pl.Series(np.concatenate([np.zeros(0), *[update.residuals for update in updates]])),
        "size": pl.Series(np.concatenate([np.zeros(0), *[update.sizes for update in updates]])),
        "after": pl.Series(after, dtype=pl.Float64),
        "gradient_kept": pl.Series(kept, dtype=pl.Boolean),
    }
    return pl.DataFrame({**table, **_settings_columns(updates)})


def _settings_columns(updates: Sequence[Update]) -> dict[str, pl.Series]:
    """Return a column for each setting of the optimizers; null where an optimizer has no such setting."""
    # Most updates share one list of settings from step to step: each list is looked through once
    distinct = {id(update.settings): update.settings for update in updates}
    names = {name for per_parameter in distinct.values() for settings in per_parameter for name in settings}
    columns = {}
    for name in sorted(names):
        values = {key: [settings.get(name) for settings in distinct[key]] for key in distinct}
        column = list(chain.from_iterable([values[id(update.settings)] for update in updates]))
        columns[name] = pl.Series(np.array(column) if None not in column else column, dtype=pl.Float64)
    return columns


def _factor_lists(tables: Sequence[Sequence[list[float]] | Floats]) -> pl.Series:
    """Return all lines of some tables, each a list."""
    lines = [line for table in tables for line in table]
    widths = {len(line) for line in lines}
    if len(widths) == 1 and widths != {0}:
        # One array, even where it is put together from lists: many times as fast as a series of lists
        return pl.Series(np.array(lines, dtype=np.float64)).cast(pl.List(pl.Float64))
    return pl.Series([list(line) for line in lines], dtype=pl.List(pl.Float64))


def steps_table(steps: Sequence[Step]) -> pl.DataFrame:
    """Build one line for each step, with what recorder.log() was given."""
    names = sorted({name for step in steps for name in step.log})
    table = {"step": pl.Series([step.number for step in steps], dtype=pl.Int64)}
    for name in names:
        table[name] = pl.Series([step.log.get(name) for step in steps], dtype=pl.Float64)
    return pl.DataFrame(table)


def settings_of(updates: pl.DataFrame) -> dict[str, Floats]:
    """Return the settings of some updates of one parameter, (updates,) each."""
    settings = {}
    for name in updates.columns:
        if name not in UPDATE_TYPES and updates[name].null_count() == 0:
            settings[name] = updates[name].to_numpy().astype(np.float64)
    return settings


def factor_table(lists: pl.Series) -> Floats:
    """Return the factors of some updates, (updates, backward passes), shorter lists filled up with zeros."""
    lengths = lists.list.len().to_numpy().astype(np.int64)
    table = np.zeros((len(lists), int(lengths.max()) if len(lists) else 0))
    rows = np.repeat(np.arange(len(lists)), lengths)
    starts = np.cumsum(lengths) - lengths
    places = np.arange(len(rows)) - np.repeat(starts, lengths)
    if len(rows):
        table[rows, places] = lists.explode().drop_nulls().to_numpy()
    return table
