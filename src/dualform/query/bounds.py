"""What is known of scores before keys and error signals are read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dualform.layers.streams import Layer
from dualform.native.picked import Picked
from dualform.query.ranking import Way, ranked_by
from dualform.query.remembered import remembered
from dualform.query.sketch import DIRECTIONS, FINE_BYTES, STRETCH, Glimpse, Sketch, lengths, sketch
from dualform.store.heap import Room
from dualform.store.reader import Store

Gather = Callable[[Tensor, Tensor | None], Tensor]
"""Numbers (n,) → vectors (n, d), in memory that is given or in their own."""
Places = Tensor | slice
READ = 1024
"""So many vectors are read at a time: they stay in the cache."""


def seen(store: Store, layer: Layer, what: str, queries: Tensor, numbers: Tensor) -> Seen:
    """Queries beside a layer's keys (what = "key") or error signals ("error") of these numbers."""
    place, _ = store.layer(layer.name)
    dtype = queries.dtype

    def gather(some: Tensor, out: Tensor | None = None) -> Tensor:
        return store.gather(place, what, some.numpy(), dtype, out)

    def known(fine: bool) -> Sketch:
        def make() -> Sketch:
            count = store.key_count(layer.name) if what == "key" else store.slots(layer.name)
            return sketch(count, dtype, gather, store.passing(layer.name, what, dtype), fine=fine)

        return remembered(store, ("sketch", layer.name, what, dtype, fine), make)

    return Seen(queries, known, numbers, gather, lambda: store.picked(place, what))


