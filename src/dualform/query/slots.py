"""From slot numbers to what a person wants to read: step, columns of the row, position."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from dualform.store.reader import Store
from dualform.store.tables import TYPES


def describe(store: Store, layer: str, slots: np.ndarray[Any, Any], end: int) -> pl.DataFrame:
    """One line for each distinct slot number: slot, step, the user's columns, then the rest of its address."""
    wanted = np.unique(slots)
    columns = ["step", *(c.name for c in store.manifest.columns)]
    pieces = []
    for chunk in store.chunks(layer, end_step=end):
        here = wanted[(wanted >= chunk.first_slot) & (wanted < chunk.first_slot + chunk.slots)] - chunk.first_slot
        if not len(here):
            continue
        table = store.slot_table(chunk, columns)[here]
        block = np.searchsorted(np.cumsum(chunk.counts), here, side="right")
        pieces.append(
            table.rename({"position": "slot_position"}).with_columns(
                pl.Series("slot", here + chunk.first_slot, pl.Int64),
                pl.Series("step", chunk.blocks[block, 0], pl.Int64),
                pl.Series("backward", chunk.blocks[block, 1], pl.Int64),
                pl.Series("call", chunk.blocks[block, 2], pl.Int64),
                pl.Series("row", chunk.rows()[here], pl.Int64),
            )
        )
    order = ["slot", *columns, "backward", "call", "row", "slot_position"]
    if not pieces:
        types = {c.name: TYPES[c.type] for c in store.manifest.columns}
        return pl.DataFrame(schema={name: types.get(name, pl.Int64()) for name in order})
    return pl.concat(pieces).select(order)
