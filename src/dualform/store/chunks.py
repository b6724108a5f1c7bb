"""The tensors of a chunk, from the steps that it holds: nothing is copied together, equal keys are left out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from dualform.store.encoding import Encoded
from dualform.store.equal import EqualKeys
from dualform.store.format import BLOCK_FIELDS
from dualform.store.records import Block, Step
from dualform.store.tensor_writer import Array


def slot_tensors(
    steps: Sequence[Step], equal: Sequence[EqualKeys]
) -> tuple[dict[str, Sequence[Array]], tuple[int, ...]]:
    """The tensors by name, each in pieces; and how many slots each layer has."""
    tensors: dict[str, Sequence[Array]] = {}
    slots = []
    for layer in range(len(equal)):
        blocks = [(step.number, block) for step in steps for block in step.blocks if block.layer == layer]
        slots.append(sum(block.rows * block.positions for _, block in blocks))
        if not blocks:
            continue
        table = [
            field for n, b in blocks for field in (n, b.backward, b.call, b.first_row, b.rows, b.positions, b.arrival)
        ]  # flat: many times as fast as lines
        tensors[f"{layer}.blocks"] = [np.array(table, dtype=np.int64).reshape(-1, len(BLOCK_FIELDS))]
        tensors.update(_keys(layer, [b for _, b in blocks], equal[layer]))
        if blocks[0][1].shape:
            tensors[f"{layer}.shapes"] = [np.array([b.shape for _, b in blocks], dtype=np.int64)]
        tensors.update(_vectors(f"{layer}.error", [b.errors for _, b in blocks if b.errors is not None]))
        tensors.update(_silent(layer, [b for _, b in blocks]))
    gradients: dict[int, list[Array]] = {}
    for step in steps:
        for update in step.updates:
            for number, gradient in zip(update.parameters, update.gradients, strict=True):
                if gradient is not None:
                    gradients.setdefault(number, []).append(gradient)
    tensors |= {f"gradient.{number}": [np.stack(some)] for number, some in gradients.items()}
    return tensors, tuple(slots)


def _keys(layer: int, blocks: Sequence[Block], equal: EqualKeys) -> dict[str, Sequence[Array]]:
    """The keys that are new, and, where some are not, the number of each slot's key."""
    if blocks[0].shape:  # feature maps may differ in size: one after the other, flat
        equal.stored += sum([block.keys.count for block in blocks])
        found = _vectors(f"{layer}.key", [block.keys for block in blocks])
        return {**found, f"{layer}.keys": [block.keys.data.numpy().reshape(-1) for block in blocks]}
    if not any(block.may_repeat for block in blocks):
        equal.stored += sum([block.keys.count for block in blocks])
        return _vectors(f"{layer}.key", [block.keys for block in blocks])
    numbers, new = [], []
    for may_repeat, some in groupby(blocks, lambda block: block.may_repeat):
        for keys in _joined([block.keys for block in some]):
            numbered, places = equal.number(keys, may_repeat=may_repeat)
            numbers.append(numbered)
            if places is None or len(places) == keys.count:
                new.append(keys)
            elif len(places):
                new.append(keys.take(places))
    return {f"{layer}.key_numbers": numbers, **_vectors(f"{layer}.key", new)}


def _silent(layer: int, blocks: Sequence[Block]) -> dict[str, Sequence[Array]]:
    """One flag for each slot, if any slot is silent."""
    if all(block.silent is None for block in blocks):
        return {}
    flags = [
        np.zeros(block.rows * block.positions, np.bool_) if block.silent is None else block.silent for block in blocks
    ]
    return {f"{layer}.silent": [np.concatenate(flags)]}


def _vectors(name: str, vectors: Sequence[Encoded]) -> dict[str, Sequence[Array]]:
    if not vectors:
        return {}
    joined = _joined(vectors)
    tensors: dict[str, Sequence[Array]] = {f"{name}s": [one.data.numpy() for one in joined]}
    if vectors[0].exponents is not None:
        tensors[f"{name}_exponents"] = [one.exponents.numpy() for one in joined if one.exponents is not None]
    return tensors


def _joined(vectors: Sequence[Encoded]) -> list[Encoded]:
    """The stored vectors, those that follow each other in memory as one: fewer calls for the writer's thread."""
    found: list[Encoded] = []
    stretch: list[Encoded] = []
    end = 0
    for one in vectors:
        follows = one.first == end and one.slab is not None
        if stretch and not (follows and one.slab is stretch[0].slab and one.stream == stretch[0].stream):
            found.append(_together(stretch))
            stretch = []
        stretch.append(one)
        end = one.first + one.count
    return [*found, _together(stretch)]


def _together(stretch: Sequence[Encoded]) -> Encoded:
    first, slab = stretch[0], stretch[0].slab
    if len(stretch) == 1 or slab is None:
        return first
    end = stretch[-1].first + stretch[-1].count
    return slab.vectors(first.stream, first.first, end - first.first)
