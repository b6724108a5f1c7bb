"""Gradients put together again from slots: what an optimizer saw of a parameter, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.dual.coefficients import Updates
from dualform.layers.keys import Keys, Vectors, part
from dualform.layers.streams import Layer, Use
from dualform.recursions import Floats
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk

Ints = np.ndarray[Any, np.dtype[np.int64]]
Keep = Callable[[SlotChunk], np.ndarray[Any, np.dtype[np.bool_]]]
"""Which slots of a chunk take part, (slots,)."""


def compute_dtype(store: Store, parameter: str) -> torch.dtype:
    """float64 for float64 parameters, float32 for all others."""
    kind = store.manifest.parameters[store.parameter(parameter)].dtype
    return torch.float64 if kind == "float64" else torch.float32


def uses_of(layer: Layer, parameter: str) -> list[Use]:
    """How a layer uses a parameter."""
    return [use for use in layer.uses if use.parameter == parameter]


@dataclass(frozen=True)
class Rows:
    """Some rows of a parameter: those whose error signals were kept, or those that a question is about."""

    places: Tensor
    """Of the parameter."""
    columns: Tensor
    """Of the stored error signals."""

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor like the parameter."""
        return tensor[self.places]


def kept_rows(store: Store, parameter: str) -> Rows | None:
    """The rows of a parameter whose error signals were kept; None: all."""
    for layer in store.users(parameter):
        if layer.outputs and any(use.parameter == parameter for use in layer.bilinear()):
            places = torch.tensor(layer.outputs)
            return Rows(places, torch.arange(len(places)))
    return None


def chosen_rows(store: Store, parameter: str, wanted: Sequence[int]) -> Rows | None:
    """Some rows of a parameter, if they can be had without the others; None if not."""
    users = [(layer, use) for layer in store.users(parameter) for use in uses_of(layer, parameter)]
    if len(users) != 1:
        return None
    layer, use = users[0]
    if use.role != "weight" or use.rows or use.errors or use.groups > 1:
        return None
    places = torch.tensor(sorted(wanted), dtype=torch.int64)
    if not layer.outputs:
        return Rows(places, places)
    return Rows(places, torch.tensor([layer.outputs.index(int(unit)) for unit in places]))


def of_slots(use: Use, keys: Keys, errors: Tensor, columns: Tensor | slice | None = None) -> Tensor:
    """Σ over slots of what a use makes of them: rows of the parameter as a matrix, or a vector. columns: some of the errors'."""
    if use.role == "scale":
        return keys.vectors().sum(0)
    errors = part(errors, use.errors) if columns is None or use.role == "bias" else errors[:, columns]
    if use.role == "bias":
        return errors.sum(0)
    found = keys.outer(errors, use.keys, use.groups)
    return found.T if use.role == "table" else found


def whole(layer: Layer, use: Use, found: Tensor, length: int) -> Tensor:
    """What slots write to a bias, with zeros for the outputs whose error signals were not kept."""
    if not layer.outputs or use.role != "bias":
        return found
    spread = found.new_zeros(length)
    spread[list(layer.outputs)] = found
    return spread


TILE_BYTES = 1 << 20
"""So much of a matrix is walked through training at a time: what an update needs of it stays in the cache."""


