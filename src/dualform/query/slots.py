"""The slots of a layer: where each comes from (step, columns of the row, position), and which of them wrote something.

Slots that wrote nothing (padding, ignored labels) take no part in answers, unless a question asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from dualform.store.format import BLOCK_FIELDS, NO_ROW
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk
from dualform.store.tables import row_series

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
ADDRESS = {"row": pl.Int64(), "step": pl.Int64(), "position": pl.Int64(), "silent": pl.Boolean()}
"""The columns of a layer's slots."""


def describe(store: Store, layer: str, slots: np.ndarray[Any, Any], end: int) -> pl.DataFrame:
    """Return one line for each slot number, in their order: slot, step, the user's columns, then the rest of its address.

    A slot that serves all rows has null in the user's columns and as its row.
    """
    starts, blocks = store.cached(("blocks", layer), lambda: _blocks(store, layer, end), end)
    block = np.searchsorted(starts, slots, side="right") - 1
    step, backward, call, first_row, _, positions, _ = blocks.take(block, axis=1)
    within = slots - starts[block]
    position = np.zeros_like(slots)
    if positions.size and positions.max() > 1:
        within, position = np.divmod(within, positions)
    row = first_row + within
    columns = [column.name for column in store.manifest.columns]
    table = store.row_table(row, position, positions, columns)
    return pl.DataFrame(
        [
            pl.Series("slot", slots, pl.Int64),
            pl.Series("step", step, pl.Int64),
            *(table[name] for name in columns),
            pl.Series("backward", backward, pl.Int64),
            pl.Series("call", call, pl.Int64),
            row_series(row).alias("row"),
            pl.Series("slot_position", position, pl.Int64),
        ]
    )


def _blocks(store: Store, layer: str, end: int) -> tuple[Ints, Ints]:
    """Return where the slots of each block begin, (blocks,), and all blocks, (7, blocks)."""
    chunks = list(store.addresses(layer, end_step=end))
    starts = np.concatenate([np.zeros(0, np.int64), *(chunk.first_slot + chunk.starts for chunk in chunks)])
    blocks = np.concatenate([np.zeros((0, len(BLOCK_FIELDS)), np.int64), *(chunk.blocks for chunk in chunks)])
    return starts, np.ascontiguousarray(blocks.T)


def addresses(store: Store, layer: str, end: int) -> pl.DataFrame:
    """Return one line for each slot of a layer, in the order of their numbers: row, step, position, and whether it is silent."""
    tables = [_addresses(chunk) for chunk in store.addresses(layer, end_step=end)]
    return pl.concat([pl.DataFrame(schema=ADDRESS), *tables])


def _addresses(chunk: SlotChunk) -> pl.DataFrame:
    columns = {
        "row": row_series(chunk.rows()),
        "step": chunk.per_slot(chunk.blocks[:, 0]),
        "position": chunk.positions(),
        "silent": ~written(chunk),
    }
    return pl.DataFrame(columns, schema=ADDRESS)


def has_silent(store: Store, layer: str, end: int) -> bool:
    """Whether any slot of a layer, up to step `end`, is silent. Chunks are looked at once for an open store."""

    def find() -> bool:
        return any(chunk.silent is not None for chunk in store.addresses(layer, end_step=end))

    return store.cached(("has silent slots", layer), find, end)


def written(chunk: SlotChunk) -> Bools:
    """Return which slots of a chunk wrote something, (slots,)."""
    return np.ones(chunk.slots, np.bool_) if chunk.silent is None else ~chunk.silent


def rows_written(store: Store, layers: Sequence[str], end: int) -> Bools:
    """Return which rows wrote something in any of these layers, (rows,)."""

    def find() -> Bools:
        found = np.zeros(sum(chunk.rows for chunk in store.manifest.chunks), np.bool_)
        for layer in layers:
            for chunk in store.addresses(layer, end_step=end):
                rows = chunk.rows()[written(chunk)]
                found[rows[rows != NO_ROW]] = True
        return found

    return store.cached(("rows that wrote something", *layers), find, end)
