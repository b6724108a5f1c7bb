"""The best rows by influence, without reading all keys.

What a layer gives to a row is at most |slope · error signal| · ‖query‖ · ‖key‖, in norms of the whitened space, √(keyᵀ (A + αI)⁻¹ key),
which were kept with the curvature. Most samples are learned after a while, and their error signals are small: no key makes up for that.
Segments are searched from the last to the first, since scores are larger the less is left to learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.curvature.maps import linear_maps
from dualform.layers.keys import Vectors
from dualform.layers.streams import Layer
from dualform.query.influence.products import Products
from dualform.query.influence.scores import LinearScores
from dualform.query.influence.segments import RowPiece, Window, row_pieces, windows
from dualform.query.ranking import Ranking, rank_keys, side_by_side, stacked
from dualform.query.reducers import TopK
from dualform.query.scan import Bools
from dualform.query.search.index import TopKRequest
from dualform.store.slots import PIECE_BYTES

TILE_BYTES = 64 << 20
"""How much the slopes of a window of rows may take, for all layers together."""
MOST_ROWS = 4096
MOST_QUERIES = 16384
SLACK = 1e-3
"""A score may be rounded up beyond its bound by this much at most, relatively."""
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class RowWindow:
    """The rows of a window, as a run that can be scanned: a row stands in the place of a slot."""

    segment: int
    window: Window
    shared: None = None
    """No row serves all rows."""

    @property
    def first_slot(self) -> int:
        """The number of the first row."""
        return self.window.begin

    @property
    def slots(self) -> int:
        """How many rows there are."""
        return self.window.end - self.window.begin

    @property
    def row_range(self) -> tuple[int, int]:
        """The number of the first row, and of the one after the last."""
        return self.window.begin, self.window.end

    def rows(self) -> Ints:
        """(rows,): their numbers."""
        return np.arange(self.window.begin, self.window.end)

    def pieces(self, width: int) -> Iterator[tuple[int, int]]:
        """Ranges of rows that may be scored at a time, if `width` numbers are needed for each."""
        size = max(1, PIECE_BYTES // (8 * max(width, 1)))
        for low in range(0, self.slots, size):
            yield low, min(low + size, self.slots)


def can_be_bounded(scored: LinearScores, layers: Sequence[Layer]) -> bool:
    """Return whether every row has at most one slot in every layer, and the norm of its key is known."""
    if not scored.norms:
        return False
    for norms, products in zip(scored.norms, scored.products, strict=True):
        for layer in layers:
            maps = products.get(layer.name, ())
            if norms.get(layer.name) is None or not _is_one_pair(maps):
                return False
    return True


def _is_one_pair(maps: Sequence[Any]) -> bool:
    if len(maps) != 1 or not isinstance(maps[0], Products):
        return False
    return maps[0].is_one_pair and maps[0].lengths is not None


@dataclass(frozen=True)
class RowIndex:
    """Finds the best rows of a run, summed over some layers."""

    scored: LinearScores
    layers: Sequence[Layer]
    queries: int
    dtype: torch.dtype

    def search(self, request: TopKRequest) -> list[Ranking] | None:
        """Return one ranking; None for the best of each group."""
        if request.groups is not None:
            return None
        found = []
        for low in range(0, self.queries, MOST_QUERIES):
            queries = slice(low, min(low + MOST_QUERIES, self.queries))
            found.append(self._best(request, queries))
        return [stacked(found, self.dtype)]

    def _best(self, request: TopKRequest, queries: slice) -> Ranking:
        count = queries.stop - queries.start
        numbers_per_row = count * (len(self.layers) + 2)
        size = max(1, min(MOST_ROWS, TILE_BYTES // (self.dtype.itemsize * max(1, numbers_per_row))))
        best = [TopK(count, request.k, request.order, self.dtype) for _ in self.scored.segments]
        for number, segment in reversed(list(enumerate(self.scored.segments))):
            for window in windows(self.scored.store, segment.first_row, segment.end_row, size):
                known = side_by_side([one.ranking for one in best[number:]])
                threshold = _kth_key(known, request)
                selected = request.selection(RowWindow(number, window))
                bounded = _BoundedWindow(self, number, window, queries)
                rows = bounded.candidates(threshold, selected)
                best[number].insert(torch.from_numpy(rows + window.begin), bounded.score(rows))
        return side_by_side([one.ranking for one in best]).best(request.k, request.order)


def _kth_key(known: Ranking, request: TopKRequest) -> Tensor | None:
    """Return what a row must reach to be among the k best, (queries,); None: there are fewer so far."""
    if known.scores.shape[1] < request.k:
        return None
    return rank_keys(known.scores, request.order).topk(request.k, dim=1).values[:, -1]


class _BoundedWindow:
    """The rows of a window: bounds from their error signals alone, then the scores of some."""

    def __init__(self, index: RowIndex, segment: int, window: Window, queries: slice):
        self._index = index
        self._window = window
        self._queries = queries
        count = queries.stop - queries.start
        self._bound = torch.zeros(count, window.end - window.begin, dtype=index.dtype)
        self._parts: list[tuple[Layer, Products, RowPiece, Tensor]] = []
        for layer in index.layers:
            self._add_layer(layer, segment)

    def _add_layer(self, layer: Layer, segment: int) -> None:
        scored = self._index.scored
        product = scored.products[segment][layer.name][0]
        norms = scored.norms[segment][layer.name]
        assert isinstance(product, Products)
        assert product.lengths is not None
        assert norms is not None
        chunk = scored.store.chunk_of(layer.name, self._window.place)
        if chunk is None:
            return
        [linear_map] = linear_maps(layer)
        first_row = scored.segments[segment].first_row
        for piece in row_pieces(chunk, self._window.begin, self._window.end, layer.d_out):
            errors = piece.errors(self._index.dtype)
            slopes = product.slopes_along(self._queries, linear_map.error_side(Vectors(errors), errors))
            slopes *= piece.loss_divisors(scored.loss_mean, self._index.dtype)
            begin = piece.first_row - first_row
            key_norms = norms[begin : begin + piece.rows].to(self._index.dtype)
            low = piece.first_row - self._window.begin
            sizes = slopes.abs() * product.lengths[self._queries, None]
            self._bound[:, low : low + piece.rows].addcmul_(sizes, key_norms)
            self._parts.append((layer, product, piece, slopes))

    def candidates(self, threshold: Tensor | None, selected: Bools | None) -> Ints:
        """Return the rows, by their places in the window, that may reach the threshold of any query."""
        passing = np.ones(self._bound.shape[1], np.bool_) if selected is None else selected
        if threshold is not None:
            reaches = self._bound * (1 + SLACK) >= threshold[:, None]
            passing = passing & reaches.any(0).numpy()
        return np.flatnonzero(passing)

    def score(self, rows: Ints) -> Tensor:
        """Return the scores of some rows, by their places in the window, (queries, rows)."""
        scores = torch.zeros(len(self._bound), len(rows), dtype=self._bound.dtype)
        for layer, product, piece, slopes in self._parts:
            low = piece.first_row - self._window.begin
            begin, end = np.searchsorted(rows, [low, low + piece.rows]).tolist()
            if begin == end:
                continue
            places = rows[begin:end] - low
            [linear_map] = linear_maps(layer)
            keys = linear_map.key_side(Vectors(piece.chunk.some_keys(places + piece.low, self._index.dtype)))
            weights = product.weights(self._queries, keys)
            scores[:, begin:end] += weights.mul_(slopes[:, torch.from_numpy(places)])
        return scores
