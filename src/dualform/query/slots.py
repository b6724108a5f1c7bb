"""From slot numbers to what a person wants to read: step, columns of the row, position."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from dualform.store.reader import Store

Ints = np.ndarray[Any, np.dtype[np.int64]]


def describe(store: Store, layer: str, slots: np.ndarray[Any, Any], end: int) -> pl.DataFrame:
    """One line for each distinct slot number: slot, step, the user's columns, then the rest of its address."""
    wanted = np.unique(slots)
    columns = ["step", *(c.name for c in store.manifest.columns)]
    found: list[Ints] = [np.zeros((0, 7), dtype=np.int64)]
    for chunk in store.addresses(layer, end_step=end):
        low, high = np.searchsorted(wanted, [chunk.first_slot, chunk.first_slot + chunk.slots])
        if low == high:
            continue
        here = wanted[low:high] - chunk.first_slot
        block = np.searchsorted(np.cumsum(chunk.counts), here, side="right")
        step, backward, call, first_row, _, positions = chunk.blocks[block].T
        row, position = np.divmod(here - chunk.starts[block], positions)
        found.append(np.stack([wanted[low:high], step, backward, call, first_row + row, position, positions], 1))
    slot, step, backward, call, row, position, positions = np.concatenate(found).T
    table = store.row_table(row, position, positions, columns).rename({"position": "slot_position"})
    address = {"slot": slot, "step": step, "backward": backward, "call": call, "row": row}
    order = ["slot", *columns, "backward", "call", "row", "slot_position"]
    return table.with_columns(pl.Series(name, values, pl.Int64) for name, values in address.items()).select(order)


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
