"""The scores of rows and slots, by whichever method: what answers about influence ask for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from dualform.curvature.loss_mean import LossMean
from dualform.curvature.maps import LinearMap, linear_maps
from dualform.layers.keys import RowGradients
from dualform.layers.layer import Layer
from dualform.query.influence.segments import Segment, Window, pieces_in
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk


class SlotProducts(Protocol):
    """Scores that are linear in slots: Products, OneHotProducts, SketchedProducts."""

    def of_slots(self, examples: slice, keys: Tensor, errors: Tensor) -> Tensor:
        """(examples, n)."""

    def of_rows(
        self,
        examples: slice,
        keys: Tensor,
        errors: Tensor,
        positions: int,
    ) -> Tensor:
        """(examples, n / positions)."""

    def of_gradients(self, examples: slice, weights: Tensor, constants: Tensor) -> Tensor:
        """Of the gradients of rows, as LinearMap.of_gradients gives them: (examples, rows)."""


@dataclass(frozen=True)
class LinearScores:
    """Of a method that is linear in slots, by segment and layer."""

    store: Store
    segments: Sequence[Segment]
    loss_mean: LossMean
    dtype: torch.dtype
    products: Sequence[Mapping[str, Sequence[SlotProducts]]]
    """For each linear map of a layer."""
    norms: Sequence[Mapping[str, Tensor | None]] = ()
    """The norm of each row's key, where it is known: that of `Products.lengths`."""

    def part(self, segments: Collection[int], layers: Sequence[Layer], steps: Sequence[int]) -> LinearScores:
        """Return what tasks need that score slots of some segments, by number, in the chunks that begin with these steps."""
        products = [
            {layer.name: products[layer.name] for layer in layers} if number in segments else {}
            for number, products in enumerate(self.products)
        ]
        return replace(self, products=products, norms=(), loss_mean=self.loss_mean.part(steps))

    def of_rows(
        self,
        number: int,
        layers: Sequence[Layer],
        window: Window,
        queries: slice,
    ) -> Tensor:
        """(queries, rows)"""
        scores = torch.zeros(queries.stop - queries.start, window.rows, dtype=self.dtype)
        for layer in layers:
            maps = self._maps(number, layer)
            for slots in pieces_in(self.store, layer, window, self.dtype):
                divisors = slots.piece.loss_divisors(self.loss_mean, self.dtype)
                for linear_map, products in maps:
                    if isinstance(slots.keys, RowGradients):
                        found = products.of_gradients(queries, *linear_map.of_gradients(slots.keys))
                    else:
                        found = products.of_rows(queries, *slots.sides(linear_map), slots.piece.positions)
                    scores[:, slots.here] += found.mul_(divisors)
        return scores

    def of_slots(
        self,
        number: int,
        chunk: SlotChunk,
        low: int,
        high: int,
        queries: slice,
    ) -> Tensor:
        """The scores of some queries for the slots low to high of a chunk, all in segment `number`: (queries, slots)."""
        scores = torch.zeros(queries.stop - queries.start, high - low, dtype=self.dtype)
        keys, errors = chunk.pairs(self.dtype, low, high)
        for linear_map, products in self._maps(number, chunk.layer):
            if isinstance(keys, RowGradients):
                scores += products.of_gradients(queries, *linear_map.of_gradients(keys))
                continue
            own_keys = linear_map.key_side(keys)
            own_errors = linear_map.error_side(keys, errors)
            scores += products.of_slots(queries, own_keys, own_errors)
        divisors = self.loss_mean.of_slots(chunk, low, high, self.dtype)
        return scores.mul_(divisors)

    def _maps(self, number: int, layer: Layer) -> list[tuple[LinearMap, SlotProducts]]:
        return list(zip(linear_maps(layer), self.products[number][layer.name], strict=True))


@dataclass(frozen=True)
class RowScores:
    """Of a method that knows rows only."""

    segments: Sequence[Segment]
    layers: Sequence[str]
    scores: Sequence[Tensor]
    """Of each segment, (layers, queries, rows)."""

    def of_rows(
        self,
        number: int,
        layers: Sequence[Layer],
        window: Window,
        queries: slice,
    ) -> Tensor:
        """(queries, rows)"""
        first_row = self.segments[number].first_row
        rows = slice(window.begin - first_row, window.end - first_row)
        places = [self.layers.index(layer.name) for layer in layers]
        return self.scores[number][places, queries, rows].sum(0)


Scores = LinearScores | RowScores
"""What a method finds, for some queries."""
