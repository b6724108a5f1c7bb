"""The slots of a layer: where each comes from (step, columns of the row, position), and which of them wrote something.

Slots that wrote nothing (padding, ignored labels) take no part in answers, unless a question asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from dualform.arrays import Bools, Ints
from dualform.store.format import BLOCK_FIELDS, NO_ROW
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk
from dualform.store.tables import row_series

ADDRESS = {
    "row": pl.Int64(),
    "step": pl.Int64(),
    "position": pl.Int64(),
    "silent": pl.Boolean(),
}
"""The columns of a layer's slots."""


class Entries:
    """The rows of each call in a chunk. An entry is the slots of one row in one call, which follow each other."""

    def __init__(self, chunk: SlotChunk):
        self._first_rows = chunk.blocks[:, 3]
        self._steps = chunk.blocks[:, 0]
        positions = chunk.blocks[:, 5]
        self._counts = np.where(positions > 0, chunk.blocks[:, 4], 0)
        self.blocks: Ints = np.append(0, np.cumsum(self._counts))
        """(blocks + 1,): where the entries of each block begin."""
        self.positions: Ints = np.repeat(positions, self._counts)
        """(entries,): how many slots each has."""
        self.starts: Ints = np.cumsum(self.positions) - self.positions
        """(entries,): the first slot of each, counted within the chunk."""

    def __len__(self) -> int:
        return len(self.starts)

    def rows(self) -> Ints:
        """(entries,): the number of each row; NO_ROW where slots serve all rows."""
        within = np.arange(len(self)) - np.repeat(self.blocks[:-1], self._counts)
        first_rows = np.repeat(self._first_rows, self._counts)
        found: Ints = np.where(first_rows == NO_ROW, NO_ROW, first_rows + within)
        return found

    def steps(self) -> Ints:
        """(entries,): the step of each."""
        found: Ints = np.repeat(self._steps, self._counts)
        return found


def describe(store: Store, layer: str, slots: Ints, end: int) -> pl.DataFrame:
    """Return one line for each slot number, in their order: slot, step, the user's columns, then the rest of its address.

    A slot that serves all rows has null in the user's columns and as its row.
    """
    starts, blocks = store.cached(("blocks", layer), lambda: _blocks(store, layer, end), end)
    block = np.searchsorted(starts, slots, side="right") - 1
    numbers = blocks.take(block, axis=1)
    fields = dict(zip(BLOCK_FIELDS, numbers, strict=True))
    positions = fields["positions"]
    within = slots - starts[block]
    position = np.zeros_like(slots)
    if positions.size and positions.max() > 1:
        within, position = np.divmod(within, positions)
    row = fields["first_row"] + within
    names = [column.name for column in store.manifest.columns]
    table = store.row_table(row, position, positions, names)
    return pl.DataFrame(
        [
            _series("slot", slots),
            _series("step", fields["step"]),
            *(table[name] for name in names),
            _series("backward", fields["backward"]),
            _series("call", fields["call"]),
            row_series(row).alias("row"),
            _series("slot_position", position),
        ]
    )


def _series(name: str, numbers: Ints) -> pl.Series:
    return pl.Series(name, numbers, pl.Int64)


def _blocks(store: Store, layer: str, end: int) -> tuple[Ints, Ints]:
    """Return where the slots of each block begin, (blocks,), and all blocks, (7, blocks)."""
    starts = [np.zeros(0, np.int64)]
    blocks = [np.zeros((0, len(BLOCK_FIELDS)), np.int64)]
    for chunk in store.addresses(layer, end_step=end):
        starts.append(chunk.first_slot + chunk.starts)
        blocks.append(chunk.blocks)
    by_field = np.concatenate(blocks).T
    return np.concatenate(starts), np.ascontiguousarray(by_field)


def addresses(store: Store, layer: str, end: int) -> pl.DataFrame:
    """Return one line for each slot of a layer, in the order of their numbers: row, step, position, and whether it is silent."""
    tables = [pl.DataFrame(schema=ADDRESS)]
    for chunk in store.addresses(layer, end_step=end):
        steps = chunk.blocks[:, 0]
        columns = {
            "row": row_series(chunk.rows()),
            "step": chunk.per_slot(steps),
            "position": chunk.positions(),
            "silent": ~written(chunk),
        }
        tables.append(pl.DataFrame(columns, schema=ADDRESS))
    return pl.concat(tables)


def has_silent(store: Store, layer: str, end: int) -> bool:
    """Whether any slot of a layer, up to step `end`, is silent. Chunks are looked at once for an open store."""

    def find() -> bool:
        return any(chunk.silent is not None for chunk in store.addresses(layer, end_step=end))

    return store.cached(("has silent slots", layer), find, end)


def written(chunk: SlotChunk) -> Bools:
    """Return which slots of a chunk wrote something, (slots,)."""
    if chunk.silent is None:
        return np.ones(chunk.slots, np.bool_)
    return ~chunk.silent


def rows_written(store: Store, layers: Sequence[str], end: int) -> Bools:
    """Return which rows wrote something in any of these layers, (rows,)."""

    def find() -> Bools:
        row_count = sum(chunk.rows for chunk in store.manifest.chunks)
        found = np.zeros(row_count, np.bool_)
        for layer in layers:
            for chunk in store.addresses(layer, end_step=end):
                rows = chunk.rows()[written(chunk)]
                found[rows[rows != NO_ROW]] = True
        return found

    return store.cached(("rows that wrote something", *layers), find, end)


def rows_kept(store: Store) -> Bools:
    """Return which rows are of steps whose slots were kept (every=), (rows,)."""

    def find() -> Bools:
        steps = store.rows["step"].to_numpy()
        of_step = np.array([store.manifest.keeps_step(step) for step in range(store.end_step)], np.bool_)
        found: Bools = of_step[steps]
        return found

    return store.cached(("rows of steps that were kept",), find)
