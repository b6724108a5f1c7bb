"""What a store holds, as plain data."""

from __future__ import annotations

from typing import Any

import polars as pl

from dualform.dual.verify import not_finite_from
from dualform.store.collection import collection_of, spans_of
from dualform.store.format import Mark
from dualform.store.reader import Store
from dualform.store.shards import RANKS


def marks(store: Store, end: int) -> dict[str, Mark]:
    """Return the layers that are inexact from a step before `end` on."""
    return {name: mark for name, mark in store.manifest.inexact.items() if mark.step < end}


def store_info(store: Store, end: int) -> dict[str, Any]:
    """Return what a store holds up to step `end`."""
    manifest = store.manifest
    return {
        "path": store.location,
        "origin": _origin(store),
        "initial": manifest.initial,
        "created_by": manifest.created_by,
        "ended": manifest.ended or "not yet, or killed: what is sealed is here",
        "ranks": int(manifest.settings.get(RANKS, "1")),
        "steps": store.end_step,
        "rows": _row_count(store),
        "keep": manifest.keep,
        "every": manifest.every,
        "dtype": manifest.dtype,
        "bytes": store.nbytes,
        "snapshot_bytes": sum(snapshot.file.size for snapshot in manifest.snapshots),
        "chunks": len(manifest.chunks),
        "snapshots": store.snapshot_steps(),
        "checkpoints": checkpoint_table(store, end).to_dicts(),
        "totals": _totals(store),
        "columns": {column.name: f"{column.type} per {column.per}" for column in manifest.columns},
        "layers": _layers(store),
        "left_out": manifest.left_out,
        "row_evidence": {layer: str(evidence) for layer, evidence in manifest.rows.items()},
        "inexact": {name: {"step": mark.step, "why": mark.why} for name, mark in marks(store, end).items()},
        "not_finite_from": _not_finite(store, end),
    }


def _origin(store: Store) -> str:
    collection = collection_of(store)
    return "recorded during training" if collection is None else str(collection)


def checkpoint_table(store: Store, end: int) -> pl.DataFrame:
    """Return the checkpoints of a collection up to step `end`: its steps are batches, none of which has changed the weights."""
    lines = []
    collection = collection_of(store)
    spans = [] if collection is None else spans_of(store, end)
    for span in spans:
        assert collection is not None
        rates = collection.learning_rates
        lines.append(
            {
                "checkpoint": span.checkpoint,
                "name": collection.checkpoints[span.checkpoint],
                "begin": span.begin,
                "end": span.end,
                "learning_rate": rates[span.checkpoint] if rates else None,
            }
        )
    return pl.DataFrame(lines, schema=_CHECKPOINT_SCHEMA)


_CHECKPOINT_SCHEMA: dict[str, Any] = {
    "checkpoint": pl.Int64,
    "name": pl.String,
    "begin": pl.Int64,
    "end": pl.Int64,
    "learning_rate": pl.Float64,
}


def _row_count(store: Store) -> int:
    manifest = store.manifest
    if manifest.keep == "totals" and manifest.totals:
        return manifest.totals.rows
    return sum(chunk.rows for chunk in manifest.chunks)


def _totals(store: Store) -> list[dict[str, Any]]:
    totals = store.manifest.totals
    if totals is None:
        return []
    return [
        {
            "by": list(grouping.columns),
            "kind": grouping.kind,
            "groups": store.groups(number).height,
            "step": totals.step,
        }
        for number, grouping in enumerate(totals.groupings)
    ]


def _layers(store: Store) -> list[dict[str, Any]]:
    return [
        {
            "name": layer.name,
            "kind": layer.kind,
            "d_in": layer.in_network.d_in,
            "d_out": layer.in_network.d_out,
            "keep": layer.keep,
            "projected_to": None if layer.projected_from is None else [layer.d_in, layer.d_out],
            "parameters": layer.parameters,
            "slots": store.slots(layer.name),
        }
        for layer in store.manifest.layers
    ]


def _not_finite(store: Store, end: int) -> dict[str, int]:
    steps = {
        parameter.name: not_finite_from(store, number, end)
        for number, parameter in enumerate(store.manifest.parameters)
    }
    return {name: step for name, step in steps.items() if step is not None}
