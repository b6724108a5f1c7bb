"""Totals from the slots of a finished recording."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from dualform.arrays import Ints
from dualform.errors import NotRecordedError, QuestionError
from dualform.layers.keys import KeysOrGradients
from dualform.layers.layer import Layer
from dualform.progress import Progress, report
from dualform.recursions import KINDS
from dualform.store.collection import refuse_collected
from dualform.store.files import folder_at, writing
from dualform.store.format import NO_ROW, SLOTS, TOTAL_KINDS, Grouping
from dualform.store.lock import locked
from dualform.store.reader import Store
from dualform.store.run import Run, open_store
from dualform.store.shards import write_totals_of_run
from dualform.store.slots import SlotChunk
from dualform.store.tables import group_types
from dualform.store.unkept import require_gradients
from dualform.store.writer import NewTotals, publish_manifest, write_totals
from dualform.totals.fold import Accumulated
from dualform.totals.groups import Numbering
from dualform.totals.stored_updates import UpdatesByChunk, updates_by_chunk
from dualform.totals.stretch import Piece


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
    files = folder_at(path)
    columns = (by,) if isinstance(by, str) else tuple(by)
    with locked(files):
        store = open_store(files)
        if store.manifest.keep == "totals":
            raise NotRecordedError(f"{files.location} keeps totals only: there are no slots to build others from.")
        _check_columns(store, by, columns)
        new = Grouping(columns, _possible_kind(store, kind))
        groupings = [*_other_groupings(store, columns), new]
        totals = _fold(store, groupings, progress)
        with writing(files.location):
            publish = write_totals_of_run if isinstance(store, Run) else publish_manifest
            write_totals(files, store.manifest, totals, publish)


def _check_columns(store: Store, by: str | Sequence[str], columns: tuple[str, ...]) -> None:
    columns_there = [column.name for column in store.manifest.columns]
    known_text = ", ".join(columns_there) or "none"
    unknown = [name for name in columns if name not in columns_there]
    if unknown:
        raise QuestionError(f"by={by!r}: there is no column {', '.join(map(repr, unknown))}. Columns: {known_text}.")
    if not columns or len(set(columns)) < len(columns):
        raise QuestionError(f"by={by!r}: expected one or several columns, each once. Columns: {known_text}.")


def _possible_kind(store: Store, kind: str) -> str:
    """Return the kind of totals that was asked for, or of "both" the kind that was recorded."""
    if kind not in TOTAL_KINDS:
        raise QuestionError(f"kind={kind!r}: expected one of {', '.join(map(repr, TOTAL_KINDS))}.")
    if store.manifest.keep != "keys" or store.manifest.every > 1:
        require_gradients(store, f"kind={kind!r}")
    summed = [layer.name for layer in store.manifest.layers if store.is_summed(layer.name)]
    if summed and kind == "keys":
        raise NotRecordedError(
            f'kind="keys": layer {summed[0]!r} keeps the gradients of rows (keep="rows"), and no keys to sum. Ask kind="deltas", or '
            f'record with keep="slots".'
        )
    if summed:
        kind = "deltas"
    if store.manifest.keep == "keys" or kind == "keys":
        return "keys"
    _require_deltas(store, kind)
    return kind


def _require_deltas(store: Store, kind: str) -> None:
    """Raise an error unless each group's part of the weights is known."""
    for layer in store.manifest.layers:
        if layer.outputs:
            raise NotRecordedError(
                f"kind={kind!r}: of layer {layer.name!r} only the error signals of some output units were kept (outputs=), so a "
                f'group\'s part of its weights is not known. Ask kind="keys".'
            )
    refuse_collected(store, f"kind={kind!r}")
    unknown = sorted(set(store.updates["optimizer"].to_list()) - set(KINDS))
    if unknown:
        raise NotRecordedError(
            f"kind={kind!r}: the model was trained by {', '.join(unknown)}, whose updates cannot be replayed, so a group's part of its weights is "
            f'not known. Ask kind="keys".'
        )


