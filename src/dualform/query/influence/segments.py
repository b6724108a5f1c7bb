"""Segments: the stretches of training that influence looks at one by one, by default epochs; and how their rows are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.curvature.maps import LinearMap
from dualform.errors import QuestionError
from dualform.layers.keys import KeysOrGradients, RowGradients
from dualform.layers.layer import Layer
from dualform.query.influence.rows import RowPiece, row_pieces, slices
from dualform.store.collection import Span, collection_of, spans_of
from dualform.store.format import NO_ROW
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk

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

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.end_row - self.first_row

    def windows(self, store: Store, size: int) -> Iterator[Window]:
        """Return its rows, chunk by chunk, at most `size` at a time."""
        return windows(store, self.first_row, self.end_row, size)


def segments(
    store: Store, end: int, given: int | Sequence[tuple[int, int]] = MOST, sample: str | None = None
) -> list[Segment]:
    """Return the segments of a run up to step `end`.

    given: at most this many epochs, spread over the run, first and last included; or the segments themselves, (begin, end) in steps.
    An epoch is as many steps as it takes to see each sample once, on average: rows / distinct entries of the column `sample`. Of a
    collection, the checkpoints take the place of epochs.
    """
    steps = store.rows["step"].to_numpy()
    steps = steps[steps < end]
    if not len(steps):
        raise QuestionError(f"there are no rows before step {end}: nothing has an influence yet.")
    if not isinstance(given, int):
        ranges = _checked(given, end)
    elif collection_of(store) is not None:
        ranges = _checkpoints(store, end, given)
    else:
        ranges = _epochs(store, end, given, sample)
    snapshots = store.snapshot_steps()
    found = []
    for begin, stop in ranges:
        first_row, end_row = np.searchsorted(steps, [begin, stop]).tolist()
        if end_row > first_row:
            moment = stop if collection_of(store) is not None else _moment(begin, stop, snapshots)
            found.append(Segment(begin, stop, first_row, end_row, moment))
    return found


def _checkpoints(store: Store, end: int, most: int) -> list[tuple[int, int]]:
    """Return the steps of the checkpoints of a collection; of a single one, the last."""
    _check_count(most)
    spans = [(span.begin, span.end) for span in spans_of(store, end) if _has_weights(store, span)]
    if most == 1:
        return spans[-1:]
    return [spans[place] for place in evenly_spaced(0, len(spans) - 1, min(most, len(spans)))]


def _has_weights(store: Store, span: Span) -> bool:
    """Return whether a checkpoint's weights are stored. A kill right behind its first batch may have kept them from the disk."""
    return not span.begin or any(span.begin < step <= span.end for step in store.snapshot_steps())


def _moment(begin: int, end: int, snapshots: Sequence[int]) -> int:
    """Return the middle; or a snapshot in the middle half, if there is one: its weights need not be rebuilt."""
    middle = (begin + end) // 2
    near = [step for step in snapshots if 4 * abs(step - middle) <= end - begin]
    return min(near, key=lambda step: abs(step - middle), default=middle)


