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

from dualform.arrays import Bools
from dualform.curvature.maps import LinearMap, linear_maps
from dualform.layers.keys import Vectors
from dualform.layers.layer import Layer
from dualform.query.influence.products import Products
from dualform.query.influence.rows import RowPiece, slices, slots_at_a_time
from dualform.query.influence.scores import LinearScores
from dualform.query.influence.segments import Window, undecoded_pieces
from dualform.query.ranking import Ranking, rank_keys, side_by_side, stacked
from dualform.query.reducers import TopK
from dualform.query.search.index import TopKRequest

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
        return self.window.rows

    @property
    def row_range(self) -> tuple[int, int]:
        """The number of the first row, and of the one after the last."""
        return self.window.begin, self.window.end

    def rows(self) -> Ints:
        """(rows,): their numbers."""
        return np.arange(self.window.begin, self.window.end)

    def pieces(self, width: int) -> Iterator[tuple[int, int]]:
        """Ranges of rows that may be scored at a time, if `width` numbers are needed for each."""
        for rows in slices(0, self.slots, slots_at_a_time(width)):
            yield rows.start, rows.stop


@dataclass(frozen=True)
class _LayerBound:
    """What bounds the scores of one layer in one segment."""

    layer: Layer
    linear_map: LinearMap
    products: Products
    lengths: Tensor
    """(queries,): the norm of each query."""
    norms: Tensor
    """(rows,): the norm of each row's key."""


def _layer_bound(scores: LinearScores, segment: int, layer: Layer) -> _LayerBound | None:
    """None: a row may have several slots, or the norm of its key is not known."""
    norms = scores.norms[segment][layer.name]
    products, *others = scores.products[segment][layer.name]
    if norms is None or others or not isinstance(products, Products):
        return None
    if products.lengths is None or not products.is_one_pair:
        return None
    [linear_map] = linear_maps(layer)
    return _LayerBound(layer, linear_map, products, products.lengths, norms)


def row_index(scores: LinearScores, layers: Sequence[Layer], queries: int) -> RowIndex | None:
    """Return an index of all rows; None: the scores of some layer cannot be bounded."""
    if not scores.norms:
        return None
    by_segment = []
    for segment in range(len(scores.segments)):
        bounds = [_layer_bound(scores, segment, layer) for layer in layers]
        known = [bound for bound in bounds if bound is not None]
        if len(known) < len(layers):
            return None
        by_segment.append(known)
    return RowIndex(scores, queries, by_segment)


@dataclass(frozen=True)
class RowIndex:
    """Finds the best rows of a run, summed over some layers."""

    scores: LinearScores
    queries: int
    bounds: Sequence[Sequence[_LayerBound]]
    """Of each segment, those of the layers."""

    def search(self, request: TopKRequest) -> list[Ranking] | None:
        """Return one ranking; None for the best of each group."""
        if request.groups is not None:
            return None
        rankings = [self._search(request, queries) for queries in slices(0, self.queries, MOST_QUERIES)]
        return [stacked(rankings, self.scores.dtype)]

    def _search(self, request: TopKRequest, queries: slice) -> Ranking:
        scores = self.scores
        count = queries.stop - queries.start
        best = [TopK(count, request.k, request.order, scores.dtype) for _ in scores.segments]
        for number, segment in reversed(list(enumerate(scores.segments))):
            for window in segment.windows(scores.store, self._rows_at_a_time(count)):
                found = side_by_side([reducer.ranking for reducer in best[number:]])
                threshold = _kth_key(found, request)
                selected = request.selection(RowWindow(number, window))
                bounded = _BoundedWindow(self, number, window, queries)
                rows = bounded.candidates(threshold, selected)
                best[number].insert(torch.from_numpy(rows + window.begin), bounded.score(rows))
        found = side_by_side([reducer.ranking for reducer in best])
        return found.best(request.k, request.order)

    def _rows_at_a_time(self, queries: int) -> int:
        layers = len(self.bounds[0])
        bytes_per_row = self.scores.dtype.itemsize * max(1, queries * (layers + 2))
        return max(1, min(MOST_ROWS, TILE_BYTES // bytes_per_row))


def _kth_key(found: Ranking, request: TopKRequest) -> Tensor | None:
    """Return what a row must reach to be among the k best, (queries,); None: there are fewer so far."""
    if found.scores.shape[1] < request.k:
        return None
    keys = rank_keys(found.scores, request.order)
    return keys.topk(request.k, dim=1).values[:, -1]


@dataclass(frozen=True)
class _BoundedPiece:
    """Rows of a window in one layer."""

    layer: _LayerBound
    rows: RowPiece
    slopes: Tensor
    """slope · error signal, (queries, rows)."""


class _BoundedWindow:
    """The rows of a window: bounds from their error signals alone, then the scores of some."""

    def __init__(
        self,
        index: RowIndex,
        segment: int,
        window: Window,
        queries: slice,
    ):
        self._scores = index.scores
        self._segment = index.scores.segments[segment]
        self._window = window
        self._queries = queries
        self._bound = torch.zeros(queries.stop - queries.start, window.rows, dtype=index.scores.dtype)
        self._pieces: list[_BoundedPiece] = []
        for layer in index.bounds[segment]:
            for rows in undecoded_pieces(index.scores.store, layer.layer, window, layer.layer.d_out):
                self._add(layer, rows)

    def _add(self, layer: _LayerBound, rows: RowPiece) -> None:
        dtype = self._scores.dtype
        errors = rows.errors(dtype)
        own_errors = layer.linear_map.error_side(Vectors(errors), errors)
        slopes = layer.products.slopes_along(self._queries, own_errors)
        slopes *= rows.loss_divisors(self._scores.loss_mean, dtype)
        query_sizes = slopes.abs() * layer.lengths[self._queries, None]
        key_norms = layer.norms[rows.places(self._segment.first_row)].to(dtype)
        bound = self._bound[:, rows.places(self._window.begin)]
        bound.addcmul_(query_sizes, key_norms)
        self._pieces.append(_BoundedPiece(layer, rows, slopes))

    def candidates(self, threshold: Tensor | None, selected: Bools | None) -> Ints:
        """Return the rows, by their places in the window, that may reach the threshold of any query."""
        passing = np.ones(self._window.rows, np.bool_) if selected is None else selected
        if threshold is not None:
            reaches = self._bound * (1 + SLACK) >= threshold[:, None]
            passing = passing & reaches.any(0).numpy()
        return np.flatnonzero(passing)

    def score(self, rows: Ints) -> Tensor:
        """Return the scores of some rows, by their places in the window, (queries, rows)."""
        scores = torch.zeros(len(self._bound), len(rows), dtype=self._bound.dtype)
        for piece in self._pieces:
            own_rows = piece.rows.places(self._window.begin)
            begin, end = np.searchsorted(rows, [own_rows.start, own_rows.stop]).tolist()
            if begin == end:
                continue
            places = rows[begin:end] - own_rows.start
            vectors = piece.rows.chunk.some_keys(piece.rows.low + places, self._scores.dtype)
            keys = piece.layer.linear_map.key_side(Vectors(vectors))
            weights = piece.layer.products.weights(self._queries, keys)
            scores[:, begin:end] += weights.mul_(piece.slopes[:, torch.from_numpy(places)])
        return scores
