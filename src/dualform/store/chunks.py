"""The tensors of a chunk, from the steps that it holds: nothing is copied together, and equal keys are stored once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np
import xxhash

from dualform.arrays import Array, Ints
from dualform.store.encoding import Encoded
from dualform.store.records import Block, Step, written_slots

Tensors = dict[str, Sequence[Array]]
"""Tensors by name, each in pieces."""
StepBlock = tuple[int, Block]
"""A block, and the number of its step."""

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
        """Remember keys that are stored already, from number `first` on."""
        for number, digest in enumerate(_digests(keys), first):
            self._numbers.setdefault(digest, number)

    def number(self, keys: Encoded) -> tuple[Ints, Ints]:
        """Return the number of each key, (n,), and the places of those that are not stored yet."""
        if self._gave_up:
            all_places = np.arange(keys.count)
            return self.number_as_new(keys.count), all_places
        numbers = []
        new_places = []
        for place, digest in enumerate(_digests(keys)):
            number = self._numbers.setdefault(digest, self.stored)
            if number == self.stored:
                new_places.append(place)
                self.stored += 1
            numbers.append(number)
        self._compared += keys.count
        distinct = len(self._numbers)
        if distinct > PATIENCE and self._compared < 1.01 * distinct:
            self._gave_up = True
            self._numbers.clear()
        return np.array(numbers, np.int64), np.array(new_places, np.int64)

    def number_as_new(self, count: int) -> Ints:
        """Return the numbers of keys that are not compared with others."""
        first = self.stored
        self.stored += count
        return np.arange(first, self.stored)


def _digests(keys: Encoded) -> list[bytes]:
    """Return a 128-bit digest of each key, seeded with its exponent."""
    content = np.ascontiguousarray(keys.data.numpy())
    vectors = content.view(np.uint8)
    if keys.exponents is None:
        return list(map(xxhash.xxh3_128_digest, vectors))
    seeds = keys.exponents.tolist()
    return list(map(xxhash.xxh3_128_digest, vectors, seeds))


def slot_tensors(steps: Sequence[Step], equal: Sequence[EqualKeys]) -> tuple[Tensors, tuple[int, ...]]:
    """Return the tensors of a chunk, and how many slots each layer has. equal: by layer number."""
    blocks_by_layer: list[list[StepBlock]] = [[] for _ in equal]
    for step in steps:
        for block in step.blocks:
            blocks = blocks_by_layer[block.layer]
            blocks.append((step.number, block))
    slots = []
    tensors = _gradients(steps)
    for layer, step_blocks in enumerate(blocks_by_layer):
        slots.append(sum(block.slots for _, block in step_blocks))
        of_layer = _layer_tensors(step_blocks, equal[layer])
        for name, pieces in of_layer.items():
            tensors[f"{layer}.{name}"] = pieces
    return tensors, tuple(slots)


def _gradients(steps: Sequence[Step]) -> Tensors:
    """Return the gradients that are kept themselves, by parameter."""
    gradients: dict[int, list[Array]] = {}
    for step in steps:
        for update in step.updates:
            for parameter, gradient in zip(update.parameters, update.gradients, strict=True):
                if gradient is not None:
                    gradients.setdefault(parameter, []).append(gradient)
    tensors: Tensors = {}
    for parameter, kept in gradients.items():
        tensors[f"gradient.{parameter}"] = [np.stack(kept)]
    return tensors


def _layer_tensors(step_blocks: Sequence[StepBlock], equal: EqualKeys) -> Tensors:
    """Return the tensors of one layer."""
    if not step_blocks:
        return {}
    blocks = [block for _, block in step_blocks]
    tensors = _row_gradients(blocks)
    tensors["blocks"] = [_block_table(step_blocks)]
    if blocks[0].shape:
        shapes = [block.shape for block in blocks]
        tensors["shapes"] = [np.array(shapes, np.int64)]
    of_slots = [block for block in blocks if not block.is_gradient]
    if of_slots:
        tensors.update(_slots(of_slots, equal))
    if any(block.silent is not None for block in blocks):
        tensors["silent"] = [_silent(block) for block in blocks]
    return tensors


def _slots(blocks: Sequence[Block], equal: EqualKeys) -> Tensors:
    """Return keys and error signals."""
    are_maps = bool(blocks[0].shape)
    tensors = _maps(blocks, equal) if are_maps else _keys(blocks, equal)
    errors = [block.errors for block in blocks if block.errors is not None]
    tensors.update(_vectors("error", errors))
    return tensors


def _row_gradients(blocks: Sequence[Block]) -> Tensors:
    """Return the gradients that rows were summed to, and what is known of all sums; nothing, if no slots were summed."""
    if all(block.sums is None for block in blocks):
        return {}
    gradients = [block.keys for block in blocks if block.is_gradient]
    sums = [_sums(block) for block in blocks]
    tensors = _vectors("gradient", gradients)
    tensors["sums"] = [np.array(sums, np.int64)]
    return tensors


def _sums(block: Block) -> tuple[int, int, int]:
    """Return how a block's slots were summed: SUM_FIELDS."""
    positions = block.positions if block.sums is None else block.sums.positions
    return int(block.is_gradient), positions, written_slots(block)


