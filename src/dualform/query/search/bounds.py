"""Upper bounds on scores, from sketches of keys and error signals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dualform.layers.layer import Layer
from dualform.query.ranking import Order, rank_keys
from dualform.query.search.sketch import STRETCH, Sketch, lengths, make_sketch
from dualform.store.reader import Store

READ = 1024
"""How many vectors are decoded at a time, so that they stay in the processor's cache."""


class Bounds(Protocol):
    """Estimates of the scores of some members, and upper bounds on them. |score| ≤ length × size."""

    @property
    def lengths(self) -> Tensor:
        """(members,)"""

    @property
    def sizes(self) -> Tensor:
        """(queries,)"""

    def bound(self, queries: slice, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return estimates of the scores' rank keys and upper bounds on them, (queries, places) each."""

    def exact(self, queries: slice, places: Tensor) -> Tensor:
        """Return the scores, (queries, places). places ascend."""


class VectorSource(Protocol):
    """Vectors by number: keys or error signals."""

    @property
    def sketch(self) -> Sketch:
        """The sketch of all vectors."""

    def dots(self, queries: Tensor, numbers: Tensor) -> Tensor:
        """Return queries (m, d) · the vectors with these numbers, (m, n). numbers ascend."""


class StoredVectors:
    """The keys (what="key") or error signals (what="error") of a layer."""

    def __init__(self, store: Store, layer: Layer, what: str, dtype: torch.dtype):
        self._store = store
        self._layer = layer
        self._what = what
        self._dtype = dtype
        self._number, _ = store.layer(layer.name)

    @property
    def sketch(self) -> Sketch:
        """The sketch of all vectors. The first question reads all of them to make it."""
        key = ("sketch", self._layer.name, self._what, self._dtype)
        return self._store.cached(key, self._make_sketch)

    def _make_sketch(self) -> Sketch:
        name = self._layer.name
        count = self._store.key_count(name) if self._what == "key" else self._store.slots(name)
        pieces = self._store.passing(name, self._what, self._dtype)
        return make_sketch(count, self._dtype, self._read, pieces)

    def dots(self, queries: Tensor, numbers: Tensor) -> Tensor:
        """Return queries (m, d) · the vectors with these numbers, (m, n). numbers ascend."""
        if self._store.can_pick(self._number, self._what):
            table = self._store.picked(self._number, self._what)
            products = table.dots(queries, numbers)
            if products is not None:
                return products
        products = queries.new_empty(len(queries), len(numbers))
        for low in range(0, len(numbers), READ):
            high = low + READ
            vectors = self._read(numbers[low:high])
            products[:, low:high] = queries @ vectors.T
        return products

    def _read(self, numbers: Tensor) -> Tensor:
        return self._store.gather(self._number, self._what, numbers.numpy(), self._dtype)


def key_numbers(store: Store, layer: str, end: int, slots: Tensor) -> Tensor:
    """Return the numbers of the stored keys of some slots. Several slots may share a key."""
    if not store.has_equal_keys(layer):
        return slots
    numbers = store.cached(("key numbers", layer), lambda: _all_key_numbers(store, layer, end), end)
    return numbers[slots]


def _all_key_numbers(store: Store, layer: str, end: int) -> Tensor:
    by_chunk = [np.zeros(0, np.int64)]
    for chunk in store.addresses(layer, end_step=end):
        numbers = chunk.key_numbers
        if numbers is None:  # each slot of the chunk has a key of its own
            first_key = chunk.end_key - chunk.chunk.keys[chunk.number]
            numbers = np.arange(first_key, first_key + chunk.slots)
        by_chunk.append(numbers)
    return torch.from_numpy(np.concatenate(by_chunk))


class Products:
    """Inner products of queries (n, d) with vectors, and bounds on them."""

    def __init__(self, queries: Tensor, vectors: VectorSource, numbers: Tensor):
        """numbers: (members,), the vector of each member, in any order; members may share a vector."""
        self._queries = queries
        self._vectors = vectors
        self._numbers = numbers
        self._sketched = vectors.sketch.of(queries)

    @property
    def lengths(self) -> Tensor:
        """(members,): at least the length of each member's vector."""
        return self._vectors.sketch.lengths[self._numbers]

    @property
    def sizes(self) -> Tensor:
        """(queries,): at least the length of each query."""
        return lengths(self._sketched)

    def estimate(self, queries: slice, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return estimates (queries, places), and the rests of the queries (queries,) and of the vectors (places,).

        An estimate is off by at most the product of the two rests.
        """
        own = self._sketched.near[queries]
        own_rests = self._sketched.rest[queries]
        near, rests = self._vectors.sketch.vectors
        numbers = self._numbers_at(places)
        if near.dtype == own.dtype and _are_all(numbers, len(near)):
            return own @ near.T, own_rests, rests
        rests = rests.index_select(0, numbers)
        estimates = self._vectors.sketch.table.dots(own, numbers)
        if estimates is None:
            parts = []
            for some in torch.split(numbers, STRETCH):
                vectors = near.index_select(0, some).to(own.dtype)
                parts.append(own @ vectors.T)
            estimates = torch.cat(parts, 1)
        return estimates, own_rests, rests

    def _numbers_at(self, places: Tensor) -> Tensor:
        """Return the vectors of the members at some places."""
        if len(places) == len(self._numbers):  # all members, in their order
            return self._numbers
        return self._numbers[places]

    def exact(self, queries: slice, places: Tensor) -> Tensor:
        """Return the products, (queries, places). A vector that several members share is read once."""
        own = self._queries[queries]
        numbers = self._numbers[places]
        if bool((numbers.diff() > 0).all()):
            return self._vectors.dots(own, numbers)
        distinct, positions = torch.unique(numbers, return_inverse=True)
        products = self._vectors.dots(own, distinct)
        return products[:, positions]


def _are_all(numbers: Tensor, count: int) -> bool:
    """Return whether numbers are those of all `count` vectors, in their order, as in most first looks: then none need be picked."""
    return len(numbers) == count and torch.equal(numbers, torch.arange(count))


@dataclass(eq=False)
class AttentionBounds:
    """Bounds on key · query."""

    keys: Products
    order: Order

    @property
    def lengths(self) -> Tensor:
        """(members,)"""
        return self.keys.lengths

    @property
    def sizes(self) -> Tensor:
        """(queries,)"""
        return self.keys.sizes

    def bound(self, queries: slice, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return estimates and upper bounds."""
        estimates, own_rests, rests = self.keys.estimate(queries, places)
        guess = rank_keys(estimates, self.order)
        return guess, torch.addr(guess, own_rests, rests)

    def exact(self, queries: slice, places: Tensor) -> Tensor:
        """Return the scores."""
        return self.keys.exact(queries, places)


@dataclass(eq=False)
class ContributionBounds:
    """Bounds on (weight coefficient · (key · query) + bias coefficient) · (error signal · slope)."""

    keys: Products
    errors: Products
    weight: Tensor
    """(members,): the negative coefficients of a layer's weight."""
    bias: Tensor
    """(members,): those of its bias."""
    order: Order

    @property
    def lengths(self) -> Tensor:
        """(members,)"""
        attention = self.keys.lengths * self.weight.abs() + self.bias.abs()
        return attention * self.errors.lengths

    @property
    def sizes(self) -> Tensor:
        """(queries,)"""
        return self.keys.sizes.clamp(min=1) * self.errors.sizes

    def bound(self, queries: slice, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return estimates and upper bounds.

        For a = near_a ± off_a and b = near_b ± off_b: |a b − near_a near_b| ≤ |near_a| off_b + off_a (|near_b| + off_b).
        """
        weight = self.weight[places]
        estimates, own_rests, rests = self.keys.estimate(queries, places)
        attention = estimates * weight + self.bias[places]
        attention_off = torch.outer(own_rests, rests * weight.abs())
        slopes, own_rests, rests = self.errors.estimate(queries, places)
        slopes_off = torch.outer(own_rests, rests)
        guess = rank_keys(attention * slopes, self.order)
        bound = torch.addcmul(guess, attention.abs(), slopes_off)
        return guess, bound.addcmul_(attention_off, slopes_off.add_(slopes.abs()))

    def exact(self, queries: slice, places: Tensor) -> Tensor:
        """Return the scores."""
        attention = self.keys.exact(queries, places)
        attention.mul_(self.weight[places])
        attention.add_(self.bias[places])
        slopes = self.errors.exact(queries, places)
        return attention.mul_(slopes)
