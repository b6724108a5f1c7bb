"""Groups of slots: by any column of the rows, by several, by step, or by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.errors import QuestionError
from dualform.store.format import NO_ROW
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Groups:
    """The groups that `by` makes of a layer's slots; `groups(chunk)` gives each slot's group number.

    Slots that serve all rows have null in the user's columns, and make a group of their own.
    """

    def __init__(self, store: Store, layer: str | None, by: str | Sequence[str], end: int):
        """layer: None for the groups of rows, whatever layer their slots are of."""
        self.by = [by] if isinstance(by, str) else list(by)
        known = ["step", "position", *(c.name for c in store.manifest.columns)]
        unknown = [name for name in self.by if name not in known]
        if unknown or not self.by:
            raise QuestionError(
                f"by={by!r}: there is no column {', '.join(map(repr, unknown))}. Columns: {', '.join(known)}."
            )
        self._store, self._end = store, end
        per_position = {"position"} | {c.name for c in store.manifest.columns if c.per == "position"}
        self._codes: Ints | None = None
        self._by_slot: dict[int, Ints] = {}
        self._shared: dict[int, int] = {}
        """The group of the slots without a row, by step."""
        chunks = [] if layer is None else list(store.addresses(layer, end_step=end))
        if per_position & set(self.by):
            columns = [name for name in self.by if name != "position"]
            tables = [store.slot_table(chunk, columns).select(self.by) for chunk in chunks]
            whole = pl.concat(tables) if tables else pl.DataFrame(schema=dict.fromkeys(self.by, pl.Int64))
            self.values, codes = _number(whole)
            starts = np.cumsum([0, *(t.height for t in tables)])
            for chunk, low, high in zip(chunks, starts[:-1], starts[1:], strict=True):
                self._by_slot[chunk.first_slot] = codes[low:high]
        else:
            self._rows = store.rows.filter(pl.col("step") < end)
            shared = _shared_steps(chunks)
            without = _without_row(self._rows.select(self.by), shared)
            self.values, codes = _number(pl.concat([self._rows.select(self.by), without]))
            self._codes = codes[: self._rows.height]
            self._shared = dict(zip(shared.tolist(), codes[self._rows.height :].tolist(), strict=True))

    def __len__(self) -> int:
        return self.values.height

    def __call__(self, chunk: SlotChunk) -> Ints:
        """(slots,): the number of each slot's group."""
        if self._codes is None:
            return self._by_slot[chunk.first_slot]
        rows = chunk.rows()
        if not self._shared:
            return self._codes[rows]
        known = rows != NO_ROW
        found = np.empty(len(rows), np.int64)
        found[known] = self._codes[rows[known]]
        steps = chunk.per_slot(chunk.blocks[:, 0])[~known]
        found[~known] = [self._shared[step] for step in steps.tolist()]
        return found

    def of_slots(self, chunks: Sequence[SlotChunk]) -> Tensor:
        """The same for all slots of some chunks."""
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *map(self, chunks)]))

    def described(self) -> pl.DataFrame:
        """The groups with those other columns that are the same for all rows of a group (a sample's label)."""
        if self._codes is None:
            return self.values
        others = [c.name for c in self._store.manifest.columns if c.name not in self.by and c.per == "row"]
        if not others:
            return self.values
        table = (
            self._rows.select(self.by + others)
            .group_by(self.by)
            .agg(
                *(pl.col(name).first() for name in others),
                *((pl.col(name).n_unique() == 1).alias(f"{name} is one") for name in others),
            )
        )
        same = [name for name in others if bool(table[f"{name} is one"].all())]
        return self.values.join(table.select(self.by + same), on=self.by, how="left", maintain_order="left")


def _shared_steps(chunks: Sequence[SlotChunk]) -> Ints:
    """The steps in which there are slots without a row, ascending."""
    steps = [chunk.blocks[chunk.shared, 0] for chunk in chunks if chunk.shared is not None]
    return np.unique(np.concatenate([np.zeros(0, np.int64), *steps]))


def _without_row(like: pl.DataFrame, steps: Ints) -> pl.DataFrame:
    """A line for each of these steps, with null in all other columns. like: has the columns and their types."""
    return pl.DataFrame(
        [
            pl.Series(name, steps, kind) if name == "step" else pl.Series(name, [None] * len(steps), kind)
            for name, kind in like.schema.items()
        ]
    )


def _number(table: pl.DataFrame) -> tuple[pl.DataFrame, Ints]:
    values = table.unique().sort(table.columns)
    numbered = values.with_row_index(" number")
    codes = table.join(numbered, on=table.columns, how="left", maintain_order="left", nulls_equal=True)[" number"]
    return values, codes.to_numpy().astype(np.int64)
