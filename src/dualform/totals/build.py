"""Totals from the slots of a finished recording."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import torch

from dualform.errors import NotRecordedError, QuestionError
from dualform.progress import Progress
from dualform.recursions import KINDS as KINDS_OF
from dualform.recursions import Walked, walk_back
from dualform.store.files import LocalFiles, writing
from dualform.store.format import NO_ROW, SLOTS, Column, Grouping
from dualform.store.lock import locked
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk
from dualform.store.tables import factor_table, row_types, settings_of
from dualform.store.writer import NewTotals, write_totals
from dualform.totals.fold import OF, Accumulated, Ints, Piece, Updates
from dualform.totals.groups import Numbering

KINDS = ("keys", "deltas", "both")


def build_totals(
    path: str | os.PathLike[str],
    by: str | Sequence[str],
    *,
    kind: str = "both",
    progress: Progress | None = None,
) -> None:
    """Build totals for the groups that the columns `by` make, from a recording's slots, and keep them with it.

    kind: "keys" (sums of keys), "deltas" (each group's part of the weights) or "both". Totals that are there stay.
    """
    folder = Path(path)
    with locked(folder):
        store = Store(folder)
        if store.manifest.keep == "totals":
            raise NotRecordedError(f"{folder} keeps totals only: there are no slots to build others from.")
        columns = (by,) if isinstance(by, str) else tuple(by)
        known = [c.name for c in store.manifest.columns]
        unknown = [name for name in columns if name not in known]
        if unknown or not columns or len(set(columns)) < len(columns):
            raise QuestionError(
                f"by={by!r}: there is no column {', '.join(map(repr, unknown))}. Columns: {', '.join(known) or 'none'}."
                if unknown
                else f"by={by!r}: expected one or several columns, each once. Columns: {', '.join(known) or 'none'}."
            )
        if kind not in KINDS:
            raise QuestionError(f"kind={kind!r}: expected one of {', '.join(map(repr, KINDS))}.")
        kind = "keys" if store.manifest.keep == "keys" else kind
        parts = [layer.name for layer in store.manifest.layers if layer.outputs]
        if parts and kind != "keys":
            raise NotRecordedError(
                f"kind={kind!r}: of layer {parts[0]!r} only the error signals of some output units were kept (outputs=), so a "
                f'group\'s part of its weights is not known. Ask kind="keys".'
            )
        old = store.manifest.totals
        others = [g for g in old.groupings if g.columns != columns] if old and old.step == store.end_step else []
        groupings = [*others, Grouping(columns, kind)]
        totals = _fold(store, groupings, progress)
        with writing(folder):
            write_totals(LocalFiles(folder), store.manifest, totals)


def _fold(store: Store, groupings: Sequence[Grouping], progress: Progress | None) -> NewTotals:
    first = store.snapshot(0)
    sums = Accumulated(store.manifest, groupings, beginning={name: first[name] for name in first})
    numberings = [Numbering(g.columns) for g in groupings]
    work, deltas = len(store.manifest.chunks), any(grouping.kind != "keys" for grouping in groupings)
    names = [p.name for p in store.manifest.parameters] if deltas else []
    updates = {name: _updates(store, name) for name in names}
    for place in range(work):
        if progress is not None:
            progress("totals", place, work)
        slots = {n: _pieces(store, y.name, place, numberings) for n, y in enumerate(store.manifest.layers)}
        sums.fold(slots, {name: some for name in names if (some := updates[name][place]) is not None})
        del slots
        store.decoded(store.manifest.chunks[place].files[SLOTS].size)
    if progress is not None:
        progress("totals", work, work)
    counts = [len(numbering) for numbering in numberings]
    types = row_types([Column(c.name, c.type, "row") for c in store.manifest.columns])
    tables = [numbering.table(types) for numbering in numberings]
    return NewTotals(store.end_step, store.rows.height, groupings, sums.tensors(counts), tables)


def _pieces(store: Store, layer: str, place: int, numberings: Sequence[Numbering]) -> list[Piece]:
    """A layer's slots in one chunk: feature maps call by call, vectors all at once."""
    chunk = store.chunk_of(layer, place)
    if chunk is None:
        return []
    dtype = torch.float64 if store.manifest.dtype == "float64" else torch.float32
    groups = [_groups(store, chunk, numbering) for numbering in numberings]
    steps, backwards = (chunk.per_slot(chunk.blocks[:, column]) for column in (0, 1))
    ends = (chunk.starts + chunk.counts).tolist()
    ranges = list(zip(chunk.starts.tolist(), ends, strict=True)) if chunk.layer.form == "maps" else [(0, chunk.slots)]
    return [
        Piece(
            chunk.keys(dtype, low, high),
            None if store.manifest.keep == "keys" else chunk.errors(dtype, low, high),
            steps[low:high],
            backwards[low:high],
            [codes[low:high] for codes in groups],
            None if chunk.silent is None else ~chunk.silent[low:high],
        )
        for low, high in ranges
        if low < high
    ]


def _groups(store: Store, chunk: SlotChunk, numbering: Numbering) -> Ints:
    """(slots,): the group of each slot of a chunk."""
    known = chunk.rows() != NO_ROW
    table = store.slot_table(chunk, list(numbering.columns)).filter(known)
    if any(table[name].null_count() for name in numbering.columns):
        raise QuestionError(
            f"by {'+'.join(numbering.columns)}: layer {chunk.layer.name!r} has another number of positions than the column."
        )
    found = np.empty(chunk.slots, np.int64)
    found[known] = numbering.number({name: table[name].to_numpy() for name in numbering.columns}, (table.height,))
    if not known.all():
        found[~known] = numbering.number_without_row()
    return found


def _updates(store: Store, parameter: str) -> list[Updates | None]:
    """A parameter's updates in each chunk.

    The run is over, so coefficients that are numbers are taken at its end: what one chunk wrote need not be carried through the
    later ones, and the running average holds little of all but the last.
    """
    found = [_updates_in(store, place, parameter) for place in range(len(store.manifest.chunks))]
    kinds = {some.kind for some in found if some is not None}
    if any(KINDS_OF[kind].elementwise for kind in kinds) or not kinds:
        return found
    later: dict[str, Walked] = {}
    largest = dict.fromkeys(OF, 0.0)
    for place in reversed(range(len(found))):
        if (some := found[place]) is None:
            continue
        later = {of: walk_back(some.kind, some.settings, len(some.steps), of, later.get(of)) for of in OF}
        largest = {of: max(largest[of], float(np.abs(later[of].c).max(initial=0))) for of in OF}
        found[place] = replace(some, reaching=later)
    return [some and replace(some, reaching={of: _felt(some, of, largest[of], store) for of in OF}) for some in found]


def _felt(some: Updates, of: str, largest: float, store: Store) -> Walked:
    """Without those that are lost in the rounding of the others, even if there were many."""
    assert some.reaching is not None
    walked = some.reaching[of]
    rounding = np.finfo(np.float64 if store.manifest.dtype == "float64" else np.float32).eps
    return replace(walked, c=np.where(np.abs(walked.c) < rounding**2 * largest, 0.0, walked.c))


def _updates_in(store: Store, place: int, parameter: str) -> Updates | None:
    number = store.parameter(parameter)
    mine = store.updates_in(place).filter(pl.col("parameter") == number)
    if not mine.height:
        return None
    steps = mine["step"].to_numpy().astype(np.int64)
    factors, gradients = factor_table(mine["factors"]), store.gradients_in(place, parameter)
    return Updates(mine["optimizer"][0], steps, settings_of(mine), factors, gradients)