class Sum:
    """What slots write to a parameter, put together in memory that is used again: fresh pages cost as much as the product."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, columns: Tensor | slice | None = None):
        """columns: only these of the error signals."""
        self._total = torch.empty(*shape, dtype=dtype)
        self._matrix = self._total.reshape(len(self._total), -1) if len(shape) > 1 else self._total
        self._columns = columns
        self.added = 0

    def add(self, layer: Layer, use: Use, keys: Keys, errors: Tensor, factor: float = 1.0) -> None:
        """Add what a use makes of some slots, times a factor: in the product itself, where there is one."""
        is_product = isinstance(keys, Vectors) and use.role in ("weight", "table") and use.groups == 1
        # The first product overwrites whatever the memory holds
        overwrites = not self.added and is_product and not use.rows
        if not self.added and not overwrites:
            self._total.zero_()
        self.added += 1
        own = self._matrix[use.rows[0] : use.rows[1]] if use.rows else self._matrix
        if is_product:
            self._add_product(own, use, keys, errors, factor, overwrites)
            return
        written = whole(layer, use, of_slots(use, keys, errors, self._columns), len(own))
        own.add_(written.reshape(own.shape), alpha=factor)

    def _add_product(self, own: Tensor, use: Use, keys: Keys, errors: Tensor, factor: float, overwrites: bool) -> None:
        left = part(errors, use.errors) if self._columns is None else errors[:, self._columns]
        right = part(keys.vectors(), use.keys)
        if use.role == "table":
            left, right = right, left
        own.addmm_(left.T, right, beta=0.0 if overwrites else 1.0, alpha=factor)

    def taken(self) -> Tensor:
        """The sum, which stays what it is until the next one begins."""
        if not self.added:
            self._total.zero_()
        self.added = 0
        return self._total


Bools = np.ndarray[Any, np.dtype[np.bool_]]
Slots = tuple[float, Layer, Keys, Tensor, Bools | None]
"""Those of one call: the factor of their backward pass, their layer, keys and error signals, and which of them a mask keeps."""


@dataclass(frozen=True)
class Step:
    """What is read for one update."""

    place: int
    recorded: Tensor | None
    """A bias's gradient as it was."""
    slots: list[Slots]
    kept: list[Slots]
    """Of the slots; the same list if that is all of them."""

    @property
    def nbytes(self) -> int:
        """So much memory the slots take."""
        return sum(len(errors) * (layer.d_in + layer.d_out) * errors.itemsize for _, layer, _, errors, _ in self.slots)


