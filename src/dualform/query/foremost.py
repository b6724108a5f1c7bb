"""The best rows of many queries, without reading all keys: |slope · error| · ‖query‖ · ‖key‖ bounds what a layer gives a row.

Norms are those of the whitened space, √(keyᵀ (A + αI)⁻¹ key), and were kept with the curvature. Most samples are learnt after a while, and their error signals are small: no key makes up for that. Segments are looked at from
the last to the first, for scores are the larger the less is left to learn. Nothing is approximate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.influence.pairings import pairings
from dualform.influence.pieces import Piece, Window, pieces, windows
from dualform.influence.products import Products
from dualform.influence.scored import LinearScores
from dualform.layers.keys import Vectors
from dualform.layers.streams import Layer
from dualform.query.answers import Ranked
from dualform.query.masks import Bools
from dualform.query.ranking import Best, Way, ranked_by
from dualform.store.heap import Room

TILE_BYTES = 64 << 20
"""How much the slopes of a stretch of rows may take, all layers together."""
ROWS = 4096
"""So many rows are looked at together, at most."""
SLACK = 1e-3
"""A score may be rounded up beyond its bound by this much at most, relatively."""


def can_be_bounded(scored: LinearScores, layers: Sequence[Layer]) -> bool:
    """Whether every row has one slot at most in every layer, and its key's norm is known."""
    return bool(scored.norms) and all(
        norms.get(layer.name) is not None and _is_one_pair(products.get(layer.name, ()))
        for norms, products in zip(scored.norms, scored.products, strict=True)
        for layer in layers
    )


def _is_one_pair(maps: Sequence[Any]) -> bool:
    return len(maps) == 1 and isinstance(maps[0], Products) and maps[0].is_one_pair and maps[0].lengths is not None


def foremost(
    scored: LinearScores,
    layers: Sequence[Layer],
    some: slice,
    k: int,
    way: Way,
    mask: Callable[[Window], Bools],
    dtype: torch.dtype,
) -> Ranked:
    """The k best rows of some queries. mask: which rows of a window take part."""
    count = some.stop - some.start
    size = max(1, min(ROWS, TILE_BYTES // (dtype.itemsize * max(1, count) * (len(layers) + 2))))
    room = Room(dtype)
    bests = [Best(count, k, dtype) for _ in scored.segments]
    for number, segment in reversed(list(enumerate(scored.segments))):
        best, others = bests[number], [one.scores for one in bests[number + 1 :]]
        for window in windows(scored.store, segment.first_row, segment.end_row, size):
            known = torch.cat([best.scores, *others], 1)
            least = known.topk(k, dim=1).values[:, -1] if known.shape[1] >= k else None
            rows, scores = _scores(scored, layers, number, window, some, least, mask(window), room, dtype)
            best.add(ranked_by(scores, way), torch.from_numpy(rows + window.begin), scores)
    # Ties go to the lower row: segments stand in their order, and the sort is stable
    ranked, values, numbers = (torch.cat([getattr(b, of) for b in bests], 1) for of in ("scores", "values", "numbers"))
    order = ranked.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return Ranked(numbers.gather(1, order), values.gather(1, order))


def _scores(
    scored: LinearScores,
    layers: Sequence[Layer],
    number: int,
    window: Window,
    some: slice,
    least: Tensor | None,
    taken: Bools,
    room: Room,
    dtype: torch.dtype,
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], Tensor]:
    """The rows of a window that may reach `least` of some query, (n,), and their scores, (queries, n)."""
    count = window.end - window.begin
    first = window.begin - scored.segments[number].first_row
    bound = torch.zeros(some.stop - some.start, count, dtype=dtype)
    found: list[tuple[Layer, Products, Piece, Tensor]] = []
    for layer in layers:
        product, [pairing] = scored.products[number][layer.name][0], pairings(layer)
        assert isinstance(product, Products)
        norms = scored.norms[number][layer.name]
        assert norms is not None
        assert product.lengths is not None
        lengths = product.lengths[some, None]
        chunk = scored.store.chunk_of(layer.name, window.place)
        for piece in [] if chunk is None else pieces(chunk, window.begin, window.end, layer.d_out):
            low = piece.first_row - window.begin
            errors = piece.chunk.some_errors(np.arange(piece.low, piece.high), room)
            along = product.slopes_along(some, pairing.error_side(Vectors(errors), errors))
            along *= scored.loss_mean.of_rows(piece, dtype)
            own = norms[first + low : first + low + piece.rows].to(dtype)
            bound[:, low : low + piece.rows].addcmul_(along.abs().mul_(lengths), own)
            found.append((layer, product, piece, along))
    near = taken if least is None else taken & (bound * (1 + SLACK) >= least[:, None]).any(0).numpy()
    rows = np.flatnonzero(near)
    scores = torch.zeros(some.stop - some.start, len(rows), dtype=dtype)
    for layer, product, piece, along in found:
        [pairing] = pairings(layer)
        low = piece.first_row - window.begin
        begin, end = np.searchsorted(rows, [low, low + piece.rows])
        if begin == end:
            continue
        places = rows[begin:end] - low
        keys = pairing.key_side(Vectors(piece.chunk.some_keys(places + piece.low, room)))
        scores[:, begin:end] += product.weights(some, keys).mul_(along[:, torch.from_numpy(places)])
    return rows, scores
