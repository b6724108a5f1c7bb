"""Going on with a recording from a training checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from dualform.errors import RecordingError
from dualform.record import audit
from dualform.record.books import Books
from dualform.record.ledger import Ledger
from dualform.record.parameters import roundoff
from dualform.store.format import Chunk, Grouping, Manifest
from dualform.store.reader import Store


def manifest(folder: Path, step: int | None) -> Manifest:
    """The manifest of a recording, cut at `step` (default: its end). Nothing on disk is changed yet."""
    store = Store(folder)
    step = store.end_step if step is None else step
    if store.manifest.keep == "totals" and step != store.end_step:
        raise RecordingError(
            f"resume={step}: {folder} keeps totals only, as they were after step {store.end_step}: go on from there."
        )
    if not 0 <= step <= store.end_step:
        raise RecordingError(
            f"resume={step}: the recording in {folder} is sealed up to step {store.end_step}. Go on from an earlier "
            f"checkpoint, or record into a new folder."
        )
    chunks: list[Chunk] = []
    for place, chunk in enumerate(store.manifest.chunks):
        if chunk.first_step >= step:
            break
        chunks.append(chunk if chunk.end_step <= step else _cut(store, place, chunk, step))
    return replace(
        store.manifest,
        chunks=tuple(chunks),
        snapshots=tuple(s for s in store.manifest.snapshots if s.step <= step),
        inexact={name: mark for name, mark in store.manifest.inexact.items() if mark.step < step},
        totals=store.manifest.totals if store.manifest.totals and store.manifest.totals.step == step else None,
        ended=None,
    )


def _cut(store: Store, place: int, chunk: Chunk, step: int) -> Chunk:
    """A chunk up to a step: its files stay as they are, what comes after no longer counts."""
    rows = store.rows_in(place).filter(pl.col("step") < step).height
    slots, keys = list(chunk.slots), list(chunk.keys)
    for number, layer in enumerate(store.manifest.layers):
        for part in store.chunks(layer.name, end_step=step):
            if part.chunk is chunk:
                slots[number] = part.slots
                keys[number] = part.stored_keys if part.key_numbers is None else chunk.keys[number]
        if not any(part.chunk is chunk for part in store.chunks(layer.name, end_step=step)):
            slots[number], keys[number] = 0, 0
    return replace(chunk, end_step=step, rows=rows, slots=tuple(slots), keys=tuple(keys))


def go_on(folder: Path, before: Manifest, now: Manifest, ledger: Ledger, books: Books) -> Manifest:
    """Check that model and settings are those of the recording at that step; gives the manifest to go on with."""
    for what in ("keep", "dtype", "layers", "parameters"):
        if getattr(before, what) != getattr(now, what):
            raise RecordingError(
                f"resume: the recording in {folder} has other {what} than this model and these settings: "
                f"{_short(getattr(before, what))} instead of {_short(getattr(now, what))}."
            )
    store = Store(folder)
    updates = store.updates.filter(pl.col("step") < before.end_step)
    for watched, _ in books.recorded():
        parameter = watched.parameter
        mine = updates.filter((pl.col("parameter") == watched.number) & pl.col("after").is_not_null())
        if mine.height:
            known = float(mine["after"][-1])
        else:
            moment = before.end_step if before.keep == "totals" else 0
            watched.remember(store.snapshot(moment)[f"model.{watched.name}"])
            known = watched.fingerprint
            watched.remember()
        bound = audit.SLACK * roundoff(parameter) * np.sqrt(parameter.numel()) * watched.size
        if not abs(watched.fingerprint - known) <= bound:
            raise RecordingError(
                f"resume: {watched.name!r} is not what the recording in {folder} says it was after step "
                f"{before.end_step}. Load the checkpoint of that step into the model (and its optimizer) first, or say "
                f"which step it is: resume=n."
            )
    _check_state(store, before.end_step, books, folder)
    books.next_row = before.chunks[-1].first_row + before.chunks[-1].rows if before.chunks else 0
    if before.keep == "totals" and before.totals is not None:
        books.next_row = before.totals.rows
    for module in ledger.modules:
        module.called = any(_has_slots(store, before, layer.number) for layer in module.layers)
    return replace(before, created_by=now.created_by, left_out=now.left_out, batch_axis=now.batch_axis)


def _has_slots(store: Store, before: Manifest, layer: int) -> bool:
    """Whether a layer was called in what is gone on with."""
    if before.keep == "totals":
        return before.totals is not None and any(name.endswith(f".{layer}.visits") for name in store.totals())
    return any(chunk.slots[layer] for chunk in before.chunks)


def totals(folder: Path, now: Manifest, wanted: Sequence[Grouping]) -> Store | None:
    """The totals to go on with, if any are wanted and there are."""
    there = now.totals
    if not wanted:
        if now.keep == "totals":
            raise RecordingError(f"resume: {folder} keeps totals; say the same totals= again.")
        return None
    if there is None and now.end_step == 0:
        return None
    if there is None or there.groupings != tuple(wanted):
        raise RecordingError(
            f"resume: the totals in {folder} are of another step or of other columns, so they cannot be carried on. Resume "
            f"without totals= and build them afterwards: dualform totals RUN --by COLUMN."
        )
    return Store(folder)


def _check_state(store: Store, step: int, books: Books, folder: Path) -> None:
    """Where there is a snapshot at that step (recorder.seal()), the optimizer's state is compared too."""
    if step not in store.snapshot_steps():
        return
    snapshot = store.snapshot(step)
    for ledger, name, value in books.optimizer_state():
        known = f"state.{ledger.name}.{name}"
        if known in snapshot and not np.array_equal(snapshot[known].numpy(), value.detach().cpu().numpy()):
            raise RecordingError(
                f"resume: the optimizer's {name} of {ledger.name!r} is not what it was after step {step} in {folder}. "
                f"Load the optimizer's state of that checkpoint too."
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 200 else text[:200] + "…"