def _other_groupings(store: Store, columns: tuple[str, ...]) -> list[Grouping]:
    """Return the groupings of totals that are there, and are built again with the new ones."""
    totals = store.manifest.totals
    if totals is None or totals.step != store.end_step:
        return []
    return [grouping for grouping in totals.groupings if grouping.columns != columns]


def _fold(store: Store, groupings: Sequence[Grouping], progress: Progress | None) -> NewTotals:
    manifest = store.manifest
    snapshot = store.snapshot(0)
    beginning = {name: snapshot[name] for name in snapshot}
    sums = Accumulated(manifest, groupings, beginning=beginning)
    numberings = [Numbering(grouping.columns) for grouping in groupings]
    updates = _all_updates(store, groupings)
    for place in report("totals", range(len(manifest.chunks)), progress):
        slots = {}
        for number, layer in enumerate(manifest.layers):
            slots[number] = _pieces(store, layer, place, numberings)
        updates_here = {name: by_chunk[place] for name, by_chunk in updates.items() if place in by_chunk}
        sums.fold(slots, updates_here)
        store.decoded(manifest.chunks[place].files[SLOTS].size)
    counts = [len(numbering) for numbering in numberings]
    types = group_types(manifest.columns)
    tables = [numbering.table(types) for numbering in numberings]
    return NewTotals(store.end_step, store.rows.height, groupings, sums.tensors(counts), tables)


def _all_updates(store: Store, groupings: Sequence[Grouping]) -> dict[str, UpdatesByChunk]:
    """Return the updates of each parameter; none, if sums of keys are all that is wanted."""
    if all(grouping.kind == "keys" for grouping in groupings):
        return {}
    names = [parameter.name for parameter in store.manifest.parameters]
    return {name: updates_by_chunk(store, name) for name in names}


def _pieces(store: Store, layer: Layer, place: int, numberings: Sequence[Numbering]) -> list[Piece]:
    """Return a layer's slots in one chunk: feature maps call by call, vectors all at once."""
    chunk = store.chunk_of(layer.name, place)
    if chunk is None:
        return []
    dtype = torch.float64 if store.manifest.dtype == "float64" else torch.float32
    has_errors = store.manifest.keep != "keys"
    steps = chunk.per_slot(chunk.blocks[:, 0])
    backwards = chunk.per_slot(chunk.blocks[:, 1])
    groups = [_groups(store, chunk, numbering) for numbering in numberings]
    pieces = []
    for low, high in _ranges(chunk):
        here = slice(low, high)
        keys: KeysOrGradients
        if has_errors:
            keys, errors = chunk.pairs(dtype, low, high)
        else:
            keys = chunk.keys(dtype, low, high)
            errors = None
        piece = Piece(
            keys=keys,
            errors=errors,
            steps=steps[here],
            backwards=backwards[here],
            groups=[codes[here] for codes in groups],
            written=None if chunk.silent is None else ~chunk.silent[here],
        )
        pieces.append(piece)
    return pieces


def _ranges(chunk: SlotChunk) -> list[tuple[int, int]]:
    """Return where pieces begin and end."""
    if chunk.layer.form != "maps" and chunk.sums is None:
        return [(0, chunk.slots)]
    begins = chunk.starts.tolist()
    ends = (chunk.starts + chunk.counts).tolist()
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]


def _groups(store: Store, chunk: SlotChunk, numbering: Numbering) -> Ints:
    """Return the group of each slot of a chunk, (slots,)."""
    columns = list(numbering.columns)
    has_row = chunk.rows() != NO_ROW
    table = store.slot_table(chunk, columns).filter(has_row)
    if any(table[name].null_count() for name in columns):
        raise QuestionError(
            f"by {'+'.join(columns)}: layer {chunk.layer.name!r} has another number of positions than the column."
        )
    groups = np.empty(chunk.slots, np.int64)
    values = {name: table[name].to_numpy() for name in columns}
    groups[has_row] = numbering.number(values, (table.height,))
    if not has_row.all():
        groups[~has_row] = numbering.number_without_row()
    return groups