class Replayed:
    """The gradients of a parameter, put together again. Chunks are opened as they are needed."""

    def __init__(self, store: Store, updates: Updates, rows: Rows | None = None, keep: Keep | None = None):
        self._store = store
        self.updates = updates
        self._keep = keep
        self.rows = kept_rows(store, updates.parameter) if rows is None else rows
        described = store.manifest.parameters[store.parameter(updates.parameter)]
        self.dtype = compute_dtype(store, updates.parameter)
        self.shape = described.shape if self.rows is None else (len(self.rows.places), *described.shape[1:])
        self._users = store.users(updates.parameter)
        self._uses = {layer.name: uses_of(layer, updates.parameter) for layer in self._users}
        self._small = store.is_vector(updates.parameter)
        self._open: tuple[int, list[tuple[SlotChunk, Layer, Bools | None]], Tensor | None] | None = None
        self._ends = [chunk.end_step for chunk in store.manifest.chunks]

    def uses(self, layer: Layer) -> list[Use]:
        """How a layer's slots make up the parameter."""
        return self._uses[layer.name]

    def sum(self, rows: slice | None = None) -> Sum:
        """Memory for a gradient, or for some rows of it."""
        if rows is not None:
            return Sum((rows.stop - rows.start, *self.shape[1:]), self.dtype, rows)
        return Sum(self.shape, self.dtype, None if self.rows is None else self.rows.columns)

    def tiles(self) -> list[slice | None]:
        """Rows of the parameter that can be walked through training one after the other; None: all of them together."""
        apart = self._users[0].form == "vectors" and chosen_rows(self._store, self.updates.parameter, [])
        if self.rows is not None or not apart:
            return [None]
        height = self.shape[0]
        size = math.prod(self.shape) * self.dtype.itemsize
        each = -(-height // max(1, min(height, round(size / TILE_BYTES))))
        return [slice(low, min(low + each, height)) for low in range(0, height, each)]

    def read(self, place: int) -> Step:
        """The slots of one update, and those of them that the mask keeps."""
        step = int(self.updates.steps[place])
        chunks, gradients = self._chunk(step)
        recorded = gradients[self._row(step)].to(self.dtype) if self._small and gradients is not None else None
        if recorded is not None and self._keep is None:
            return Step(place, recorded, [], [])
        slots = list(self._of_step(chunks, step, self.updates.factors[place]))
        return Step(place, recorded, slots, [] if recorded is not None else _kept(slots))

    def __call__(self, step: Step, total: Sum) -> Tensor:
        """The gradient of one update, as the optimizer saw it."""
        return self._added(step.slots, total) if step.recorded is None else step.recorded

    def kept(self, step: Step, total: Sum) -> Tensor:
        """The part of it that the mask keeps."""
        return self._added(step.kept, total) if step.recorded is None else self._without(step.recorded, step.slots)

    def _added(self, slots: list[Slots], total: Sum) -> Tensor:
        for factor, layer, keys, errors, _ in slots:
            for use in self._uses[layer.name]:
                total.add(layer, use, keys, errors, factor)
        return total.taken()

    def _without(self, full: Tensor, slots: list[Slots]) -> Tensor:
        """A bias's gradient without the slots left out.

        What slots write to a bias may cancel to rounding (before a normalisation, in an attention), and Adam divides that by its
        own size: the sum is made in a longer type, so that masks add up even then.
        """
        longer = np.longdouble if self.dtype == torch.float64 else np.float64
        rest = full.numpy().astype(longer).reshape(-1)
        for factor, layer, keys, errors, kept in slots:
            for use in self._uses[layer.name]:
                written = keys.vectors() if use.role == "scale" else part(errors, use.errors)
                left = written.numpy()[~np.asarray(kept)].sum(0, dtype=longer) * longer(factor)
                own = rest[use.rows[0] : use.rows[1]] if use.rows else rest
                np.subtract.at(own, list(layer.outputs), left) if layer.outputs else np.subtract(own, left, out=own)
        return torch.from_numpy(rest.astype(np.float64)).reshape(full.shape).to(self.dtype)

    def _of_step(
        self, chunks: Sequence[tuple[SlotChunk, Layer, Bools | None]], step: int, factors: Floats
    ) -> Iterator[Slots]:
        """The slots of a step, call by call."""
        for chunk, layer, kept in chunks:
            only_errors = all(use.role == "bias" for use in self._uses[layer.name])
            for factor, low, high in calls_of_step(chunk, step, factors):
                errors = chunk.errors(self.dtype, low, high)
                keys = Vectors(errors[:, :0]) if only_errors else chunk.keys(self.dtype, low, high)
                yield factor, layer, keys, errors, None if kept is None else kept[low:high]

    def _chunk(self, step: int) -> tuple[list[tuple[SlotChunk, Layer, Bools | None]], Tensor | None]:
        place = int(np.searchsorted(self._ends, step, side="right"))
        if self._open is None or self._open[0] != place:
            found = []
            for layer in self._users:
                chunk = self._store.chunk_of(layer.name, place, self.updates.end)
                if chunk is not None:
                    found.append((chunk, layer, None if self._keep is None else self._keep(chunk)))
            self._open = (place, found, self._store.gradients_in(place, self.updates.parameter))
        return self._open[1], self._open[2]

    def _row(self, step: int) -> int:
        """The place of an update among those of its chunk."""
        place = int(np.searchsorted(self._ends, step, side="right"))
        first = self._store.manifest.chunks[place].first_step
        low, high = np.searchsorted(self._kept_steps, [first, step])
        return int(high - low)

    @cached_property
    def _kept_steps(self) -> Ints:
        mine = (pl.col("parameter") == self._store.parameter(self.updates.parameter)) & pl.col("gradient_kept")
        steps: Ints = self._store.updates.filter(mine)["step"].to_numpy().astype(np.int64)
        return steps


def calls_of_step(chunk: SlotChunk, step: int, factors: Floats) -> Iterator[tuple[float, int, int]]:
    """The calls of a step that count: the factor of their backward pass, and where their slots begin and end in the chunk."""
    first, last = np.searchsorted(chunk.blocks[:, 0], [step, step + 1]).tolist()
    for block in range(first, last):
        backward = int(chunk.blocks[block, 1])
        factor = float(factors[backward]) if backward < len(factors) else 0.0
        low = int(chunk.starts[block])
        high = low + int(chunk.counts[block])
        if factor and low < high:
            yield factor, low, high


def _kept(slots: list[Slots]) -> list[Slots]:
    """Return the slots that a mask keeps; the same list if that is all of them."""
    if all(kept is None or kept.all() for *_, kept in slots):
        return slots
    return [_those(call) for call in slots if call[-1] is not None and call[-1].any()]


def _those(slots: Slots) -> Slots:
    """The slots of a call that are kept; of feature maps all, with error signals of 0 for the others."""
    factor, layer, keys, errors, kept = slots
    taken = torch.from_numpy(kept)
    if isinstance(keys, Vectors) and layer.form == "vectors":
        places = taken.nonzero()[:, 0]
        return factor, layer, keys.some(places), errors.index_select(0, places), None
    return factor, layer, weighted_parts(keys, layer, taken), errors * taken.unsqueeze(1), None


def weighted_parts(keys: Keys, layer: Layer, taken: Tensor) -> Keys:
    """An elementwise weight has no error signal to weigh: its slots' own parts are weighed instead."""
    if layer.form != "parts":
        return keys
    return Vectors(keys.vectors() * taken.unsqueeze(1))
