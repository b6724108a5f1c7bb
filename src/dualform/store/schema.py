"""The columns of a store's tables and their types."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from dualform.store.format import Column

TYPES: dict[str, pl.DataType] = {
    "Int64": pl.Int64(),
    "Float64": pl.Float64(),
    "String": pl.String(),
    "Boolean": pl.Boolean(),
}
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
"""The columns of the updates that are no settings."""


def schema(columns: Sequence[Column]) -> dict[str, pl.DataType]:
    """The Polars types of the row table, `step` first."""
    types: dict[str, pl.DataType] = {"step": pl.Int64()}
    for column in columns:
        inner = TYPES[column.type]
        types[column.name] = inner if column.per == "row" else pl.List(inner)
    return types
