"""Conditions on rows, steps and positions: a Polars expression, evaluated once, becomes a bitmap."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from dualform.errors import MaskError

if TYPE_CHECKING:
    from dualform.store.reader import Store
    from dualform.store.slots import SlotChunk

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class Mask:
    """Which slots take part. `mask(chunk)` gives (slots,) booleans."""

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
        """(slots,): which slots of a chunk take part."""
        if self._rows is not None:
            here = self._rows[slice(*chunk.row_range)]
            if not here.any() or here.all():  # most chunks, where few are asked for
                return np.full(chunk.slots, bool(here.any()))
            return self._rows[chunk.rows()]
        found = self._of_layer(chunk.layer.name)
        return found[chunk.first_slot : chunk.first_slot + chunk.slots]

    def _of_layer(self, layer: str) -> Bools:
        if layer not in self._slots:
            pieces = [
                self._store.slot_table(chunk, sorted(self._columns - {"position"}))
                for chunk in self._store.addresses(layer, end_step=self._end)
            ]
            table = pl.concat(pieces) if pieces else pl.DataFrame(schema={"position": pl.Int64})
            for column in self._positional:
                if table[column].null_count():
                    raise MaskError(
                        f"{self._name}: the column {column!r} has an entry for each position, but layer {layer!r} has "
                        f"another number of positions. Ask a layer with the same positions, or use columns per row."
                    )
            self._slots[layer] = evaluate(self._where, table, self._name)
        return self._slots[layer]


def evaluate(where: pl.Expr, table: pl.DataFrame, name: str) -> Bools:
    """A condition over a table: true or false for each of its lines."""
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
    if result.null_count():
        raise MaskError(
            f"{name}: {where} is null for {result.null_count()} rows. Say what null means, e.g. with .fill_null(False)."
        )
    return result.to_numpy()


def read_condition(where: pl.Expr | str, name: str) -> pl.Expr:
    """A Polars expression as it is; text is SQL."""
    if isinstance(where, pl.Expr):
        return where
    if not isinstance(where, str):
        raise MaskError(
            f'{name}: got {type(where).__name__}, expected a Polars expression, e.g. pl.col("label") == 7, '
            f'or SQL, e.g. "label = 7".'
        )
    try:
        return pl.sql_expr(where)
    except pl.exceptions.PolarsError as error:
        raise MaskError(f"{name}: {where!r} is no SQL condition: {error}.") from None


def condition_columns(where: pl.Expr | str, store: Store, name: str) -> set[str]:
    """The columns that a condition speaks of."""
    return _columns_used(read_condition(where, name), store, name)


def over_groups(where: pl.Expr | str, groups: pl.DataFrame, name: str) -> Bools | None:
    """A condition on the columns of groups, for each group; None if it compares rows with each other.

    A mean over rows is no mean over groups, so only expressions that are known to look at one row are taken.
    """
    condition = read_condition(where, name)
    try:
        one_row = _looks_at_one_row(json.loads(condition.meta.serialize(format="json")))
    except RecursionError:  # too deep to be sure
        one_row = False
    return evaluate(condition, groups, name) if one_row else None


ONE_ROW = {
    "Not", "IsIn", "IsBetween", "IsNull", "IsNotNull", "IsNan", "IsNotNan", "IsFinite", "IsInfinite",
    "StartsWith", "EndsWith", "Contains", "Abs", "FillNull",
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
