"""A recording as if it had ended at an earlier step: its files stay as they are, what comes after no longer counts."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from dualform.store.format import Chunk, Manifest
from dualform.store.reader import Store


def manifest_until(store: Store, step: int) -> Manifest:
    """Return the manifest of a recording, cut at a step."""
    manifest = store.manifest
    chunks = [
        chunk if chunk.end_step <= step else cut_chunk(store, place, step)
        for place, chunk in enumerate(manifest.chunks)
        if chunk.first_step < step
    ]
    has_totals = manifest.totals is not None and manifest.totals.step == step
    return replace(
        manifest,
        chunks=tuple(chunks),
        snapshots=tuple(snapshot for snapshot in manifest.snapshots if snapshot.step <= step),
        sessions=tuple(session for session in manifest.sessions if session.first_step <= step),
        inexact={name: mark for name, mark in manifest.inexact.items() if mark.step < step},
        totals=manifest.totals if has_totals else None,
        ended=None,
    )


def cut_chunk(store: Store, place: int, step: int) -> Chunk:
    """Return a chunk up to a step."""
    chunk = store.manifest.chunks[place]
    rows = store.rows_in(place).filter(pl.col("step") < step).height
    slots = []
    keys = []
    for number, layer in enumerate(store.manifest.layers):
        part = store.chunk_of(layer.name, place, step)
        if part is None:
            slots.append(0)
            keys.append(0)
            continue
        slots.append(part.slots)
        keys.append(part.stored_keys if part.key_numbers is None else chunk.keys[number])
    return replace(chunk, end_step=step, rows=rows, slots=tuple(slots), keys=tuple(keys))
