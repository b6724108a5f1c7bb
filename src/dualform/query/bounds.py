"""What is known of scores before keys and error signals are read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dualform.layers.streams import Layer
from dualform.query.ranking import Way, ranked_by
from dualform.query.remembered import remembered
from dualform.query.sketch import Sketch, lengths, sketch
from dualform.store.heap import Room
from dualform.store.reader import Store

Gather = Callable[[Tensor, Tensor | None], Tensor]
"""Numbers (n,) → vectors (n, d), in memory that is given or in their own."""
READ = 1024
"""So many vectors are read at a time: they stay in the cache."""


def seen(store: Store, layer: Layer, what: str, queries: Tensor, numbers: Tensor) -> Seen:
    """Queries beside a layer's keys (what = "key") or error signals ("error") of these numbers."""
    place, _ = store.layer(layer.name)
    dtype = queries.dtype

    def gather(some: Tensor, out: Tensor | None = None) -> Tensor:
        return store.gather(place, what, some.numpy(), dtype, out)

    def make() -> Sketch:
        count = store.key_count(layer.name) if what == "key" else store.slots(layer.name)
        return sketch(count, dtype, gather, store.passing(layer.name, what, dtype))

    return Seen(queries, remembered(store, ("sketch", layer.name, what, dtype), make), numbers, gather)


class Seen:
    """Queries (n, d) beside some of the vectors of a sketch: those with these numbers, in any order and with repetitions."""

    def __init__(self, queries: Tensor, known: Sketch, numbers: Tensor, gather: Gather):
        self.queries, self._numbers, self._gather = queries, numbers, gather
        self.near = known.of(queries)
        # as many need not be the same: an epoch has as many slots as there are keys, in another order
        everything = len(numbers) == len(known.table) and _counts_up(numbers)
        self.table = known.table if everything else known.table[numbers]
        self.lengths = known.lengths if everything else known.lengths[numbers]
        self._room = Room(queries.dtype)

    def products(self, queries: slice, places: Tensor) -> Tensor:
        """In full, (queries, slots). A vector that several slots share is read once."""
        numbers, back = torch.unique(self._numbers[places], return_inverse=True)
        some = self.queries[queries]
        found = some.new_empty(len(some), len(numbers))
        for low in range(0, len(numbers), READ):
            here = numbers[low : low + READ]
            found[:, low : low + READ] = some @ self._gather(here, self._room(len(here), some.shape[1])).T
        return found if _counts_up(back) else found[:, back]


def _counts_up(numbers: Tensor) -> bool:
    """Whether they are 0, 1, 2, …"""
    return torch.equal(numbers, torch.arange(len(numbers)))


class Products:
    """Key · query."""

    def __init__(self, keys: Seen, way: Way):
        self._keys, self._way, self._room = keys, way, Room(keys.queries.dtype)
        self.lengths, self.sizes = keys.lengths, lengths(keys.near)

    def bound(self, queries: slice, places: Tensor) -> Tensor:
        """No score ranks above this, (queries, slots). Good until the next is asked for."""
        some, table = self._keys.near[queries], self._keys.table[places]
        room = self._room(len(some), len(table))
        if self._way == "lowest":
            some = torch.cat([-some[:, :-1], some[:, -1:]], 1)
        if self._way != "absolute":
            return torch.mm(some, table.T, out=room)
        torch.mm(some[:, :-1], table[:, :-1].T, out=room)
        return room.abs_().addr_(some[:, -1], table[:, -1])

    def exact(self, queries: slice, places: Tensor) -> Tensor:
        """The scores, (queries, slots)."""
        return self._keys.products(queries, places)


class Contributions:
    """(key · query × weight's + bias's) × error signal · slope, with the weight's and the bias's coefficients (slots,)."""

    def __init__(self, keys: Seen, errors: Seen, weight: Tensor, bias: Tensor, way: Way):
        self._keys, self._errors, self._weight, self._bias, self._way = keys, errors, weight, bias, way
        self._rooms = [Room(weight.dtype) for _ in range(4)]
        self.lengths = (keys.lengths * weight.abs() + bias.abs()) * errors.lengths
        self.sizes = lengths(keys.near).clamp(min=1) * lengths(errors.near)

    def bound(self, queries: slice, places: Tensor) -> Tensor:
        """|a b − near_a near_b| ≤ off_a |near_b| + |near_a| off_b + off_a off_b."""
        near, off = [], []
        for seen, first in ((self._keys, 0), (self._errors, 2)):
            some, table = seen.near[queries], seen.table[places]
            rooms = [room(len(some), len(table)) for room in self._rooms[first : first + 2]]
            near.append(torch.mm(some[:, :-1], table[:, :-1].T, out=rooms[0]))
            off.append(torch.mul(some[:, -1:], table[:, -1], out=rooms[1]))
        near[0].mul_(self._weight[places]).add_(self._bias[places])
        off[0].mul_(self._weight[places].abs())
        bound = ranked_by(near[0] * near[1], self._way).addcmul_(near[0].abs_(), off[1])
        return bound.addcmul_(off[0], off[1].add_(near[1].abs_()))

    def exact(self, queries: slice, places: Tensor) -> Tensor:
        """The scores, (queries, slots)."""
        weights = self._keys.products(queries, places).mul_(self._weight[places]).add_(self._bias[places])
        return weights.mul_(self._errors.products(queries, places))
