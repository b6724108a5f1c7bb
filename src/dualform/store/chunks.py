"""The tensors of a chunk, from the steps that it holds: nothing is copied together, and equal keys are stored once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import filterfalse, groupby

import numpy as np
import xxhash

from dualform.arrays import Array, Ints
from dualform.store.encoding import Encoded
from dualform.store.format import BLOCK_FIELDS
from dualform.store.records import Block, Step

Tensors = dict[str, Sequence[Array]]
"""Tensors by name, each in pieces."""

PATIENCE = 1_000_000
"""After this many keys that hardly ever came again (augmented data), a layer's keys are no longer compared."""


class EqualKeys:
    """The distinct keys of one layer by their content, numbered in the order in which they are stored.

    An input layer sees each image in every epoch.
    """

    def __init__(self, stored: int = 0) -> None:
        self.stored = stored
        self._numbers: dict[bytes, int] = {}
        self._compared = 0
        self._gave_up = False

    def learn(self, keys: Encoded, first: int) -> None:
        """Take note of keys that are stored already, from number `first` on."""
        for place, digest in enumerate(_digests(keys)):
            self._numbers.setdefault(digest, first + place)

    def number(self, keys: Encoded, *, may_repeat: bool) -> tuple[Ints, Ints | None]:
        """Return the number of each key (n,), and the places of those that are new (None: all of them)."""
        if not may_repeat or self._gave_up:
            return self.number_new(keys.count), None
        digests = _digests(keys)
        first_new = self.stored
        known = self._numbers
        # No loop of Python's own: it would hold up the training
        new = dict.fromkeys(filterfalse(known.__contains__, digests))
        known.update(zip(new, range(first_new, first_new + len(new)), strict=True))
        numbers = np.fromiter(map(known.__getitem__, digests), np.int64, len(digests))
        _, first_places = np.unique(numbers, return_index=True)
        new_places = np.sort(first_places[numbers[first_places] >= first_new])
        self.stored += len(new)
        self._compared += keys.count
        if len(known) > PATIENCE and self._compared < 1.01 * len(known):
            self._numbers = {}
            self._gave_up = True
        return numbers, new_places

    def number_new(self, count: int) -> Ints:
        """Return the numbers of keys that are not compared with others."""
        self.stored += count
        return np.arange(self.stored - count, self.stored)


def _digests(keys: Encoded) -> list[bytes]:
    """Return a 128-bit digest of each key, seeded with its exponent."""
    rows = np.ascontiguousarray(keys.data.numpy()).view(np.uint8)
    seeds = [0] * keys.count if keys.exponents is None else keys.exponents.numpy().tolist()
    return list(map(xxhash.xxh3_128_digest, rows, seeds))


def slot_tensors(steps: Sequence[Step], equal: Sequence[EqualKeys]) -> tuple[Tensors, tuple[int, ...]]:
    """Return the tensors of a chunk, and how many slots each layer has. equal: by layer number."""
    tensors: Tensors = {}
    slots = []
    for layer, layer_keys in enumerate(equal):
        numbered = [(step.number, block) for step in steps for block in step.blocks if block.layer == layer]
        slots.append(sum(block.rows * block.positions for _, block in numbered))
        if numbered:
            tensors.update(_layer_tensors(layer, numbered, layer_keys))
    tensors.update(_gradients(steps))
    return tensors, tuple(slots)


def _layer_tensors(layer: int, numbered: Sequence[tuple[int, Block]], equal: EqualKeys) -> Tensors:
    """Return the tensors of one layer. numbered: the number of its step with each block."""
    fields: list[int] = []  # flat: many times as fast as lines
    for step, block in numbered:
        fields += (step, block.backward, block.call, block.first_row, block.rows, block.positions, block.arrival)
    tensors: Tensors = {f"{layer}.blocks": [np.array(fields, dtype=np.int64).reshape(-1, len(BLOCK_FIELDS))]}
    blocks = [block for _, block in numbered]
    if blocks[0].shape:
        tensors.update(_feature_maps(layer, blocks, equal))
    else:
        tensors.update(_keys(layer, blocks, equal))
    tensors.update(_vectors(f"{layer}.error", [block.errors for block in blocks if block.errors is not None]))
    if any(block.silent is not None for block in blocks):
        tensors[f"{layer}.silent"] = [np.concatenate([_silent(block) for block in blocks])]
    return tensors