class Seen:
    """Queries (n, d) beside some of the vectors of a sketch: those with these numbers, in any order and with repetitions."""

    def __init__(
        self,
        queries: Tensor,
        known: Callable[[bool], Sketch],
        numbers: Tensor,
        gather: Gather,
        picked: Callable[[], Picked] = lambda: Picked([]),
    ):
        """known: the sketch of all vectors, or the fine one, which is made when it is first needed. picked: the vectors again."""
        self.queries, self._known, self._numbers, self._gather, self._picked = queries, known, numbers, gather, picked
        # as many need not be the same: an epoch has as many slots as there are keys, in another order
        self._in_order = counts_up(numbers)
        self._own: dict[bool, Glimpse] = {}
        # of few dimensions, a sketch shows all; of very many vectors, a fine one has no more room than the first
        self._finer = queries.shape[1] > DIRECTIONS and len(numbers) <= FINE_BYTES // (4 * DIRECTIONS)
        self._room = Room(queries.dtype)

    @property
    def lengths(self) -> Tensor:
        """(slots,): at least those of the vectors."""
        return self._known(False).lengths[self._chosen(slice(0, len(self._numbers)))]

    @property
    def sizes(self) -> Tensor:
        """(queries,): at least those of the queries."""
        return lengths(self.own(fine=False))

    def own(self, *, fine: bool) -> Glimpse:
        """The queries."""
        if fine not in self._own:
            self._own[fine] = self._known(fine).of(self.queries)
        return self._own[fine]

    def both(self, queries: slice, places: Places, *, fine: bool) -> tuple[Glimpse, Glimpse]:
        """Some queries and some of the vectors."""
        fine = fine and self._finer
        own, known, here = self.own(fine=fine), self._known(fine).seen, self._chosen(places)
        near, rest = (t[here] if isinstance(here, slice) else t.index_select(0, here) for t in known)
        return Glimpse(own.near[queries], own.rest[queries]), Glimpse(near.to(own.near.dtype), rest)

    def near(self, queries: slice, places: Places, room: Room, *, fine: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Their products as far as they are seen, (queries, slots), and the rests of both."""
        fine = fine and self._finer
        own, known, here = self.own(fine=fine), self._known(fine), self._chosen(places)
        rest, near = known.seen.rest, known.seen.near
        rests = own.rest[queries], rest[here] if isinstance(here, slice) else rest.index_select(0, here)
        found = known.picked.dots(own.near[queries], here) if isinstance(here, Tensor) else None
        if found is not None:
            return found, *rests
        found = room(*map(len, rests))
        size = max(1, found.shape[1] if near.dtype == found.dtype else STRETCH)
        for low in range(0, found.shape[1], size):
            first = low if isinstance(places, Tensor) else low + places.start
            some = slice(first, first + min(size, found.shape[1] - low))
            mine, its = self.both(queries, places[some] if isinstance(places, Tensor) else some, fine=fine)
            torch.mm(mine.near, its.near.T, out=found[:, low : low + size])
        return found, *rests

    def finer(self, queries: slice, places: Tensor, way: Way) -> Tensor | None:
        """What no product ranks above, (queries, slots), as the fine sketch has it, in one loop; None: it is to be found by `near`."""
        own, here = self.own(fine=self._finer), self._chosen(places)
        assert isinstance(here, Tensor)
        near = -own.near[queries] if way == "lowest" else own.near[queries]
        return self._known(self._finer).picked.bounds(near, own.rest[queries], here, absolute=way == "absolute")

    def _chosen(self, places: Places) -> Places:
        return places if self._in_order else self._numbers[places]

    def products(self, queries: slice, places: Tensor) -> Tensor:
        """In full, (queries, slots); places ascend. A vector that several slots share is read once."""
        numbers, back = places, None
        if not self._in_order:
            numbers = self._numbers[places]
            if not bool((numbers.diff() > 0).all()):
                numbers, back = torch.unique(numbers, return_inverse=True)
        some = self.queries[queries]
        found = self._picked().dots(some, numbers)
        if found is None:
            found = self._gathered(some, numbers)
        return found if back is None else found[:, back]

    def _gathered(self, some: Tensor, numbers: Tensor) -> Tensor:
        found = some.new_empty(len(some), len(numbers))
        for low in range(0, len(numbers), READ):
            here = numbers[low : low + READ]
            found[:, low : low + READ] = some @ self._gather(here, self._room(len(here), some.shape[1])).T
        return found


def counts_up(numbers: Tensor) -> bool:
    """Whether they are 0, 1, 2, …"""
    some = numbers.numpy()
    return not len(some) or bool(some[0] == 0 and some[-1] == len(some) - 1 and (some[1:] > some[:-1]).all())


class Products:
    """Key · query."""

    def __init__(self, keys: Seen, way: Way):
        self._keys, self._way = keys, way
        self._rooms = [Room(keys.queries.dtype) for _ in range(2)]

    @property
    def lengths(self) -> Tensor:
        """(slots,)"""
        return self._keys.lengths

    @property
    def sizes(self) -> Tensor:
        """(queries,)"""
        return self._keys.sizes

    def bound(self, queries: slice, places: Places, *, fine: bool = False) -> tuple[Tensor, Tensor]:
        """What the scores seem to be, and what none ranks above, (queries, slots) each. Good until the next are asked for."""
        guess, own, keys = self._keys.near(queries, places, self._rooms[0], fine=fine)
        guess = guess.abs_() if self._way == "absolute" else guess.neg_() if self._way == "lowest" else guess
        return guess, torch.addr(guess, own, keys, out=self._rooms[1](*guess.shape))

    def finer(self, queries: slice, places: Tensor) -> Tensor:
        """What none ranks above, found with more effort, (queries, slots). Good until the next are asked for."""
        found = self._keys.finer(queries, places, self._way)
        return self.bound(queries, places, fine=True)[1] if found is None else found

    def exact(self, queries: slice, places: Tensor) -> Tensor:
        """The scores, (queries, slots)."""
        return self._keys.products(queries, places)


class Contributions:
    """(key · query × weight's + bias's) × error signal · slope, with the weight's and the bias's coefficients (slots,)."""

    def __init__(self, keys: Seen, errors: Seen, weight: Tensor, bias: Tensor, way: Way):
        self._keys, self._errors, self._weight, self._bias, self._way = keys, errors, weight, bias, way
        self._rooms = [Room(weight.dtype) for _ in range(4)]

    @property
    def lengths(self) -> Tensor:
        """(slots,)"""
        return (self._keys.lengths * self._weight.abs()).add_(self._bias.abs()).mul_(self._errors.lengths)

    @property
    def sizes(self) -> Tensor:
        """(queries,)"""
        return self._keys.sizes.clamp(min=1) * self._errors.sizes

    def bound(self, queries: slice, places: Places, *, fine: bool = False) -> tuple[Tensor, Tensor]:
        """|a b − near_a near_b| ≤ off_a |near_b| + |near_a| off_b + off_a off_b."""
        near, off = [], []
        for seen, first in ((self._keys, 0), (self._errors, 2)):
            product, own, some = seen.near(queries, places, self._rooms[first], fine=fine)
            near.append(product)
            off.append(torch.mul(own[:, None], some, out=self._rooms[first + 1](*product.shape)))
        near[0].mul_(self._weight[places]).add_(self._bias[places])
        off[0].mul_(self._weight[places].abs())
        guess = ranked_by(near[0] * near[1], self._way)
        bound = torch.addcmul(guess, near[0].abs_(), off[1])
        return guess, bound.addcmul_(off[0], off[1].add_(near[1].abs_()))

    def finer(self, queries: slice, places: Tensor) -> Tensor:
        """What none ranks above, found with more effort, (queries, slots)."""
        return self.bound(queries, places, fine=True)[1]

    def exact(self, queries: slice, places: Tensor) -> Tensor:
        """The scores, (queries, slots)."""
        weights = self._keys.products(queries, places).mul_(self._weight[places]).add_(self._bias[places])
        return weights.mul_(self._errors.products(queries, places))
