"""Totals from the slots of a finished recording."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import torch

from dualform.errors import NotRecordedError, QuestionError
from dualform.store.format import Column, Grouping
from dualform.store.reader import Store
from dualform.store.tables import schema
from dualform.store.writer import NewTotals, locked, write_totals
from dualform.totals.fold import Accumulated, Slots, Updates
from dualform.totals.groups import Numbering

KINDS = ("keys", "deltas", "both")
FIXED = {"step", "parameter", "optimizer", "factors", "residual", "after", "gradient_kept"}
"""The columns of the updates that are no settings."""


def build_totals(
    path: str | os.PathLike[str],
    by: str | Sequence[str],
    *,
    kind: str = "both",
    progress: Callable[[str, int, int], None] | None = None,
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
        old = store.manifest.totals
        others = [g for g in old.groupings if g.columns != columns] if old and old.step == store.end_step else []
        groupings = [*others, Grouping(columns, kind)]
        write_totals(folder, store.manifest, _fold(store, groupings, progress))


def _fold(store: Store, groupings: Sequence[Grouping], progress: Callable[[str, int, int], None] | None) -> NewTotals:
    sums = Accumulated(store.manifest, groupings)
    numberings = [Numbering(g.columns) for g in groupings]
    work, done = len(store.manifest.chunks) * len(store.manifest.layers), 0
    for place, chunk in enumerate(store.manifest.chunks):
        stretch = (chunk.first_step, chunk.end_step)
        for number, layer in enumerate(store.manifest.layers):
            if progress is not None:
                progress("totals", done, work)
            names = [name for name in (layer.weight, layer.bias) if name is not None]
            updates = (
                {}
                if store.manifest.keep == "keys"
                else {name: some for name in names if (some := _updates(store, place, name)) is not None}
            )
            slots = _slots(store, layer.name, stretch, numberings)
            sums.fold(number, layer, slots, updates)
            done += 1
    if progress is not None:
        progress("totals", work, work)
    counts = [len(numbering) for numbering in numberings]
    types = schema([Column(c.name, c.type, "row") for c in store.manifest.columns])
    tables = [numbering.table(types) for numbering in numberings]
    return NewTotals(store.end_step, store.rows.height, groupings, sums.tensors(counts), tables)


def _slots(store: Store, layer: str, stretch: tuple[int, int], numberings: Sequence[Numbering]) -> Slots | None:
    begin, end = stretch
    for chunk in store.chunks(layer, begin_step=begin, end_step=end):
        wide = store.manifest.dtype == "float64"
        dtype = torch.float64 if wide else torch.float32
        columns = sorted({name for numbering in numberings for name in numbering.columns})
        table = store.slot_table(chunk, columns)
        groups = []
        for numbering in numberings:
            values = {name: table[name].to_numpy() for name in numbering.columns}
            if any(table[name].null_count() for name in numbering.columns):
                raise QuestionError(
                    f"by {'+'.join(numbering.columns)}: layer {layer!r} has another number of positions than the column."
                )
            groups.append(numbering.number(values, (chunk.slots,)))
        errors = None if store.manifest.keep == "keys" else chunk.errors(dtype)
        return Slots(
            chunk.keys(dtype), errors, chunk.per_slot(chunk.blocks[:, 0]), chunk.per_slot(chunk.blocks[:, 1]), groups
        )
    return None


def _updates(store: Store, place: int, parameter: str) -> Updates | None:
    number = store.parameter(parameter)
    mine = store.updates_in(place).filter(pl.col("parameter") == number)
    if not mine.height:
        return None
    lists = mine["factors"].to_list()
    factors = np.zeros((len(lists), max(len(row) for row in lists)))
    for row, some in enumerate(lists):
        factors[row, : len(some)] = some
    settings = {name: mine[name].to_numpy().astype(np.float64) for name in mine.columns if name not in FIXED}
    steps = mine["step"].to_numpy().astype(np.int64)
    return Updates(mine["optimizer"][0], steps, settings, factors, store.gradients_in(place, parameter))