def _feature_maps(layer: int, blocks: Sequence[Block], equal: EqualKeys) -> Tensors:
    """Return feature maps, which may differ in size: one after the other, flat."""
    equal.number_new(sum([block.keys.count for block in blocks]))
    tensors = _vectors(f"{layer}.key", [block.keys for block in blocks])
    tensors[f"{layer}.keys"] = [block.keys.data.numpy().reshape(-1) for block in blocks]
    tensors[f"{layer}.shapes"] = [np.array([block.shape for block in blocks], dtype=np.int64)]
    return tensors


def _keys(layer: int, blocks: Sequence[Block], equal: EqualKeys) -> Tensors:
    """Return the keys that are new, and, where some may not be, the number of each slot's key."""
    if not any(block.may_repeat for block in blocks):
        equal.number_new(sum([block.keys.count for block in blocks]))
        return _vectors(f"{layer}.key", [block.keys for block in blocks])
    numbers = []
    new: list[Encoded] = []
    for may_repeat, group in groupby(blocks, lambda block: block.may_repeat):
        for keys in _joined([block.keys for block in group]):
            key_numbers, new_places = equal.number(keys, may_repeat=may_repeat)
            numbers.append(key_numbers)
            new += _new_keys(keys, new_places)
    return {f"{layer}.key_numbers": numbers, **_vectors(f"{layer}.key", new)}


def _new_keys(keys: Encoded, places: Ints | None) -> list[Encoded]:
    """Return the keys at these places, copied only if they are not all of them (None)."""
    if places is None or len(places) == keys.count:
        return [keys]
    return [keys.take(places)] if len(places) else []


def _silent(block: Block) -> Array:
    return np.zeros(block.rows * block.positions, np.bool_) if block.silent is None else block.silent


def _gradients(steps: Sequence[Step]) -> Tensors:
    """Return the gradients that are kept themselves, by parameter."""
    gradients: dict[int, list[Array]] = {}
    for step in steps:
        for update in step.updates:
            for number, gradient in zip(update.parameters, update.gradients, strict=True):
                if gradient is not None:
                    gradients.setdefault(number, []).append(gradient)
    return {f"gradient.{number}": [np.stack(kept)] for number, kept in gradients.items()}


def _vectors(name: str, vectors: Sequence[Encoded]) -> Tensors:
    if not vectors:
        return {}
    joined = _joined(vectors)
    tensors: Tensors = {f"{name}s": [stretch.data.numpy() for stretch in joined]}
    if vectors[0].exponents is not None:
        exponents = [stretch.exponents for stretch in joined]
        tensors[f"{name}_exponents"] = [some.numpy() for some in exponents if some is not None]
    return tensors


def _joined(vectors: Sequence[Encoded]) -> list[Encoded]:
    """Join vectors that follow each other in memory: fewer calls for the writer's thread."""
    joined: list[Encoded] = []
    stretch: list[Encoded] = []
    for some in vectors:
        if stretch and not _follows(stretch[-1], some):
            joined.append(_as_one(stretch))
            stretch = []
        stretch.append(some)
    joined.append(_as_one(stretch))
    return joined


def _follows(before: Encoded, after: Encoded) -> bool:
    if before.slab is None or after.slab is not before.slab:
        return False
    return after.first == before.first + before.count


def _as_one(stretch: Sequence[Encoded]) -> Encoded:
    first = stretch[0]
    if len(stretch) == 1 or first.slab is None:
        return first
    count = sum([some.count for some in stretch])
    return first.slab.part(first.first, count)
