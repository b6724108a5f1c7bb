"""Totals from the slots of a finished recording."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import polars as pl
import torch

from dualform.errors import NotRecordedError, QuestionError
from dualform.layers.keys import KeysOrGradients
from dualform.progress import Progress, report
from dualform.recursions import KINDS as KINDS_OF
from dualform.recursions import Ints, Walked
from dualform.store.collection import refuse_collected
from dualform.store.files import files_at, writing
from dualform.store.format import NO_ROW, SLOTS, Column, Grouping
from dualform.store.lock import locked
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk
from dualform.store.tables import factor_table, row_types, settings_of
from dualform.store.writer import NewTotals, write_totals
from dualform.totals.fold import Accumulated
from dualform.totals.group_tensors import OF
from dualform.totals.groups import Numbering
from dualform.totals.stretch import Piece, StretchUpdates

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
    files = files_at(path)
    columns = (by,) if isinstance(by, str) else tuple(by)
    with locked(files):
        store = Store(files)
        if store.manifest.keep == "totals":
            raise NotRecordedError(f"{files.location} keeps totals only: there are no slots to build others from.")
        _check_columns(store, by, columns)
        kind = _possible_kind(store, kind)
        groupings = [*_other_groupings(store, columns), Grouping(columns, kind)]
        totals = _fold(store, groupings, progress)
        with writing(files.location):
            write_totals(files, store.manifest, totals)


def _check_columns(store: Store, by: str | Sequence[str], columns: tuple[str, ...]) -> None:
    known = [column.name for column in store.manifest.columns]
    known_text = ", ".join(known) or "none"
    unknown = [name for name in columns if name not in known]
    if unknown:
        raise QuestionError(f"by={by!r}: there is no column {', '.join(map(repr, unknown))}. Columns: {known_text}.")
    if not columns or len(set(columns)) < len(columns):
        raise QuestionError(f"by={by!r}: expected one or several columns, each once. Columns: {known_text}.")


def _possible_kind(store: Store, kind: str) -> str:
    """Return the kind of totals that is asked for, or "keys" or "deltas" where nothing else was recorded."""
    if kind not in KINDS:
        raise QuestionError(f"kind={kind!r}: expected one of {', '.join(map(repr, KINDS))}.")
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
    for layer in store.manifest.layers:
        if layer.outputs:
            raise NotRecordedError(
                f"kind={kind!r}: of layer {layer.name!r} only the error signals of some output units were kept (outputs=), so a "
                f'group\'s part of its weights is not known. Ask kind="keys".'
            )
    refuse_collected(store, f"kind={kind!r}")
    unknown = sorted(set(store.updates["optimizer"].to_list()) - set(KINDS_OF))
    if unknown:
        raise NotRecordedError(
            f"kind={kind!r}: the model was trained by {', '.join(unknown)}, whose updates cannot be replayed, so a group's part of its weights is "
            f'not known. Ask kind="keys".'
        )
    return kind


def _other_groupings(store: Store, columns: tuple[str, ...]) -> list[Grouping]:
    """Return the groupings of totals that are there, and are built again with the new ones."""
    totals = store.manifest.totals
    if totals is None or totals.step != store.end_step:
        return []
    return [grouping for grouping in totals.groupings if grouping.columns != columns]


def _fold(store: Store, groupings: Sequence[Grouping], progress: Progress | None) -> NewTotals:
    manifest = store.manifest
    first = store.snapshot(0)
    sums = Accumulated(manifest, groupings, beginning={name: first[name] for name in first})
    numberings = [Numbering(grouping.columns) for grouping in groupings]
    updates: dict[str, list[StretchUpdates | None]] = {}
    if any(grouping.kind != "keys" for grouping in groupings):
        updates = _all_updates(store)
    for place in report("totals", range(len(manifest.chunks)), progress):
        _fold_chunk(store, place, sums, numberings, updates)
        store.decoded(manifest.chunks[place].files[SLOTS].size)
    counts = [len(numbering) for numbering in numberings]
    types = row_types([Column(column.name, column.type, "row") for column in manifest.columns])
    tables = [numbering.table(types) for numbering in numberings]
    return NewTotals(store.end_step, store.rows.height, groupings, sums.tensors(counts), tables)


def _fold_chunk(
    store: Store,
    place: int,
    sums: Accumulated,
    numberings: Sequence[Numbering],
    updates: Mapping[str, Sequence[StretchUpdates | None]],
) -> None:
    slots = {}
    for number, layer in enumerate(store.manifest.layers):
        slots[number] = _pieces(store, layer.name, place, numberings)
    here = {}
    for name, of_chunks in updates.items():
        of_chunk = of_chunks[place]
        if of_chunk is not None:
            here[name] = of_chunk
    sums.fold(slots, here)


def _pieces(store: Store, layer: str, place: int, numberings: Sequence[Numbering]) -> list[Piece]:
    """A layer's slots in one chunk: feature maps call by call, vectors all at once."""
    chunk = store.chunk_of(layer, place)
    if chunk is None:
        return []
    dtype = torch.float64 if store.manifest.dtype == "float64" else torch.float32
    groups = [_groups(store, chunk, numbering) for numbering in numberings]
    steps = chunk.per_slot(chunk.blocks[:, 0])
    backwards = chunk.per_slot(chunk.blocks[:, 1])
    ranges = [(0, chunk.slots)]
    if chunk.layer.form == "maps" or chunk.sums is not None:
        ends = chunk.starts + chunk.counts
        ranges = list(zip(chunk.starts.tolist(), ends.tolist(), strict=True))
    pieces = []
    for low, high in ranges:
        if low == high:
            continue
        keys: KeysOrGradients
        if store.manifest.keep == "keys":
            keys, errors = chunk.keys(dtype, low, high), None
        else:
            keys, errors = chunk.pairs(dtype, low, high)
        piece = Piece(
            keys=keys,
            errors=errors,
            steps=steps[low:high],
            backwards=backwards[low:high],
            groups=[codes[low:high] for codes in groups],
            written=None if chunk.silent is None else ~chunk.silent[low:high],
        )
        pieces.append(piece)
    return pieces


