"""From slot numbers to what a person wants to read: step, columns of the row, position."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from dualform.query.remembered import remembered
from dualform.store.reader import Store

Ints = np.ndarray[Any, np.dtype[np.int64]]


def describe(store: Store, layer: str, slots: np.ndarray[Any, Any], end: int) -> pl.DataFrame:
    """One line for each slot number, in their order: slot, step, the user's columns, then the rest of its address."""
    columns = [c.name for c in store.manifest.columns]
    starts, size, blocks = remembered(store, ("blocks", layer), lambda: _blocks(store, layer, end), end)
    block = np.minimum(slots // size, len(starts) - 1) if size else np.searchsorted(starts, slots, side="right") - 1
    step, backward, call, first_row, _, positions = blocks.take(block, axis=1)
    within, position = slots - starts[block], np.zeros_like(slots)
    if positions.size and positions.max() > 1:
        within, position = np.divmod(within, positions)
    row = first_row + within
    table = store.row_table(row, position, positions, columns)
    address = {"slot": slots, "step": step, "backward": backward, "call": call, "row": row, "slot_position": position}
    slot, moment, *rest = (pl.Series(name, values, pl.Int64) for name, values in address.items())
    return pl.DataFrame([slot, moment, *(table[name] for name in columns), *rest])


def _blocks(store: Store, layer: str, end: int) -> tuple[Ints, int, Ints]:
    """Where the slots of each block begin, (blocks,), and all blocks, (6, blocks).

    Between the two, how many slots a block has, if all but the last have as many; else 0.
    """
    chunks = list(store.addresses(layer, end_step=end))
    starts = np.concatenate([np.zeros(0, np.int64), *(chunk.first_slot + chunk.starts for chunk in chunks)])
    blocks = np.concatenate([np.zeros((0, 6), np.int64), *(chunk.blocks for chunk in chunks)])
    sizes = np.unique(np.diff(starts))
    return starts, int(sizes[0]) if len(sizes) == 1 else 0, np.ascontiguousarray(blocks.T)


def addresses(store: Store, layer: str, end: int) -> pl.DataFrame:
    """One line for each slot of a layer, in the order of their numbers: row, step, position."""
    chunks = list(store.addresses(layer, end_step=end))
    found = {
        "row": [chunk.rows() for chunk in chunks],
        "step": [chunk.per_slot(chunk.blocks[:, 0]) for chunk in chunks],
        "position": [chunk.positions() for chunk in chunks],
    }
    return pl.DataFrame(
        {name: np.concatenate(some) if some else np.zeros(0, np.int64) for name, some in found.items()},
        schema=dict.fromkeys(found, pl.Int64),
    )