def _checked(given: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    pairs = [(int(begin), int(stop)) for begin, stop in given]
    edges = [0, *(edge for pair in pairs for edge in pair), end]
    in_order = edges == sorted(edges)
    if not pairs or not in_order or any(begin == stop for begin, stop in pairs):
        raise QuestionError(
            f"segments={given!r}: expected (begin, end) pairs of steps from 0 to {end}, one after the other, none empty."
        )
    return pairs


def _epochs(
    store: Store,
    end: int,
    most: int,
    sample: str | None,
) -> list[tuple[int, int]]:
    _check_count(most)
    count = min(_epoch_count(store, end, sample) or most, end)
    epochs = list(pairwise(evenly_spaced(0, end, count + 1)))
    if most == 1:
        return [epochs[count // 2]]
    return [epochs[place] for place in evenly_spaced(0, count - 1, min(most, count))]


def _check_count(most: int) -> None:
    if isinstance(most, bool) or most < 1:
        raise QuestionError(f"segments={most!r}: expected at least 1, or (begin, end) pairs of steps.")


def _epoch_count(store: Store, end: int, sample: str | None) -> int | None:
    """Return how many epochs there were; None: nothing tells samples apart."""
    columns = [column.name for column in store.manifest.columns if column.per == "row"]
    if sample is None:
        if SAMPLE not in columns:
            return None
        sample = SAMPLE
    if sample not in columns:
        raise QuestionError(
            f"sample={sample!r}: there is no such column per row. Columns: {', '.join(columns) or 'none'}."
        )
    rows = store.rows.filter(pl.col("step") < end)
    samples = rows[sample].n_unique()
    return max(1, round(rows.height / max(1, samples)))


def evenly_spaced(first: int, last: int, count: int) -> list[int]:
    """Return whole numbers from first to last, both included."""
    numbers: list[int] = np.linspace(first, last, count).round().astype(int).tolist()
    return numbers


class Window(NamedTuple):
    """Some rows, by their number, of one chunk (by its place)."""

    place: int
    begin: int
    end: int

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.end - self.begin


def windows(
    store: Store,
    begin: int,
    end: int,
    size: int,
) -> Iterator[Window]:
    """Return the rows begin to end, chunk by chunk, at most `size` at a time."""
    for place, chunk in enumerate(store.manifest.chunks):
        first = max(begin, chunk.first_row)
        last = min(end, chunk.first_row + chunk.rows)
        for rows in slices(first, last, size):
            yield Window(place, rows.start, rows.stop)


class DecodedPiece(NamedTuple):
    """Slots of some rows of a window."""

    here: slice
    """Which rows of the window."""
    piece: RowPiece
    keys: KeysOrGradients
    errors: Tensor

    def sides(self, linear_map: LinearMap) -> tuple[Tensor, Tensor]:
        """Return keys and error signals as a linear map sees them."""
        assert not isinstance(self.keys, RowGradients)
        return linear_map.key_side(self.keys), linear_map.error_side(self.keys, self.errors)


def pieces_in(
    store: Store,
    layer: Layer,
    window: Window,
    dtype: torch.dtype,
) -> Iterator[DecodedPiece]:
    """Return a layer's slots in a window."""
    for piece in undecoded_pieces(store, layer, window, layer.d_in + layer.d_out):
        here = piece.places(window.begin)
        yield DecodedPiece(here, piece, *piece.pairs(dtype))


def undecoded_pieces(
    store: Store,
    layer: Layer,
    window: Window,
    width: int,
) -> Iterator[RowPiece]:
    """Return the same for callers that read keys or error signals only. width: how many numbers they read of each slot."""
    chunk = store.chunk_of(layer.name, window.place)
    if chunk is not None:
        yield from row_pieces(chunk, window.begin, window.end, width)


def blocks_in(store: Store, layer: Layer, segment: Segment) -> Iterator[tuple[SlotChunk, list[int]]]:
    """Return for each chunk the blocks, by their places, that have slots in a segment."""
    for chunk in store.chunks(layer.name, begin_step=segment.begin, end_step=segment.end):
        is_inside = (chunk.blocks[:, 0] >= segment.begin) & (chunk.counts > 0)
        yield chunk, np.flatnonzero(is_inside).tolist()


def one_slot_a_row(store: Store, layer: Layer, segment: Segment) -> bool:
    """Return whether each row of a segment has one slot at most.

    Not so if a module is called twice, if two passes go backward, if some slots serve all rows, or if those of a row were summed.
    """
    if store.is_summed(layer.name):
        return False
    for chunk, places in blocks_in(store, layer, segment):
        blocks = chunk.blocks[places]
        by_row = blocks[np.argsort(blocks[:, 3])]
        first_rows, rows, positions = by_row[:, 3:6].T
        overlaps = first_rows[1:] < first_rows[:-1] + rows[:-1]
        if (positions != 1).any() or overlaps.any() or (first_rows == NO_ROW).any():
            return False
    return True
