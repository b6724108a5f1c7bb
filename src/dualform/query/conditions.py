"""Conditions on rows, steps and positions: which slots, rows or groups match a Polars expression or SQL text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from dualform.arrays import Bools
from dualform.errors import MaskError, NotRecordedError
from dualform.query.sql import parse_condition
from dualform.store.format import NO_ROW

if TYPE_CHECKING:
    from dualform.store.reader import Store
    from dualform.store.slots import SlotChunk

Where = pl.Expr | str
"""A condition as users give it: a Polars expression, or SQL text (sql.py lists what of SQL is understood)."""


TRIED = 1000
REPEATED = 16
"""To find out whether an expression compares lines, up to TRIED lines are evaluated, each REPEATED times."""


class Condition:
    """A condition on a recording up to step `end`. `condition(chunk)` returns which slots of a chunk match.

    A slot that serves all rows has a step and a position, and null in the user's columns. Null is no match, so that a condition on
    these columns does not select such a slot, nor does its opposite: `masked(only=)` removes it, `masked(drop=)` keeps it.
    """

    def __init__(self, store: Store, where: Where, end: int, *, name: str = "where"):
        """name: the argument that the condition was given as, for messages."""
        self._store = store
        self._end = end
        self._name = name
        self._expression = read_condition(where, name)
        self._is_text = isinstance(where, str)
        self.columns = set(self._expression.meta.root_names())
        _check_columns(self.columns, store, name)
        self._positional = self.columns & columns_per_position(store)
        self._by_layer: dict[str, Bools] = {}
        self._rows: Bools | None = None
        """(rows,): which rows match; None: the condition is on positions."""
        if not self.is_positional:
            rows = rows_before(store, end)
            self._rows = evaluate(self._expression, rows, name)

    @property
    def is_positional(self) -> bool:
        """Whether the positions of a row may give different results."""
        return "position" in self.columns or bool(self._positional)

    def __call__(self, chunk: SlotChunk) -> Bools:
        """Return which slots of a chunk match, (slots,)."""
        if self._rows is None:
            matches = self._of_layer(chunk.layer.name)
            return matches[chunk.first_slot : chunk.first_slot + chunk.slots]
        if chunk.shared is not None:
            return self._with_shared_slots(chunk, self._rows)
        first, end = chunk.row_range
        matches = self._rows[first:end]
        if not matches.any():  # most chunks, where few rows match
            return np.zeros(chunk.slots, np.bool_)
        if matches.all():
            return np.ones(chunk.slots, np.bool_)
        return self._rows[chunk.rows()]

    def _with_shared_slots(self, chunk: SlotChunk, row_matches: Bools) -> Bools:
        rows = chunk.rows()
        has_row = rows != NO_ROW
        matches = np.empty(chunk.slots, np.bool_)
        matches[has_row] = row_matches[rows[has_row]]
        matches[~has_row] = False
        if self._looks_at_one_row(rows_before(self._store, self._end)):
            shared = self._slot_table(chunk).filter(~has_row)
            matches[~has_row] = _evaluate_shared(self._expression, shared, self._name)
        return matches

    def _of_layer(self, layer: str) -> Bools:
        """Return which slots of a layer match, (slots,)."""
        if layer not in self._by_layer:
            self._by_layer[layer] = self._evaluate_layer(layer)
        return self._by_layer[layer]

    def _evaluate_layer(self, layer: str) -> Bools:
        if "position" in self.columns and self._store.is_summed(layer):
            raise NotRecordedError(f"{self._name}: {self._store.why_no_positions(layer)}")
        chunks = list(self._store.addresses(layer, end_step=self._end))
        tables = [self._slot_table(chunk) for chunk in chunks]
        table = pl.concat(tables) if tables else pl.DataFrame(schema={"position": pl.Int64})
        rows = [chunk.rows() for chunk in chunks]
        has_row = np.concatenate([np.zeros(0, np.int64), *rows]) != NO_ROW
        of_rows = table.filter(has_row)
        for column in self._positional:
            if of_rows[column].null_count():
                raise MaskError(
                    f"{self._name}: the column {column!r} has an entry for each position, but layer {layer!r} has "
                    f"another number of positions. Ask a layer with the same positions, or use columns per row."
                )
        matches = np.empty(len(has_row), np.bool_)
        matches[has_row] = evaluate(self._expression, of_rows, self._name)
        matches[~has_row] = False
        if self._looks_at_one_row(table):
            shared = table.filter(~has_row)
            matches[~has_row] = _evaluate_shared(self._expression, shared, self._name)
        return matches

    def _looks_at_one_row(self, table: pl.DataFrame) -> bool:
        """Return whether the condition looks at each row alone. One that compares rows has no meaning for slots that serve all rows."""
        return self._is_text or _decides_alone(self._expression, table)

    def _slot_table(self, chunk: SlotChunk) -> pl.DataFrame:
        columns = self.columns - {"position"}
        return self._store.slot_table(chunk, sorted(columns))


def slot_columns(store: Store) -> list[str]:
    """Return the columns that conditions and groups may use: step, position and those given to batch()."""
    return ["step", "position", *(column.name for column in store.manifest.columns)]


def columns_per_position(store: Store) -> set[str]:
    """Return the columns that have an entry for each position of a row."""
    return {column.name for column in store.manifest.columns if column.per == "position"}


def rows_before(store: Store, end: int) -> pl.DataFrame:
    """Return the row table up to step `end`."""
    if end >= store.end_step:
        return store.rows
    return store.rows.filter(pl.col("step") < end)


def matching_groups(where: Where, groups: pl.DataFrame, rows: pl.DataFrame | None, name: str) -> Bools | None:
    """Return which groups match a condition on their columns, (groups,); None if rows of one group may give different results.

    rows: the row table; None if only totals were kept. SQL text looks at one row at a time. A Polars expression may compare rows (a mean over
    rows is not a mean over groups), and does not say whether it does, so it is evaluated over the rows of each group.
    """
    expression = read_condition(where, name)
    if isinstance(where, str) or (rows is None and _decides_alone(expression, groups)):
        all_null = pl.all_horizontal(pl.all().is_null())
        is_shared = groups.select(all_null).to_series().to_numpy()
        matches = np.empty(groups.height, np.bool_)
        matches[~is_shared] = evaluate(expression, groups.filter(~is_shared), name)
        matches[is_shared] = _evaluate_shared(expression, groups.filter(is_shared), name)
        return matches
    if rows is None:
        return None
    return _matches_of_rows(expression, groups, rows, name)


def _matches_of_rows(expression: pl.Expr, groups: pl.DataFrame, rows: pl.DataFrame, name: str) -> Bools | None:
    """Return which groups match if all of their rows do; None if rows of one group differ."""
    columns = groups.columns
    if any(isinstance(rows.schema[column], pl.List) for column in columns):  # an entry for each position
        return None
    matches = pl.Series("matches", evaluate(expression, rows, name))
    by_group = pl.DataFrame([*rows.select(columns), matches]).unique()
    if by_group.height > by_group.select(columns).n_unique():
        return None
    joined = groups.join(by_group, on=columns, how="left", nulls_equal=True, maintain_order="left")
    by_line = joined["matches"]
    has_no_row = by_line.is_null().to_numpy()
    result = by_line.fill_null(False).to_numpy().copy()
    if has_no_row.any() and _decides_alone(expression, rows):
        result[has_no_row] = _evaluate_shared(expression, groups.filter(has_no_row), name)
    return result


def _decides_alone(expression: pl.Expr, table: pl.DataFrame) -> bool:
    """Return whether each line of a table gets the same result alone as among other and repeated lines.

    Polars does not say whether an expression compares lines, so it is tried.
    """
    if not table.height or not expression.meta.root_names():
        return True
    columns = sorted(set(expression.meta.root_names()))
    distinct = table.select(columns).unique(maintain_order=True)
    lines = distinct.head(TRIED).with_row_index(" line")
    repeated = pl.concat([lines, lines.reverse()] * REPEATED)
    try:
        together = repeated.select(" line", result=expression)
        alone = lines.select(" line", expected=expression.over(" line"))
    except pl.exceptions.PolarsError:
        return False
    if together.height != repeated.height:
        return False
    both = together.join(alone, on=" line", how="left", maintain_order="left")
    return both["result"].eq_missing(both["expected"]).all()


def evaluate(expression: pl.Expr, table: pl.DataFrame, name: str) -> Bools:
    """Return the lines of a table that match, (lines,)."""
    result = _evaluated(expression, table, name)
    if result.null_count():
        raise MaskError(
            f"{name}: {expression} is null for {result.null_count()} rows. Say what null means, e.g. with "
            f".fill_null(False), or in SQL with AND … IS NOT NULL."
        )
    return result.to_numpy()


def _evaluate_shared(expression: pl.Expr, table: pl.DataFrame, name: str) -> Bools:
    """Return which slots that serve all rows match, (lines,). Null is no match."""
    result = _evaluated(expression, table, name)
    return result.fill_null(False).to_numpy()


def _evaluated(expression: pl.Expr, table: pl.DataFrame, name: str) -> pl.Series:
    """Return true, false or null for each line of a table."""
    try:
        result = table.select(expression.alias("mask"))["mask"]
    except pl.exceptions.PolarsError as error:
        raise MaskError(f"{name}: {expression} cannot be evaluated over the rows: {error}.") from None
    if result.dtype != pl.Boolean:
        raise MaskError(
            f'{name}: {expression} gives {result.dtype}, expected true or false for each row, e.g. pl.col("label") == 7.'
        )
    if len(result) == 1 and not expression.meta.root_names():  # a constant: true or false for all
        result = result.new_from_index(0, table.height)
    if len(result) != table.height:
        raise MaskError(f"{name}: {expression} gives {len(result)} values for {table.height} rows.")
    return result


def read_condition(where: Where, name: str) -> pl.Expr:
    """Return a condition as a Polars expression; text is parsed as SQL."""
    if isinstance(where, pl.Expr):
        return where
    if not isinstance(where, str):
        raise MaskError(
            f'{name}: got {type(where).__name__}, expected a Polars expression, e.g. pl.col("label") == 7, '
            f'or SQL, e.g. "label = 7".'
        )
    return parse_condition(where, name)


def condition_columns(where: Where, store: Store, name: str) -> set[str]:
    """Return the columns that a condition mentions, all of which exist."""
    columns = set(read_condition(where, name).meta.root_names())
    _check_columns(columns, store, name)
    return columns


def _check_columns(columns: set[str], store: Store, name: str) -> None:
    allowed = slot_columns(store)
    unknown = columns.difference(allowed)
    if unknown:
        raise MaskError(
            f"{name}: there is no column {', '.join(map(repr, sorted(unknown)))}. Columns: {', '.join(allowed)}."
        )