def _block_table(step_blocks: Sequence[StepBlock]) -> Ints:
    """Return the BLOCK_FIELDS (store/format.py) of each block, (blocks, 7)."""
    lines = []
    for step, block in step_blocks:
        line = (
            step,
            block.backward,
            block.call,
            block.first_row,
            block.rows,
            block.positions,
            block.arrival,
        )
        lines.append(line)
    return np.array(lines, np.int64)


def _maps(blocks: Sequence[Block], equal: EqualKeys) -> Tensors:
    """Return feature maps, which may differ in size: one after the other, flat."""
    keys = [block.keys for block in blocks]
    equal.number_as_new(_count(keys))
    tensors = _vectors("key", keys)
    tensors["keys"] = [maps.data.numpy().reshape(-1) for maps in keys]
    return tensors


def _keys(blocks: Sequence[Block], equal: EqualKeys) -> Tensors:
    """Return the keys that are new, and, where some may not be, the number of each slot's key."""
    if not any(block.may_repeat for block in blocks):
        keys = [block.keys for block in blocks]
        equal.number_as_new(_count(keys))
        return _vectors("key", keys)
    numbers = []
    new: list[Encoded] = []
    for may_repeat, group in groupby(blocks, attrgetter("may_repeat")):
        for stretch in _joined([block.keys for block in group]):
            if not may_repeat:
                numbers.append(equal.number_as_new(stretch.count))
                new.append(stretch)
                continue
            stretch_numbers, new_places = equal.number(stretch)
            numbers.append(stretch_numbers)
            if len(new_places) == stretch.count:
                new.append(stretch)  # not copied
            elif len(new_places):
                new.append(stretch.take(new_places))
    tensors = _vectors("key", new)
    tensors["key_numbers"] = numbers
    return tensors


def _silent(block: Block) -> Array:
    if block.silent is not None:
        return block.silent
    return np.zeros(block.slots, np.bool_)


def _vectors(what: str, vectors: Sequence[Encoded]) -> Tensors:
    """Return vectors, and their exponents if they have any. what: "key" or "error"."""
    if not vectors:
        return {}
    data: list[Array] = []
    exponents: list[Array] = []
    for stretch in _joined(vectors):
        data.append(stretch.data.numpy())
        if stretch.exponents is not None:
            exponents.append(stretch.exponents.numpy())
    tensors: Tensors = {f"{what}s": data}
    if exponents:
        tensors[f"{what}_exponents"] = exponents
    return tensors


def _count(vectors: Sequence[Encoded]) -> int:
    return sum(piece.count for piece in vectors)


def _joined(vectors: Sequence[Encoded]) -> list[Encoded]:
    """Join vectors that follow each other in memory: fewer calls for the writer's thread."""
    stretches: list[list[Encoded]] = []
    for piece in vectors:
        if stretches and _follows(stretches[-1][-1], piece):
            stretches[-1].append(piece)
        else:
            stretches.append([piece])
    return [_as_one(stretch) for stretch in stretches]


def _follows(before: Encoded, after: Encoded) -> bool:
    if before.slab is None or after.slab is not before.slab:
        return False
    return after.first == before.first + before.count


def _as_one(stretch: Sequence[Encoded]) -> Encoded:
    first = stretch[0]
    if len(stretch) == 1 or first.slab is None:
        return first
    return first.slab.part(first.first, _count(stretch))
