"""Totals while recording: steps are collected for a stretch and folded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dualform.arrays import Bools
from dualform.errors import RecordingError
from dualform.layers.streams import Layer
from dualform.store import records
from dualform.store.encoding import decode
from dualform.store.format import NO_ROW, TOTAL_KINDS, Column, Grouping, Manifest
from dualform.store.reader import Store
from dualform.store.tables import group_types
from dualform.store.writer import NewTotals
from dualform.totals.fold import Accumulated
from dualform.totals.groups import Numbering
from dualform.totals.stretch import Piece, Rounded, StretchUpdates

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
        groupings.append(Grouping(names, "keys" if keep == "keys" else kind))
    return tuple(groupings)


def has_deltas(groupings: Sequence[Grouping]) -> bool:
    """Whether totals of any grouping are parts of the weights, and not sums of keys alone."""
    return any(grouping.kind != "keys" for grouping in groupings)


class OnlineTotals:
    """Collects finished steps and folds them, a stretch at a time.

    An exception that comes while sums are changed (Ctrl-C is held back, others may come) leaves some of them with a step and others
    without it. They are then of no use: `is_whole` is False from there on.
    """

    def __init__(
        self,
        manifest: Manifest,
        wanted: Sequence[Grouping],
        most_bytes: int,
        beginning: Mapping[str, torch.Tensor],
        kept: Store | None = None,
    ):
        """beginning: weights and optimizer state when recording began. kept: totals to go on with."""
        self._wide = manifest.dtype == "float64"
        self._keeps_slots = manifest.keep != "totals"
        self._deltas = has_deltas(wanted)
        self._layers: list[Layer] = list(manifest.layers)
        self._parameters = [p.name for p in manifest.parameters]
        self._most = most_bytes
        tensors = None if kept is None else {name: kept.totals()[name] for name in kept.totals()}
        self._sums = Accumulated(manifest, wanted, tensors, beginning)
        self._numbering = [
            Numbering(g.columns, None if kept is None else kept.groups(number)) for number, g in enumerate(wanted)
        ]
        self.collected: list[records.Step] = []
        """Steps that are yet to be folded, …"""
        self.nbytes = 0
        """… and how much memory they hold."""
        self.folded: list[records.Step] = []
        """Steps that are in the sums and were not fetched yet."""
        self._last_folded = -1
        self.is_whole = True
        self._row_groups: dict[int, list[np.ndarray[Any, Any]]] = {}

    def check(self, columns: Sequence[Column]) -> None:
        """Are there all the columns that totals are wanted for?"""
        names = [column.name for column in columns]
        missing = sorted({name for numbering in self._numbering for name in numbering.columns} - set(names))
        if missing:
            raise RecordingError(
                f"totals: batch() was given no column {', '.join(map(repr, missing))}; it has {', '.join(names)}."
            )

    def add(self, step: records.Step) -> None:
        """A step is finished. One that was added before is left out."""
        last = self.collected[-1].number if self.collected else self._last_folded
        if step.number <= last:
            return
        with self._changed():
            for rows in step.rows:
                if not rows.count:  # the batch after it begins with the same row
                    continue
                self._row_groups[rows.first_row] = [self._number(numbering, rows) for numbering in self._numbering]
        counts = [len(numbering) for numbering in self._numbering]
        needed = self._sums.nbytes(counts)
        if needed > self._most:
            listed = ", ".join(f"{'+'.join(n.columns)} {c:,}" for n, c in zip(self._numbering, counts, strict=True))
            raise RecordingError(
                f"totals would take {needed / 1e9:.1f} GB of memory for so many groups ({listed}); the limit is "
                f'{self._most / 1e9:.1f} GB. Keep key sums only for large columns, e.g. totals={{"sample_id": "keys"}}, or '
                f"raise totals_bytes=."
            )
        self.nbytes += step.nbytes
        self.collected.append(step)

    def fold(self) -> None:
        """Add what was collected to the sums."""
        steps = self.collected
        if not steps:
            return
        with self._changed():
            slots = {number: self._pieces(steps, number, layer) for number, layer in enumerate(self._layers)}
            names = self._parameters if self._deltas else []
            updates = {name: some for name in names if (some := self._updates(steps, name)) is not None}
            self._sums.fold(slots, updates)
            self._row_groups.clear()
            self.folded += steps
            self._last_folded = steps[-1].number
            self.nbytes = 0
            self.collected = []

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        """Within this, sums or groups are changed: by halves, if it ends with an exception."""
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

    def _number(self, numbering: Numbering, rows: records.Rows) -> np.ndarray[Any, Any]:
        shapes = [v.shape for n in numbering.columns if isinstance(v := rows.columns[n], np.ndarray) and v.ndim == 2]
        return numbering.number(rows.columns, shapes[0] if shapes else (rows.count,))

    def _pieces(self, steps: Sequence[records.Step], number: int, layer: Layer) -> list[Piece]:
        """A layer's slots: feature maps call by call, vectors all at once."""
        blocks = [(step.number, block) for step in steps for block in step.blocks if block.layer == number]
        if layer.form == "maps":
            return [self._piece([one], layer) for one in blocks if one[1].rows * one[1].positions]
        return [self._piece(blocks, layer)] if blocks else []

    def _piece(self, blocks: list[tuple[int, records.Block]], layer: Layer) -> Piece:
        counts = np.array([b.slots for _, b in blocks])
        dtype = torch.float64 if self._wide else torch.float32
        errors = [decode(b.errors.data, b.errors.exponents, dtype) for _, b in blocks if b.errors is not None]
        return Piece(
            records.keys_of_blocks(layer, [b for _, b in blocks], dtype),
            torch.cat(errors) if errors else None,
            np.repeat([n for n, _ in blocks], counts),
            np.repeat([b.backward for _, b in blocks], counts),
            [np.concatenate([self._of_block(g, b, layer) for _, b in blocks]) for g in range(len(self._numbering))],
            _written([b for _, b in blocks]),
        )

    def _of_block(self, grouping: int, block: records.Block, layer: Layer) -> np.ndarray[Any, Any]:
        if not block.rows:
            return np.zeros(0, dtype=np.int64)
        if block.first_row == NO_ROW:
            return np.full(block.positions, self._numbering[grouping].number_without_row(), dtype=np.int64)
        codes = self._row_groups[block.first_row][grouping]
        if codes.ndim == 1:
            return np.repeat(codes, block.positions)
        if codes.shape[1] != block.positions:
            raise RecordingError(
                f"totals by {'+'.join(self._numbering[grouping].columns)}: the column has {codes.shape[1]} positions, layer "
                f"{layer.name!r} has {block.positions}. Record the layers with these positions only (layers=…)."
            )
        return codes.reshape(-1)

    def _updates(self, steps: Sequence[records.Step], name: str) -> StretchUpdates | None:
        number = self._parameters.index(name)
        mine = [(s.number, u, u.parameters.index(number)) for s in steps for u in s.updates if number in u.parameters]
        if not mine:
            return None
        listed, settings = [u.factors[at] for _, u, at in mine], [u.settings[at] for _, u, at in mine]
        factors = np.zeros((len(mine), max(map(len, listed))))
        for row, some in enumerate(listed):
            factors[row, : len(some)] = some
        gradients = [gradient for _, u, at in mine if (gradient := u.gradients[at]) is not None]
        always = set[str].intersection(*map(set, settings))  # autocast may come and go
        return StretchUpdates(
            mine[0][1].optimizer,
            np.array([n for n, _, _ in mine], dtype=np.int64),
            {key: np.array([one[key] for one in settings]) for key in sorted(always)},
            factors,
            torch.from_numpy(np.stack(gradients)) if gradients else None,
            rounded=None if self._keeps_slots else _rounded(mine),
        )


def _rounded(updates: Sequence[tuple[int, records.Update, int]]) -> Rounded | None:
    """What rounding to 16 bits (autocast) has done to the gradients of a parameter's updates. updates: (step, update, its place there)."""
    units = np.array([update.settings[at].get("autocast", 0.0) for _, update, at in updates])
    if not units.any():
        return None
    residuals = np.array([update.residuals[at] for _, update, at in updates], dtype=np.float64)
    sizes = np.array([update.sizes[at] for _, update, at in updates], dtype=np.float64)
    rests = np.where(units > 0, np.nan_to_num(residuals * sizes), 0.0)
    return Rounded(units, rests)


def _written(blocks: Sequence[records.Block]) -> Bools | None:
    """(slots,): which slots of some blocks wrote something; None: all of them, as far as is known."""
    if all(block.silent is None for block in blocks):
        return None
    every = [np.ones(b.slots, np.bool_) if b.silent is None else ~b.silent for b in blocks]
    return np.concatenate(every)
