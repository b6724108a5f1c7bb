"""Segments: the stretches of training that influence looks at one by one, by default epochs; and their rows.

Slots are read by whole rows: a piece is a stretch of a chunk in which every row has equally many positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.curvature.loss_mean import LossMean
from dualform.errors import QuestionError
from dualform.layers.keys import Keys
from dualform.layers.streams import Layer
from dualform.store.format import NO_ROW
from dualform.store.reader import Store
from dualform.store.slots import PIECE_BYTES, SlotChunk

MOST = 15
"""How many epochs are used by default, spread over the run."""
SAMPLE = "sample_id"
"""The column that names samples, unless told otherwise."""


@dataclass(frozen=True)
class Segment:
    """Steps begin ≤ step < end; their rows, by number."""

    begin: int
    end: int
    first_row: int
    end_row: int
    moment: int
    """The step whose weights the queries are taken from."""


def segments(
    store: Store, end: int, given: int | Sequence[tuple[int, int]] = MOST, sample: str | None = None
) -> list[Segment]:
    """The segments of a run up to step `end`.

    given: at most this many epochs, spread over the run, first and last included; or the segments themselves, (begin, end) in steps.
    An epoch is as many steps as it takes to see each sample once, on average: rows / distinct entries of the column `sample`.
    """
    steps = store.rows["step"].to_numpy()
    steps = steps[steps < end]
    if not len(steps):
        raise QuestionError(f"there are no rows before step {end}: nothing has an influence yet.")
    pairs = _told(given, end) if not isinstance(given, int) else _epochs(store, end, given, sample)
    rows = [np.searchsorted(steps, pair) for pair in pairs]
    return [
        Segment(begin, stop, int(first), int(last), _moment(begin, stop, store.snapshot_steps()))
        for (begin, stop), (first, last) in zip(pairs, rows, strict=True)
        if last > first
    ]


def _moment(begin: int, end: int, snapshots: Sequence[int]) -> int:
    """The middle; or a snapshot in the middle half, if there is one: its weights need not be rebuilt."""
    middle = (begin + end) // 2
    near = [step for step in snapshots if 4 * abs(step - middle) <= end - begin]
    return min(near, key=lambda step: abs(step - middle), default=middle)


def _told(given: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    pairs = [(int(begin), int(stop)) for begin, stop in given]
    edges = [edge for pair in pairs for edge in pair]
    if (
        not pairs
        or any(begin >= stop for begin, stop in pairs)
        or edges != sorted(edges)
        or not 0 <= edges[0] <= edges[-1] <= end
    ):
        raise QuestionError(
            f"segments={given!r}: expected (begin, end) pairs of steps from 0 to {end}, one after the other, none empty."
        )
    return pairs


def _epochs(store: Store, end: int, most: int, sample: str | None) -> list[tuple[int, int]]:
    if isinstance(most, bool) or most < 1:
        raise QuestionError(f"segments={most!r}: expected at least 1, or (begin, end) pairs of steps.")
    count = min(_epoch_count(store, end, sample) or most, end)
    edges = np.linspace(0, end, count + 1).round().astype(int).tolist()
    chosen = [count // 2]
    if most > 1:
        chosen = np.linspace(0, count - 1, min(most, count)).round().astype(int).tolist()
    return [(edges[n], edges[n + 1]) for n in chosen]


def _epoch_count(store: Store, end: int, sample: str | None) -> int | None:
    """Return how many epochs there were; None: nothing tells samples apart."""
    columns = [column.name for column in store.manifest.columns if column.per == "row"]
    if sample is not None and sample not in columns:
        raise QuestionError(
            f"sample={sample!r}: there is no such column per row. Columns: {', '.join(columns) or 'none'}."
        )
    if sample is None and SAMPLE not in columns:
        return None
    rows = store.rows.filter(pl.col("step") < end)
    samples = rows[sample or SAMPLE].n_unique()
    return max(1, round(rows.height / max(1, samples)))


@dataclass(frozen=True)
class RowPiece:
    """The slots low to high of a chunk: rows × positions of them, from row `first_row` on, one row after the other."""

    chunk: SlotChunk
    low: int
    high: int
    positions: int
    first_row: int

    @property
    def rows(self) -> int:
        """How many rows."""
        return (self.high - self.low) // self.positions

    def keys(self, dtype: torch.dtype) -> Keys:
        """The slots' keys."""
        return self.chunk.keys(dtype, self.low, self.high)

    def errors(self, dtype: torch.dtype) -> Tensor:
        """The slots' error signals, as they are."""
        return self.chunk.errors(dtype, self.low, self.high)

    def loss_divisors(self, loss_mean: LossMean, dtype: torch.dtype) -> Tensor:
        """(rows,): by what the loss's mean has divided the error signals of each row."""
        return loss_mean.of_some(self.chunk, np.arange(self.low, self.high, self.positions), dtype)

    @property
    def written(self) -> Tensor | None:
        """(slots,): which slots wrote something; None: all."""
        silent = self.chunk.silent
        return None if silent is None else torch.from_numpy(~silent[self.low : self.high])


