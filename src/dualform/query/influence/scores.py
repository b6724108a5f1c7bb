"""The scores of rows and slots, by whichever method: what answers about influence ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dualform.curvature.loss_mean import LossMean
from dualform.curvature.maps import LinearMap, linear_maps
from dualform.layers.streams import Layer
from dualform.query.influence.segments import Segment, Window, pieces_in
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk


class OfSlots(Protocol):
    """Scores that are linear in slots: Products, OneHotProducts, SketchedProducts."""

    def of_slots(self, examples: slice, keys: Tensor, errors: Tensor) -> Tensor:
        """(examples, n)."""

    def of_rows(self, examples: slice, keys: Tensor, errors: Tensor, positions: int) -> Tensor:
        """(examples, n / positions)."""


class Scored(Protocol):
    """A method's scores for some queries."""

    @property
    def segments(self) -> Sequence[Segment]:
        """What was looked at."""

    def rows(self, number: int, layers: Sequence[Layer], window: Window, queries: slice, dtype: torch.dtype) -> Tensor:
        """The scores of some queries for the rows of a window in segment `number`, summed over layers: (queries, rows)."""


@dataclass(frozen=True)
class LinearScores:
    """Of a method that is linear in slots, by segment and layer."""

    store: Store
    segments: Sequence[Segment]
    loss_mean: LossMean
    products: Sequence[Mapping[str, Sequence[OfSlots]]]
    norms: Sequence[Mapping[str, Tensor | None]] = ()
    """The norm of each row's key, by segment and layer, where it is known: that of `Products.lengths`."""

    def rows(self, number: int, layers: Sequence[Layer], window: Window, queries: slice, dtype: torch.dtype) -> Tensor:
        """(queries, rows)"""
        found = torch.zeros(queries.stop - queries.start, window.end - window.begin, dtype=dtype)
        for layer in layers:
            maps = self._maps(number, layer)
            for here, piece, keys, errors in pieces_in(self.store, layer, window, dtype):
                divisor = piece.loss_divisors(self.loss_mean, dtype)
                for linear_map, product in maps:
                    own_keys = linear_map.key_side(keys)
                    own_errors = linear_map.error_side(keys, errors)
                    found[:, here] += product.of_rows(queries, own_keys, own_errors, piece.positions).mul_(divisor)
        return found

    def slots(self, number: int, chunk: SlotChunk, low: int, high: int, queries: slice, dtype: torch.dtype) -> Tensor:
        """The scores of some queries for the slots low to high of a chunk, all in segment `number`: (queries, slots)."""
        found = torch.zeros(queries.stop - queries.start, high - low, dtype=dtype)
        keys = chunk.keys(dtype, low, high)
        errors = chunk.errors(dtype, low, high)
        for linear_map, product in self._maps(number, chunk.layer):
            found += product.of_slots(queries, linear_map.key_side(keys), linear_map.error_side(keys, errors))
        return found.mul_(self.loss_mean.of_slots(chunk, low, high, dtype))

    def _maps(self, number: int, layer: Layer) -> list[tuple[LinearMap, OfSlots]]:
        return list(zip(linear_maps(layer), self.products[number].get(layer.name, ()), strict=False))


@dataclass(frozen=True)
class RowScores:
    """Of a method that knows rows only: by segment (layers, queries, rows)."""

    layers: Sequence[str]
    segments: Sequence[Segment]
    scores: Sequence[Tensor]

    def rows(self, number: int, layers: Sequence[Layer], window: Window, queries: slice, dtype: torch.dtype) -> Tensor:
        """(queries, rows)"""
        first = self.segments[number].first_row
        places = [self.layers.index(layer.name) for layer in layers]
        return self.scores[number][places, queries, window.begin - first : window.end - first].sum(0).to(dtype)
