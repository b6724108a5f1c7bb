"""Totals while recording: steps are collected for a stretch and folded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from dualform.errors import RecordingError
from dualform.layers.layer import Layer
from dualform.record.stretch import Groups, StepBlock, blocks_of, piece_of, updates_of
from dualform.store import records
from dualform.store.format import NO_ROW, TOTAL_KINDS, Column, Grouping, Manifest
from dualform.store.reader import Store
from dualform.store.tables import group_types
from dualform.store.writer import NewTotals
from dualform.totals.fold import Accumulated
from dualform.totals.groups import Numbering
from dualform.totals.stretch import Piece, StretchUpdates

TotalsRequest = Sequence[str | Sequence[str]] | Mapping[str | tuple[str, ...], str]


def requested_groupings(totals: TotalsRequest | str | None, keep: str) -> tuple[Grouping, ...]:
    """Check what the user said in totals=."""
    if not totals:
        if keep == "totals":
            raise RecordingError('keep="totals" needs totals=: the columns to keep totals for, e.g. totals=["label"].')
        return ()
    if isinstance(totals, str):
        totals = [totals]
    kinds = totals.items() if isinstance(totals, Mapping) else [(columns, "both") for columns in totals]
    groupings = []
    for columns, kind in kinds:
        if kind not in TOTAL_KINDS:
            known = ", ".join(map(repr, TOTAL_KINDS))
            raise RecordingError(f"totals={{{columns!r}: {kind!r}}}: expected one of {known}.")
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        groupings.append(Grouping(names, _possible_kind(columns, kind, keep)))
    return tuple(groupings)


def has_deltas(groupings: Sequence[Grouping]) -> bool:
    """Whether totals of any grouping are parts of the weights, and not sums of keys alone."""
    return any(grouping.kind != "keys" for grouping in groupings)


def _possible_kind(columns: str | Sequence[str], kind: str, keep: str) -> str:
    """The kind of totals that can be kept beside what is kept of slots."""
    if keep == "keys":
        return "keys"
    if keep == "rows" and kind == "keys":
        raise RecordingError(
            f'totals={{{columns!r}: "keys"}}: keep="rows" keeps the gradients of rows, and no keys to sum. Say "deltas", or '
            f'keep="slots".'
        )
    return "deltas" if keep == "rows" else kind


class OnlineTotals:
    """Collects finished steps and folds them, a stretch at a time.

    An exception that comes while sums are changed (Ctrl-C is held back, others may come) leaves some of them with a step and others
    without it. They are then of no use: `is_whole` is False from there on.
    """

    def __init__(
        self,
        manifest: Manifest,
        groupings: Sequence[Grouping],
        most_bytes: int,
        beginning: Mapping[str, torch.Tensor],
        kept: Store | None = None,
    ):
        """beginning: weights and optimizer state when recording began. kept: a store whose totals are continued."""
        self._dtype = torch.float64 if manifest.dtype == "float64" else torch.float32
        self._keeps_slots = manifest.keep != "totals"
        self._layers = manifest.layers
        parameters = manifest.parameters if has_deltas(groupings) else ()
        self._parameters = [parameter.name for parameter in parameters]
        self._most_bytes = most_bytes
        tensors = {}
        if kept is not None:
            file = kept.totals()
            tensors = {name: file[name] for name in file}
        self._sums = Accumulated(manifest, groupings, tensors, beginning)
        self._numbering: list[Numbering] = []
        for number, grouping in enumerate(groupings):
            known = None if kept is None else kept.groups(number)
            self._numbering.append(Numbering(grouping.columns, known))
        self.collected: list[records.Step] = []
        """Steps that are yet to be folded, …"""
        self.nbytes = 0
        """… and how much memory they hold."""
        self.folded: list[records.Step] = []
        """Steps that are in the sums and were not fetched yet."""
        self._last_folded = -1
        self.is_whole = True
        self._row_groups: dict[int, list[Groups]] = {}
        """By the first row of a batch: for each grouping, the group of each row, or of each position of each row."""

    def check(self, columns: Sequence[Column]) -> None:
        """Refuse columns without those that totals are kept for."""
        names = [column.name for column in columns]
        wanted: set[str] = set()
        for numbering in self._numbering:
            wanted.update(numbering.columns)
        missing = sorted(wanted.difference(names))
        if missing:
            raise RecordingError(
                f"totals: batch() was given no column {', '.join(map(repr, missing))}; it has {', '.join(names)}."
            )

    def add(self, step: records.Step) -> None:
        """Add a finished step. One that was added before is left out."""
        last = self.collected[-1].number if self.collected else self._last_folded
        if step.number <= last:
            return
        with self._changing():
            for rows in step.rows:
                if rows.count:  # else the next batch begins with the same row
                    self._row_groups[rows.first_row] = [_groups(numbering, rows) for numbering in self._numbering]
        self._refuse_too_many_groups()
        self.nbytes += step.nbytes
        self.collected.append(step)

    def fold(self) -> None:
        """Add what was collected to the sums."""
        steps = self.collected
        if not steps:
            return
        with self._changing():
            self._sums.fold(self._collected_slots(), self._collected_updates())
            self._row_groups.clear()
            self.folded += steps
            self._last_folded = steps[-1].number
            self.nbytes = 0
            self.collected = []

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Within this, sums or groups change. If it ends with an exception, only some of them have."""
        if not self.is_whole:
            raise RecordingError("totals: an exception came while they were summed up, so they cannot be carried on.")
        self.is_whole = False
        yield
        self.is_whole = True

    def sealed(self, step: int, rows: int, columns: Sequence[Column]) -> NewTotals:
        """Everything folded so far, for the writer."""
        counts = [len(numbering) for numbering in self._numbering]
        types = group_types(columns)
        tables = [numbering.table(types) for numbering in self._numbering]
        return NewTotals(step, rows, self._sums.groupings, self._sums.tensors(counts), tables)

    def _refuse_too_many_groups(self) -> None:
        counts = [len(numbering) for numbering in self._numbering]
        needed = self._sums.nbytes(counts)
        if needed <= self._most_bytes:
            return
        listed = []
        for numbering, count in zip(self._numbering, counts, strict=True):
            listed.append(f"{'+'.join(numbering.columns)} {count:,}")
        raise RecordingError(
            f"totals would take {needed / 1e9:.1f} GB of memory for this many groups ({', '.join(listed)}); the limit is "
            f"{self._most_bytes / 1e9:.1f} GB. Keep only sums of keys for columns with many values, e.g. "
            f'totals={{"sample_id": "keys"}}, or raise totals_bytes=.'
        )

    def _collected_slots(self) -> dict[int, list[Piece]]:
        """By the layer's number: its slots, feature maps call by call, vectors all at once."""
        slots = {}
        for number, layer in enumerate(self._layers):
            calls = blocks_of(self.collected, number)
            if layer.form == "maps":
                parts = [[call] for call in calls if call.slots]
            else:
                of_slots = [call for call in calls if not call.block.is_gradient]
                of_rows = [call for call in calls if call.block.is_gradient]
                parts = [part for part in (of_slots, of_rows) if part]
            slots[number] = [self._piece(part, layer) for part in parts]
        return slots

    def _collected_updates(self) -> dict[str, StretchUpdates]:
        """By the parameter's name."""
        updates = {}
        for number, name in enumerate(self._parameters):
            of_parameter = updates_of(self.collected, number, keeps_slots=self._keeps_slots)
            if of_parameter is not None:
                updates[name] = of_parameter
        return updates

    def _piece(self, calls: Sequence[StepBlock], layer: Layer) -> Piece:
        groups = []
        for grouping in range(len(self._numbering)):
            of_calls = [self._groups_of_slots(grouping, call.block, layer) for call in calls]
            groups.append(np.concatenate(of_calls))
        return piece_of(calls, layer, groups, self._dtype)

    def _groups_of_slots(self, grouping: int, block: records.Block, layer: Layer) -> Groups:
        if not block.rows:
            return np.zeros(0, dtype=np.int64)
        numbering = self._numbering[grouping]
        if block.first_row == NO_ROW:
            return np.full(block.positions, numbering.number_without_row(), dtype=np.int64)
        groups = self._row_groups[block.first_row][grouping]
        if groups.ndim == 1:
            return np.repeat(groups, block.positions)
        if groups.shape[1] != block.positions:
            raise RecordingError(
                f"totals by {'+'.join(numbering.columns)}: the column has {groups.shape[1]} positions, layer "
                f"{layer.name!r} has {block.positions}. Record only layers with these positions (layers=…)."
            )
        return groups.reshape(-1)


def _groups(numbering: Numbering, rows: records.Rows) -> Groups:
    """The group of each row, or of each position of each row."""
    shape: tuple[int, ...] = (rows.count,)
    for name in numbering.columns:
        values = rows.columns[name]
        if isinstance(values, np.ndarray) and values.ndim == 2:
            shape = values.shape
            break
    return numbering.number(rows.columns, shape)
