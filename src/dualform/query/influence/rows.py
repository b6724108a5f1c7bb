"""The slots of a layer, read by whole rows: a piece is a stretch of a chunk in which every row has equally many positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.curvature.loss_mean import LossMean
from dualform.layers.keys import Keys, KeysOrGradients
from dualform.store.format import NO_ROW
from dualform.store.slots import PIECE_BYTES, SlotChunk


@dataclass(frozen=True)
class RowPiece:
    """The slots low to high of a chunk: rows × positions of them, from row `first_row` on, one row after the other."""

    chunk: SlotChunk
    low: int
    high: int
    positions: int
    first_row: int

    @staticmethod
    def of_block(chunk: SlotChunk, block: int) -> RowPiece:
        """Return all slots of a block."""
        first_row, rows, positions = chunk.blocks[block, 3:6].tolist()
        start = int(chunk.starts[block])
        return RowPiece(chunk, start, start + rows * positions, positions, first_row)

    @property
    def rows(self) -> int:
        """How many rows."""
        return (self.high - self.low) // self.positions

    @property
    def end_row(self) -> int:
        """The row after the last."""
        return self.first_row + self.rows

    @property
    def written(self) -> Tensor | None:
        """(slots,): which slots wrote something; None: all."""
        silent = self.chunk.silent
        return None if silent is None else torch.from_numpy(~silent[self.low : self.high])

    def part(self, first_row: int, end_row: int) -> RowPiece:
        """Return the slots of some of its rows."""
        low = self.low + (first_row - self.first_row) * self.positions
        high = self.low + (end_row - self.first_row) * self.positions
        return RowPiece(self.chunk, low, high, self.positions, first_row)

    def places(self, first_row: int) -> slice:
        """Return where its rows stand among those from `first_row` on."""
        return slice(self.first_row - first_row, self.end_row - first_row)

    def keys(self, dtype: torch.dtype) -> Keys:
        """Return the slots' keys."""
        return self.chunk.keys(dtype, self.low, self.high)

    def errors(self, dtype: torch.dtype) -> Tensor:
        """Return the slots' error signals, as they are."""
        return self.chunk.errors(dtype, self.low, self.high)

    def pairs(self, dtype: torch.dtype) -> tuple[KeysOrGradients, Tensor]:
        """Return both, or the gradients of the rows."""
        return self.chunk.pairs(dtype, self.low, self.high)

    def loss_divisors(self, loss_mean: LossMean, dtype: torch.dtype) -> Tensor:
        """Return by what the loss's mean has divided the error signals of each row, (rows,)."""
        first_slots = np.arange(self.low, self.high, self.positions)
        return loss_mean.of_some(self.chunk, first_slots, dtype)


def row_pieces(
    chunk: SlotChunk,
    begin: int,
    end: int,
    width: int,
) -> Iterator[RowPiece]:
    """Return the slots of the rows begin to end (by their number), in stretches that decode to at most PIECE_BYTES.

    Slots that serve all rows are in no piece.
    """
    most = slots_at_a_time(width)
    current: RowPiece | None = None
    for piece in _block_pieces(chunk, begin, end):
        if current is None:
            current = piece
        elif _is_continued(current, piece) and piece.high - current.low <= most:
            current = RowPiece(chunk, current.low, piece.high, current.positions, current.first_row)
        else:
            yield from _cut(current, most)
            current = piece
    if current is not None:
        yield from _cut(current, most)


def _most_slots(piece: RowPiece, most: int) -> int:
    """Return how many slots of a piece decode to no more memory: the gradients of rows have more numbers than a slot."""
    if not piece.chunk.is_gradient(piece.low, piece.high):
        return most
    return min(most, slots_at_a_time(piece.chunk.layer.gradient_size))


def _block_pieces(chunk: SlotChunk, begin: int, end: int) -> Iterator[RowPiece]:
    """Return the slots of the rows begin to end, block by block."""
    first_rows, rows, positions = chunk.blocks[:, 3:6].T
    is_inside = (first_rows < end) & (first_rows + rows > begin)
    has_rows = (first_rows != NO_ROW) & (positions > 0)
    for block in np.flatnonzero(is_inside & has_rows).tolist():
        whole = RowPiece.of_block(chunk, block)
        yield whole.part(max(begin, whole.first_row), min(end, whole.end_row))


def _is_continued(piece: RowPiece, following: RowPiece) -> bool:
    """Return whether two pieces can be read as one: feature maps are read block by block."""
    chunk = piece.chunk
    if chunk.layer.form == "maps" or piece.positions != following.positions:
        return False
    if chunk.is_gradient(piece.low, piece.high) != chunk.is_gradient(following.low, following.high):
        return False
    return piece.high == following.low and piece.end_row == following.first_row


def _cut(piece: RowPiece, most: int) -> Iterator[RowPiece]:
    """Cut a piece into smaller ones with at most `most` slots each; a row stays whole."""
    rows_at_a_time = max(1, _most_slots(piece, most) // piece.positions)
    for rows in slices(piece.first_row, piece.end_row, rows_at_a_time):
        yield piece.part(rows.start, rows.stop)


def slots_at_a_time(width: int) -> int:
    """Return how many slots decode to at most PIECE_BYTES, if `width` numbers are needed for each."""
    return max(1, PIECE_BYTES // (8 * max(width, 1)))


def slices(begin: int, end: int, size: int) -> Iterator[slice]:
    """Cut a range into slices of at most this size."""
    for low in range(begin, end, size):
        yield slice(low, min(low + size, end))
