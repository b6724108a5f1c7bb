"""The Parquet tables of a chunk: rows, updates and the scalars of each step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import polars as pl

from dualform.store.format import Column
from dualform.store.records import ColumnValues, Rows, Step
from dualform.store.schema import TYPES, UPDATE_TYPES, schema

Floats = np.ndarray[Any, np.dtype[np.float64]]


def rows_table(steps: Sequence[Step], columns: Sequence[Column]) -> pl.DataFrame:
    """One line for each row; the number of a row is its place, counted over all chunks."""
    groups = [(step.number, rows) for step in steps for rows in step.rows]
    types = schema(columns)
    table: dict[str, pl.Series] = {
        "step": pl.Series("step", np.repeat([n for n, _ in groups], [r.count for _, r in groups]), types["step"])
    }
    for column in columns:
        table[column.name] = _column(column, [rows for _, rows in groups])
    return pl.DataFrame(table, schema=types)


def _column(column: Column, groups: Sequence[Rows]) -> pl.Series:
    values = [rows.columns[column.name] for rows in groups]
    flat = [value for value in values if isinstance(value, np.ndarray) and value.ndim == 1]
    if len(flat) == len(values):  # joined by NumPy: a series for each batch would hold up the training
        return pl.Series(column.name, np.concatenate(flat) if flat else [], schema([column])[column.name])
    return pl.concat([_piece(column, rows) for rows in groups])


def _piece(column: Column, rows: Rows) -> pl.Series:
    values: ColumnValues = rows.columns[column.name]
    inner = TYPES[column.type]
    if isinstance(values, np.ndarray) and values.ndim == 2:
        lists = [row.tolist() for row in values] if values.dtype.kind == "O" or not values.size else None
        if lists is not None:
            return pl.Series(column.name, lists, pl.List(inner))
        return pl.Series(column.name, values.reshape(-1), inner).reshape(values.shape).cast(pl.List(inner))
    if isinstance(values, (np.ndarray, list)):
        return pl.Series(column.name, values, inner)
    return pl.repeat(values, rows.count, dtype=inner, eager=True).alias(column.name)


def updates_table(steps: Sequence[Step]) -> pl.DataFrame:
    """One line for each (step, parameter) that was updated: the optimizer's settings, factors, residual."""
    updates = [update for step in steps for update in step.updates]
    kept = [gradient is not None for update in updates for gradient in update.gradients]
    table = {
        "step": pl.Series([s.number for s in steps for u in s.updates for _ in u.parameters], dtype=pl.Int64),
        "parameter": pl.Series(list(chain.from_iterable([u.parameters for u in updates])), dtype=pl.Int64),
        "optimizer": pl.Series([u.optimizer for u in updates for _ in u.parameters], dtype=pl.String),
        "factors": _lists([u.factors for u in updates]),
        "residual": pl.Series(np.concatenate([np.zeros(0), *[u.residuals for u in updates]]), dtype=pl.Float64),
        "size": pl.Series(np.concatenate([np.zeros(0), *[u.sizes for u in updates]]), dtype=pl.Float64),
        "after": pl.Series([s.after.get(n) for s in steps for u in s.updates for n in u.parameters], dtype=pl.Float64),
        "gradient_kept": pl.Series(kept, dtype=pl.Boolean),
    }
    alike = {id(update.settings): update.settings for update in updates}  # most of them are the same from step to step
    for name in sorted({name for settings in alike.values() for one in settings for name in one}):
        values = {known: [one.get(name) for one in settings] for known, settings in alike.items()}
        column = list(chain.from_iterable([values[id(update.settings)] for update in updates]))
        table[name] = pl.Series(np.array(column) if None not in column else column, dtype=pl.Float64)
    return pl.DataFrame(table)


def _lists(tables: Sequence[Sequence[list[float]] | Floats]) -> pl.Series:
    """All lines of some tables, each a list."""
    arrays = [one for one in tables if isinstance(one, np.ndarray)]
    if arrays and len(arrays) == len(tables) and len({one.shape[1] for one in arrays}) == 1:  # the ordinary case
        return pl.Series(np.concatenate(arrays)).cast(pl.List(pl.Float64))
    lists = [list(line) for one in tables for line in one]
    if len({len(one) for one in lists}) == 1 and lists[0]:  # many times as fast as a series of lists
        return pl.Series(np.array(lists, dtype=np.float64)).cast(pl.List(pl.Float64))
    return pl.Series(lists, dtype=pl.List(pl.Float64))


def steps_table(steps: Sequence[Step]) -> pl.DataFrame:
    """One line for each step, with what recorder.log() was given."""
    names = sorted({name for step in steps for name in step.log})
    table = {"step": pl.Series([step.number for step in steps], dtype=pl.Int64)}
    for name in names:
        table[name] = pl.Series([step.log.get(name) for step in steps], dtype=pl.Float64)
    return pl.DataFrame(table)


def settings_of(updates: pl.DataFrame) -> dict[str, Floats]:
    """The settings of some updates of one parameter, (updates,) each."""
    columns = [name for name in updates.columns if name not in UPDATE_TYPES and updates[name].null_count() == 0]
    return {name: updates[name].to_numpy().astype(np.float64) for name in columns}


def factor_table(lists: pl.Series) -> Floats:
    """(updates, backward passes)."""
    lengths = lists.list.len().to_numpy().astype(np.int64)
    table = np.zeros((len(lists), int(lengths.max()) if len(lists) else 0))
    rows = np.repeat(np.arange(len(lists)), lengths)
    places = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if len(rows):
        table[rows, places] = lists.explode().drop_nulls().to_numpy()
    return table