def _groups(store: Store, chunk: SlotChunk, numbering: Numbering) -> Ints:
    """Return the group of each slot of a chunk, (slots,)."""
    has_row = chunk.rows() != NO_ROW
    table = store.slot_table(chunk, list(numbering.columns)).filter(has_row)
    if any(table[name].null_count() for name in numbering.columns):
        raise QuestionError(
            f"by {'+'.join(numbering.columns)}: layer {chunk.layer.name!r} has another number of positions than the column."
        )
    groups = np.empty(chunk.slots, np.int64)
    values = {name: table[name].to_numpy() for name in numbering.columns}
    groups[has_row] = numbering.number(values, (table.height,))
    if not has_row.all():
        groups[~has_row] = numbering.number_without_row()
    return groups


def _all_updates(store: Store) -> dict[str, list[StretchUpdates | None]]:
    """Return the updates of each parameter in each chunk."""
    return {parameter.name: _updates(store, parameter.name) for parameter in store.manifest.parameters}


def _updates(store: Store, parameter: str) -> list[StretchUpdates | None]:
    """Return a parameter's updates in each chunk; None: it was not updated there.

    The run is over, so coefficients that are numbers are taken at its end: what one chunk wrote need not be carried through the
    later ones, and the running average holds little of all but the last.
    """
    in_chunks = [_updates_in(store, place, parameter) for place in range(len(store.manifest.chunks))]
    kinds = {updates.kind for updates in in_chunks if updates is not None}
    if not kinds or any(KINDS_OF[kind].elementwise for kind in kinds):
        return in_chunks
    reaching = _coefficients_at_the_end(in_chunks)
    rounding = float(np.finfo(np.float64 if store.manifest.dtype == "float64" else np.float32).eps)
    for of in OF:
        _drop_lost(of, list(reaching.values()), rounding)
    return [updates and replace(updates, reaching=reaching[place]) for place, updates in enumerate(in_chunks)]


def _drop_lost(of: str, reaching: Sequence[dict[str, Walked]], rounding: float) -> None:
    """Set coefficients to zero that are lost in the rounding of the largest, even if there are many."""
    largest = max(float(np.abs(walked[of].c).max(initial=0)) for walked in reaching)
    for walked in reaching:
        is_lost = np.abs(walked[of].c) < rounding**2 * largest
        walked[of] = replace(walked[of], c=np.where(is_lost, 0.0, walked[of].c))


def _coefficients_at_the_end(in_chunks: Sequence[StretchUpdates | None]) -> dict[int, dict[str, Walked]]:
    """Return the coefficients of each chunk's updates at the end of the run, by what is kept of a group."""
    coefficients: dict[int, dict[str, Walked]] = {}
    later: dict[str, Walked] = {}
    for place in reversed(range(len(in_chunks))):
        updates = in_chunks[place]
        if updates is None:
            continue
        later = {of: updates.walked(of, later.get(of)) for of in OF}
        coefficients[place] = dict(later)
    return coefficients


def _updates_in(store: Store, place: int, parameter: str) -> StretchUpdates | None:
    number = store.parameter(parameter)
    lines = store.updates_in(place).filter(pl.col("parameter") == number)
    if not lines.height:
        return None
    return StretchUpdates(
        kind=lines["optimizer"][0],
        steps=lines["step"].to_numpy().astype(np.int64),
        settings=settings_of(lines),
        factors=factor_table(lines["factors"]),
        gradients=store.gradients_in(place, parameter),
    )
