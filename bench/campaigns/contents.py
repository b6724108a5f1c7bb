"""Everything that a store holds, in a form that two stores can be compared in, slot by slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dualform.dual.layer import DualLayer
from dualform.store.reader import Store

Array = np.ndarray[Any, Any]

BY_CHANCE = ("after", "residual", "size")
"""Columns of the updates that depend on the random projections of a recording."""


@dataclass
class Contents:
    """What a store holds, as plain data. Tables are dictionaries of columns; those of slots and rows have a "step"."""

    end_step: int
    tables: dict[str, dict[str, Any]]
    snapshots: dict[int, dict[str, Array]]
    totals_step: int | None
    totals: dict[str, Any]


def contents(store: Store) -> Contents:
    """Read everything."""
    updates = store.updates.drop(BY_CHANCE, strict=False).sort("step", "parameter")
    tables = {
        "rows": store.rows.to_dict(as_series=False),
        "log": store.log.to_dict(as_series=False),
        "updates": updates.select(sorted(updates.columns)).to_dict(as_series=False),
    }
    if store.manifest.keep != "totals":
        for layer in store.manifest.layers:
            tables[f"slots of {layer.name}"] = _slots(store, layer.name)
    steps = store.snapshot_steps()
    totals = store.manifest.totals
    return Contents(
        store.end_step,
        tables,
        {step: _tensors(store.snapshot(step)) for step in steps},
        None if totals is None else totals.step,
        {} if totals is None else _totals(store),
    )


def _slots(store: Store, layer: str) -> dict[str, Any]:
    """One line for each slot of a layer: where it belongs, its key and its error signal."""
    table: dict[str, list[Array]] = {}
    for chunk in store.chunks(layer):
        columns = {
            "step": chunk.per_slot(chunk.blocks[:, 0]),
            "backward": chunk.per_slot(chunk.blocks[:, 1]),
            "call": chunk.per_slot(chunk.blocks[:, 2]),
            "row": chunk.rows(),
            "position": chunk.positions(),
            "silent": np.zeros(chunk.slots, np.bool_) if chunk.silent is None else chunk.silent,
        }
        if store.manifest.keep == "slots":
            columns["error"] = chunk.errors(torch.float64).numpy()
        for name, column in columns.items():
            table.setdefault(name, []).append(column)
    if table and store.layer(layer)[1].attends:
        table["key"] = [DualLayer(store, layer, store.end_step).keys.numpy()]
    return {name: np.concatenate(pieces) for name, pieces in table.items()}


def _tensors(file: Any) -> dict[str, Array]:
    return {name: file[name].numpy().copy() for name in file if name.startswith(("model.", "state."))}


def _totals(store: Store) -> dict[str, Any]:
    file = store.totals()
    found: dict[str, Any] = {name: file[name].numpy().copy() for name in file}
    assert store.manifest.totals is not None
    for number in range(len(store.manifest.totals.groupings)):
        found[f"groups {number}"] = store.groups(number).to_dict(as_series=False)
    return found


def differences(found: Contents, expected: Contents) -> list[str]:
    """Where a store differs from the first steps of another one; empty if it does not."""
    said = []
    for name, table in expected.tables.items():
        said += _compare_tables(name, found.tables.get(name, {}), table, found.end_step)
    if set(found.tables) != set(expected.tables):
        said.append(f"tables {sorted(found.tables)} instead of {sorted(expected.tables)}")
    for step, tensors in found.snapshots.items():
        known = expected.snapshots.get(step)
        if known is None or set(known) != set(tensors):
            said.append(f"the snapshot at step {step} has other tensors")
            continue
        said += [
            f"snapshot {step}: {name} differs" for name in tensors if not np.array_equal(tensors[name], known[name])
        ]
    return said


def _compare_tables(name: str, found: dict[str, Any], expected: dict[str, Any], end: int) -> list[str]:
    """Columns of the first `end` steps, which must be equal bit by bit."""
    until = np.asarray(expected.get("step", [])) < end
    if not until.any() and not len(found.get("step", [])):
        return []
    if set(found) != set(expected):
        return [f"{name}: columns {sorted(found)} instead of {sorted(expected)}"]
    said = []
    for column, values in expected.items():
        mine = np.asarray(found[column], dtype=object if isinstance(values, list) else None)
        known = np.asarray(values, dtype=object if isinstance(values, list) else None)[until]
        if len(mine) != len(known):
            return [f"{name}: {len(mine)} lines instead of {len(known)}"]
        # A factor is found through random projections: that it is 1 may be seen to rounding only
        same = _nearly(mine, known) if column == "factors" else np.array_equal(mine, known)
        if not same:
            said.append(f"{name}: column {column} differs")
    return said


def _nearly(found: Array, expected: Array) -> bool:
    """Whether lists of numbers are equal to rounding."""
    pairs = zip(map(_floats, found), map(_floats, expected), strict=True)
    return all(one.shape == other.shape and np.allclose(one, other, rtol=1e-5, atol=0) for one, other in pairs)


def _floats(values: Any) -> Array:
    return np.asarray(values, dtype=np.float64)


def totals_differ(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Where totals differ from others by more than the rounding of another order of adding up."""
    if set(found) != set(expected):
        return [f"totals: {sorted(found)} instead of {sorted(expected)}"]
    said = []
    for name, known in expected.items():
        mine = found[name]
        if isinstance(known, dict):
            same = mine == known
        else:
            size = float(np.abs(known).max(initial=0)) if known.dtype.kind == "f" else 0.0
            same = mine.shape == known.shape and np.allclose(mine, known, rtol=0, atol=1e-5 * size)
        if not same:
            said.append(f"totals: {name} differs")
    return said
