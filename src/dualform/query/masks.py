"""Conditions on rows, steps and positions: a Polars expression, evaluated once, becomes a bitmap."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from dualform.errors import MaskError
from dualform.query.conditions import parse_condition
from dualform.store.format import NO_ROW

if TYPE_CHECKING:
    from dualform.store.reader import Store
    from dualform.store.slots import SlotChunk

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class Mask:
    """Which slots match a condition. `mask(chunk)` gives (slots,) booleans.

    A slot that serves all rows has a step and a position, and null in the user's columns. Null is no match, so a condition on the
    user's columns does not select such a slot, nor does its opposite: a mask with keep= leaves it out, one with drop= leaves it in.
    """

    def __init__(self, store: Store, where: pl.Expr | str, end: int, *, name: str = "where"):
        self._store, self._end, self._name = store, end, name
        self._where = read_condition(where, name)
        self._columns = _columns_used(self._where, store, name)
        positional = {c.name for c in store.manifest.columns if c.per == "position"}
        self._per_position = bool(({"position"} | positional) & self._columns)
        self._positional = positional & self._columns
        self._rows: Bools | None = None
        self._slots: dict[str, Bools] = {}
        if not self._per_position:
            table = store.rows.filter(pl.col("step") < end)
            self._rows = evaluate(self._where, table, name)

    def __call__(self, chunk: SlotChunk) -> Bools:
        """(slots,): which slots of a chunk match."""
        if self._rows is None:
            found = self._of_layer(chunk.layer.name)
            return found[chunk.first_slot : chunk.first_slot + chunk.slots]
        if chunk.shared is not None:
            return self._with_shared(chunk, self._rows)
        here = self._rows[slice(*chunk.row_range)]
        if not here.any() or here.all():  # most chunks, where few are asked for
            return np.full(chunk.slots, bool(here.any()))
        return self._rows[chunk.rows()]

    def _with_shared(self, chunk: SlotChunk, by_row: Bools) -> Bools:
        """(slots,) of a chunk in which some slots have no row."""
        rows = chunk.rows()
        known = rows != NO_ROW
        found = np.empty(chunk.slots, np.bool_)
        found[known] = by_row[rows[known]]
        found[~known] = evaluate_shared(self._where, self._slot_table(chunk).filter(~known), self._name)
        return found

    def _of_layer(self, layer: str) -> Bools:
        """(slots,), evaluated over the slots of a layer."""
        if layer not in self._slots:
            chunks = list(self._store.addresses(layer, end_step=self._end))
            pieces = [self._slot_table(chunk) for chunk in chunks]
            table = pl.concat(pieces) if pieces else pl.DataFrame(schema={"position": pl.Int64})
            known = np.concatenate([np.zeros(0, np.bool_), *(chunk.rows() != NO_ROW for chunk in chunks)])
            of_rows = table.filter(known)
            for column in self._positional:
                if of_rows[column].null_count():
                    raise MaskError(
                        f"{self._name}: the column {column!r} has an entry for each position, but layer {layer!r} has "
                        f"another number of positions. Ask a layer with the same positions, or use columns per row."
                    )
            found = np.empty(len(known), np.bool_)
            found[known] = evaluate(self._where, of_rows, self._name)
            found[~known] = evaluate_shared(self._where, table.filter(~known), self._name)
            self._slots[layer] = found
        return self._slots[layer]

    def _slot_table(self, chunk: SlotChunk) -> pl.DataFrame:
        return self._store.slot_table(chunk, sorted(self._columns - {"position"}))


def evaluate(where: pl.Expr, table: pl.DataFrame, name: str) -> Bools:
    """A condition over a table: true or false for each of its lines."""
    result = _result(where, table, name)
    if result.null_count():
        raise MaskError(
            f"{name}: {where} is null for {result.null_count()} rows. Say what null means, e.g. with "
            f".fill_null(False), or in SQL with AND … IS NOT NULL."
        )
    return result.to_numpy()


def evaluate_shared(where: pl.Expr, table: pl.DataFrame, name: str) -> Bools:
    """A condition over slots that serve all rows, a line each: null is no match, and they do not match what compares rows."""
    if not table.height or not _is_of_one_row(where):
        return np.zeros(table.height, np.bool_)
    return _result(where, table, name).fill_null(False).to_numpy()


def _result(where: pl.Expr, table: pl.DataFrame, name: str) -> pl.Series:
    """A condition over a table, as Polars gives it: true, false or null for each of its lines."""
    try:
        result = table.select(where.alias("mask"))["mask"]
    except pl.exceptions.PolarsError as error:
        raise MaskError(f"{name}: {where} cannot be evaluated over the rows: {error}.") from None
    if result.dtype != pl.Boolean:
        raise MaskError(
            f'{name}: {where} gives {result.dtype}, expected true or false for each row, e.g. pl.col("label") == 7.'
        )
    if len(result) == 1 and not where.meta.root_names():  # a constant: true or false for all
        result = result.new_from_index(0, table.height)
    if len(result) != table.height:
        raise MaskError(f"{name}: {where} gives {len(result)} values for {table.height} rows.")
    return result


def read_condition(where: pl.Expr | str, name: str) -> pl.Expr:
    """A Polars expression as it is; text is SQL (conditions.py says what of it)."""
    if isinstance(where, pl.Expr):
        return where
    if not isinstance(where, str):
        raise MaskError(
            f'{name}: got {type(where).__name__}, expected a Polars expression, e.g. pl.col("label") == 7, '
            f'or SQL, e.g. "label = 7".'
        )
    return parse_condition(where, name)


def condition_columns(where: pl.Expr | str, store: Store, name: str) -> set[str]:
    """The columns that a condition speaks of."""
    return _columns_used(read_condition(where, name), store, name)


def over_groups(where: pl.Expr | str, groups: pl.DataFrame, name: str) -> Bools | None:
    """A condition on the columns of groups, for each group; None if it compares rows with each other.

    A mean over rows is no mean over groups, so only expressions that are known to look at one row are taken.
    """
    condition = read_condition(where, name)
    if not _is_of_one_row(condition):
        return None
    shared = groups.select(pl.all_horizontal(pl.all().is_null())).to_series().to_numpy()
    found = np.empty(groups.height, np.bool_)
    found[~shared] = evaluate(condition, groups.filter(~shared), name)
    found[shared] = evaluate_shared(condition, groups.filter(shared), name)
    return found


def _is_of_one_row(condition: pl.Expr) -> bool:
    """Whether the answer for a row depends on that row alone, as far as can be told."""
    try:
        return _looks_at_one_row(json.loads(condition.meta.serialize(format="json")))
    except RecursionError:  # too deep to be sure
        return False


ONE_ROW = {
    "Not", "IsIn", "IsBetween", "IsNull", "IsNotNull", "IsNan", "IsNotNan", "IsFinite", "IsInfinite",
    "StartsWith", "EndsWith", "Contains", "Abs", "Negate", "FillNull",
}  # fmt: skip
"""Functions, as Polars names them, whose answer for a row depends on that row alone."""


def _looks_at_one_row(node: Any) -> bool:
    """Whether an expression, as Polars writes it down, compares no rows with each other."""
    if not isinstance(node, dict) or len(node) != 1:
        return False
    [(kind, body)] = node.items()
    if kind in ("Column", "Literal"):
        return True
    if kind == "BinaryExpr":
        return _looks_at_one_row(body["left"]) and _looks_at_one_row(body["right"])
    if kind == "Ternary":
        return all(_looks_at_one_row(body[part]) for part in ("predicate", "truthy", "falsy"))
    if kind == "Function":
        names = list(body["function"].values()) if isinstance(body["function"], dict) else [body["function"]]
        known = all((name if isinstance(name, str) else next(iter(name), "")) in ONE_ROW for name in names)
        return known and all(_looks_at_one_row(part) for part in body["input"])
    return False


def _columns_used(where: pl.Expr, store: Store, name: str) -> set[str]:
    used = set(where.meta.root_names())
    known = ["step", "position", *(c.name for c in store.manifest.columns)]
    unknown = used - set(known)
    if unknown:
        raise MaskError(
            f"{name}: there is no column {', '.join(map(repr, sorted(unknown)))}. Columns: {', '.join(known)}."
        )
    return used
