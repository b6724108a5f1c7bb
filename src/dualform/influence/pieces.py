"""Slots by whole rows: the stretches of a chunk in which every row has equally many positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualform.influence.segments import Segment
from dualform.layers.keys import Keys
from dualform.layers.streams import Layer
from dualform.store.format import NO_ROW
from dualform.store.reader import Store
from dualform.store.slots import PIECE_BYTES, SlotChunk


@dataclass(frozen=True)
class Piece:
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

    @property
    def written(self) -> Tensor | None:
        """(slots,): which slots wrote something; None: all."""
        silent = self.chunk.silent
        return None if silent is None else torch.from_numpy(~silent[self.low : self.high])


def pieces(chunk: SlotChunk, begin: int, end: int, width: int) -> Iterator[Piece]:
    """The slots of the rows begin to end (by their number), in stretches that decode to at most PIECE_BYTES.

    Slots that serve all rows are in no piece.
    """
    most = max(1, PIECE_BYTES // (8 * max(width, 1)))
    held: Piece | None = None
    firsts, counts, each = chunk.blocks[:, 3], chunk.blocks[:, 4], chunk.blocks[:, 5]
    here = (firsts != NO_ROW) & (firsts < end) & (firsts + counts > begin) & (each > 0)
    for block in np.flatnonzero(here).tolist():
        first, positions, start = int(firsts[block]), int(each[block]), int(chunk.starts[block])
        low, high = max(begin - first, 0), min(end - first, int(counts[block]))
        whole = Piece(chunk, start + low * positions, start + high * positions, positions, first + low)
        if held is not None:
            if _follows(held, whole) and whole.high - held.low <= most:
                held = Piece(chunk, held.low, whole.high, positions, held.first_row)
                continue
            yield from _cut(held, most)
        held = whole
    if held is not None:
        yield from _cut(held, most)


def _follows(one: Piece, other: Piece) -> bool:
    """Whether two pieces are one: feature maps are read call by call."""
    alike = one.chunk.layer.form != "maps" and one.positions == other.positions and one.high == other.low
    return alike and one.first_row + one.rows == other.first_row


def _cut(piece: Piece, most: int) -> Iterator[Piece]:
    some = max(1, most // piece.positions)
    for row in range(0, piece.rows, some):
        low, high = (piece.low + n * piece.positions for n in (row, min(row + some, piece.rows)))
        yield Piece(piece.chunk, low, high, piece.positions, piece.first_row + row)


class Window(NamedTuple):
    """Some rows, by their number, of one chunk (by its place)."""

    place: int
    begin: int
    end: int


def windows(store: Store, begin: int, end: int, size: int) -> Iterator[Window]:
    """The rows begin to end, chunk by chunk, at most `size` at a time."""
    for place, chunk in enumerate(store.manifest.chunks):
        first, last = max(begin, chunk.first_row), min(end, chunk.first_row + chunk.rows)
        for low in range(first, last, size):
            yield Window(place, low, min(low + size, last))


def pieces_in(
    store: Store, layer: Layer, window: Window, dtype: torch.dtype
) -> Iterator[tuple[slice, Piece, Keys, Tensor]]:
    """A layer's slots in a window: which of its rows, the piece, its keys and its error signals."""
    chunk = store.chunk_of(layer.name, window.place)
    if chunk is None:
        return
    for piece in pieces(chunk, window.begin, window.end, layer.d_in + layer.d_out):
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
