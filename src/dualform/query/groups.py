"""Groups of slots, by one or several columns of the rows, by step or by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl

from dualform.arrays import Ints
from dualform.errors import NotRecordedError, QuestionError
from dualform.query.conditions import columns_per_position, slot_columns
from dualform.store.format import NO_ROW
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk


class Groups:
    """The groups of a layer's slots by some columns. `groups(chunk)` returns the group number of each slot.

    Slots that serve all rows have null in the user's columns, and make a group of their own.
    """

    def __init__(self, store: Store, layer: str | None, by: str | Sequence[str], end: int):
        """layer: None for groups of rows, which are the same in each layer."""
        self.by = [by] if isinstance(by, str) else list(by)
        _check_columns(store, self.by)
        if layer is not None and "position" in self.by and store.is_summed(layer):
            raise NotRecordedError(store.why_no_positions(layer))
        self._store = store
        self._rows = store.rows.filter(pl.col("step") < end)
        self._row_codes: Ints | None = None
        """(rows,): the group of each row; None: groups are of positions."""
        self._shared_codes: dict[int, int] = {}
        """The group of the slots without a row, by step."""
        self._slot_codes: dict[int, Ints] = {}
        """Of groups of positions: the group of each slot, by the number of a chunk's first slot."""
        self._last_codes: tuple[SlotChunk, Ints] | None = None
        chunks: list[SlotChunk] = []
        if layer is not None:
            chunks += store.addresses(layer, end_step=end)
        if self.is_positional:
            self.values = self._number_slots(chunks)
        else:
            self.values = self._number_rows(chunks)

    @property
    def is_positional(self) -> bool:
        """Whether the positions of a row may be in different groups."""
        per_position = columns_per_position(self._store)
        return "position" in self.by or not per_position.isdisjoint(self.by)

    def _number_slots(self, chunks: Sequence[SlotChunk]) -> pl.DataFrame:
        columns = [name for name in self.by if name != "position"]
        tables = [self._store.slot_table(chunk, columns).select(self.by) for chunk in chunks]
        if not tables:
            return pl.DataFrame(schema=dict.fromkeys(self.by, pl.Int64))
        values, codes = _number(pl.concat(tables))
        low = 0
        for chunk in chunks:
            high = low + chunk.slots
            self._slot_codes[chunk.first_slot] = codes[low:high]
            low = high
        return values

    def _number_rows(self, chunks: Sequence[SlotChunk]) -> pl.DataFrame:
        rows = self._rows.select(self.by)
        steps = _shared_steps(chunks)
        lines = pl.concat([rows, _without_row(rows, steps)])
        values, codes = _number(lines)
        self._row_codes = codes[: rows.height]
        shared_codes = codes[rows.height :]
        self._shared_codes = dict(zip(steps.tolist(), shared_codes.tolist(), strict=True))
        return values

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last_codes": None}

    def __len__(self) -> int:
        return self.values.height

    def __call__(self, chunk: SlotChunk) -> Ints:
        """Return the number of each slot's group, (slots,)."""
        if self._row_codes is None:
            return self._slot_codes[chunk.first_slot]
        # A scan asks once for each piece of a chunk; its codes take longer than the scores of a piece
        known = self._last_codes  # read once: another thread may replace it at any time
        if known is not None and known[0] is chunk:
            return known[1]
        codes = self.of_rows(chunk.rows(), lambda: chunk.per_slot(chunk.blocks[:, 0]))
        self._last_codes = (chunk, codes)
        return codes

    def of_rows(self, rows: Ints, steps: Callable[[], Ints]) -> Ints:
        """Return the group of each of some rows, NO_ROW included. steps: gives the step of each. Not for groups of positions."""
        assert self._row_codes is not None
        if not self._shared_codes:
            return self._row_codes[rows]
        has_row = rows != NO_ROW
        codes = np.empty(len(rows), np.int64)
        codes[has_row] = self._row_codes[rows[has_row]]
        shared_steps = steps()[~has_row]
        codes[~has_row] = [self._shared_codes[step] for step in shared_steps.tolist()]
        return codes

    def described(self) -> pl.DataFrame:
        """Return the groups with those other columns that are the same for all rows of a group (a sample's label)."""
        if self._row_codes is None:
            return self.values
        columns = self._store.manifest.columns
        others = [c.name for c in columns if c.per == "row" and c.name not in self.by]
        if not others:
            return self.values
        is_one = pl.col(others).n_unique() == 1
        table = (
            self._rows.select(self.by + others)
            .group_by(self.by)
            .agg(
                pl.col(others).first(),
                is_one.name.suffix(" is one"),
            )
        )
        same = [name for name in others if bool(table[f"{name} is one"].all())]
        described = table.select(self.by + same)
        return self.values.join(described, on=self.by, how="left", maintain_order="left")


def _check_columns(store: Store, by: list[str]) -> None:
    allowed = slot_columns(store)
    unknown = [name for name in by if name not in allowed]
    if unknown or not by:
        given = by[0] if len(by) == 1 else by
        raise QuestionError(
            f"by={given!r}: there is no column {', '.join(map(repr, unknown))}. Columns: {', '.join(allowed)}."
        )


def _shared_steps(chunks: Sequence[SlotChunk]) -> Ints:
    """Return the steps in which there are slots without a row, ascending."""
    steps = [chunk.blocks[chunk.shared, 0] for chunk in chunks if chunk.shared is not None]
    return np.unique(np.concatenate([np.zeros(0, np.int64), *steps]))


def _without_row(like: pl.DataFrame, steps: Ints) -> pl.DataFrame:
    """Return a line for each of these steps, with null in all other columns. like: a table with the same columns and types."""
    nothing = [None] * len(steps)
    return pl.DataFrame(
        [pl.Series(name, steps if name == "step" else nothing, kind) for name, kind in like.schema.items()]
    )


def _number(table: pl.DataFrame) -> tuple[pl.DataFrame, Ints]:
    values = table.unique().sort(table.columns)
    numbered = values.with_row_index(" number")
    joined = table.join(
        numbered,
        on=table.columns,
        how="left",
        maintain_order="left",
        nulls_equal=True,
    )
    codes = joined[" number"].to_numpy()
    return values, codes.astype(np.int64)