def row_pieces(chunk: SlotChunk, begin: int, end: int, width: int) -> Iterator[RowPiece]:
    """The slots of the rows begin to end (by their number), in stretches that decode to at most PIECE_BYTES.

    Slots that serve all rows are in no piece.
    """
    most = max(1, PIECE_BYTES // (8 * max(width, 1)))
    held: RowPiece | None = None
    firsts = chunk.blocks[:, 3]
    counts = chunk.blocks[:, 4]
    each = chunk.blocks[:, 5]
    here = (firsts != NO_ROW) & (firsts < end) & (firsts + counts > begin) & (each > 0)
    for block in np.flatnonzero(here).tolist():
        first = int(firsts[block])
        positions = int(each[block])
        start = int(chunk.starts[block])
        low = max(begin - first, 0)
        high = min(end - first, int(counts[block]))
        whole = RowPiece(chunk, start + low * positions, start + high * positions, positions, first + low)
        if held is not None:
            if _follows(held, whole) and whole.high - held.low <= most:
                held = RowPiece(chunk, held.low, whole.high, positions, held.first_row)
                continue
            yield from _cut(held, most)
        held = whole
    if held is not None:
        yield from _cut(held, most)


def _follows(one: RowPiece, other: RowPiece) -> bool:
    """Whether two pieces are one: feature maps are read call by call."""
    if one.chunk.layer.form == "maps" or one.positions != other.positions:
        return False
    return one.high == other.low and one.first_row + one.rows == other.first_row


def _cut(piece: RowPiece, most: int) -> Iterator[RowPiece]:
    size = max(1, most // piece.positions)
    for row in range(0, piece.rows, size):
        end_row = min(row + size, piece.rows)
        low = piece.low + row * piece.positions
        high = piece.low + end_row * piece.positions
        yield RowPiece(piece.chunk, low, high, piece.positions, piece.first_row + row)


class Window(NamedTuple):
    """Some rows, by their number, of one chunk (by its place)."""

    place: int
    begin: int
    end: int


def windows(store: Store, begin: int, end: int, size: int) -> Iterator[Window]:
    """The rows begin to end, chunk by chunk, at most `size` at a time."""
    for place, chunk in enumerate(store.manifest.chunks):
        first = max(begin, chunk.first_row)
        last = min(end, chunk.first_row + chunk.rows)
        for low in range(first, last, size):
            yield Window(place, low, min(low + size, last))


def pieces_in(
    store: Store, layer: Layer, window: Window, dtype: torch.dtype
) -> Iterator[tuple[slice, RowPiece, Keys, Tensor]]:
    """A layer's slots in a window: which of its rows, the piece, its keys and its error signals."""
    chunk = store.chunk_of(layer.name, window.place)
    if chunk is None:
        return
    for piece in row_pieces(chunk, window.begin, window.end, layer.d_in + layer.d_out):
        first = piece.first_row - window.begin
        yield slice(first, first + piece.rows), piece, piece.keys(dtype), piece.errors(dtype)


def one_slot_a_row(store: Store, layer: Layer, segment: Segment) -> bool:
    """Whether each row of a segment has one slot at most: not so if a module is called twice, or if two passes go backward, or if
    some slots serve all rows."""
    for chunk in store.chunks(layer.name, begin_step=segment.begin, end_step=segment.end):
        blocks = chunk.blocks[(chunk.blocks[:, 0] >= segment.begin) & (chunk.counts > 0)]
        firsts, counts, positions = blocks[np.argsort(blocks[:, 3]), 3:6].T
        if (positions != 1).any() or (firsts[1:] < firsts[:-1] + counts[:-1]).any() or (firsts == NO_ROW).any():
            return False
    return True
