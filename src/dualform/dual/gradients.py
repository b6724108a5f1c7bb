"""Gradients put together again from slots: what an optimizer saw of a parameter, step by step."""

from __future__ import annotations

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


class Sum:
    """What slots write to a parameter, put together in memory that is used again: fresh pages cost as much as the product."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, columns: Tensor | None = None):
        """columns: only these of the error signals."""
        self._total = torch.zeros(*shape, dtype=dtype)
        self._matrix = self._total.reshape(len(self._total), -1) if len(shape) > 1 else self._total
        self._columns = columns
        self.added = 0

    def add(self, layer: Layer, use: Use, keys: Keys, errors: Tensor, factor: float = 1.0) -> None:
        """Add what a use makes of some slots, times a factor."""
        if not self.added:
            self._total.zero_()
        self.added += 1
        own = self._matrix[use.rows[0] : use.rows[1]] if use.rows else self._matrix
        if not isinstance(keys, Vectors) or use.role not in ("weight", "table") or use.groups > 1:
            written = whole(layer, use, of_slots(use, keys, errors, self._columns), len(own))
            own.add_(written.reshape(own.shape), alpha=factor)
            return
        # One product, without memory for it
        left = part(errors, use.errors) if self._columns is None else errors[:, self._columns]
        right = part(keys.vectors(), use.keys)
        if use.role == "table":
            left, right = right, left
        own.addmm_(left.T, right, alpha=factor)

    def taken(self) -> Tensor:
        """The sum, which stays what it is until the next one begins."""
        if not self.added:
            self._total.zero_()
        self.added = 0
        return self._total


Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Call:
    """The slots of one call of a layer."""

    layer: Layer
    factor: float
    """Of its backward pass."""
    keys: Keys
    errors: Tensor
    kept: Bools | None = None
    """(slots,): which of them a mask keeps; None: all."""

    @property
    def keeps_all(self) -> bool:
        """Whether the mask keeps every slot."""
        return self.kept is None or bool(self.kept.all())

    def masked(self) -> Call:
        """Return the slots that the mask keeps; of feature maps all, with error signals of 0 for the others."""
        if self.keeps_all:
            return self
        kept = torch.from_numpy(self.kept)
        if self.layer.form == "vectors" and isinstance(self.keys, Vectors):
            places = kept.nonzero()[:, 0]
            return Call(self.layer, self.factor, self.keys.some(places), self.errors.index_select(0, places))
        keys = weighted_parts(self.keys, self.layer, kept)
        return Call(self.layer, self.factor, keys, self.errors * kept.unsqueeze(1))


@dataclass(frozen=True)
class Step:
    """What is read for one update."""

    recorded: Tensor | None
    """The gradient of a bias as it was; its slots are read only for a mask."""
    calls: list[Call]

    @property
    def keeps_all(self) -> bool:
        """Whether a mask keeps every slot."""
        return all(call.keeps_all for call in self.calls)


_OpenChunk = tuple[SlotChunk, Layer, Bools | None]
"""The slots of a layer in a chunk, and which of them a mask keeps."""


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
        self._open: tuple[int, list[_OpenChunk], Tensor | None] | None = None
        self._ends = [chunk.end_step for chunk in store.manifest.chunks]

    def uses(self, layer: Layer) -> list[Use]:
        """How a layer's slots make up the parameter."""
        return self._uses[layer.name]

    def sum(self) -> Sum:
        """Memory for a gradient."""
        return Sum(self.shape, self.dtype, None if self.rows is None else self.rows.columns)

    def read(self, place: int) -> Step:
        """The slots of one update."""
        step = int(self.updates.steps[place])
        chunks, gradients = self._chunk(step)
        recorded = gradients[self._row(step)].to(self.dtype) if self._small and gradients is not None else None
        if recorded is not None and self._keep is None:
            return Step(recorded, [])
        return Step(recorded, list(self._calls(chunks, step, self.updates.factors[place])))

    def __call__(self, step: Step, total: Sum) -> Tensor:
        """The gradient of one update, as the optimizer saw it."""
        return self._added(step.calls, total) if step.recorded is None else step.recorded

    def kept(self, step: Step, total: Sum) -> Tensor:
        """The part of it that the mask keeps."""
        if step.recorded is not None:
            return self._without(step.recorded, step.calls)
        return self._added([call.masked() for call in step.calls], total)

    def _added(self, calls: list[Call], total: Sum) -> Tensor:
        for call in calls:
            for use in self._uses[call.layer.name]:
                total.add(call.layer, use, call.keys, call.errors, call.factor)
        return total.taken()

    def _without(self, full: Tensor, calls: list[Call]) -> Tensor:
        """A bias's gradient without the slots left out.

        What slots write to a bias may cancel to rounding (before a normalisation, in an attention), and Adam divides that by its
        own size: the sum is made in a longer type, so that masks add up even then.
        """
        longer = np.longdouble if self.dtype == torch.float64 else np.float64
        rest: np.ndarray[Any, Any] = full.numpy().astype(longer).reshape(-1)
        for call in calls:
            for use in self._uses[call.layer.name]:
                written = call.keys.vectors() if use.role == "scale" else part(call.errors, use.errors)
                left = written.numpy()[~np.asarray(call.kept)].sum(0, dtype=longer) * longer(call.factor)
                own = rest[use.rows[0] : use.rows[1]] if use.rows else rest
                own[list(call.layer.outputs) or slice(None)] -= left
        return torch.from_numpy(rest.astype(np.float64)).reshape(full.shape).to(self.dtype)

    def _calls(self, chunks: Sequence[_OpenChunk], step: int, factors: Floats) -> Iterator[Call]:
        """The slots of a step, call by call."""
        for chunk, layer, kept in chunks:
            only_errors = all(use.role == "bias" for use in self._uses[layer.name])
            for factor, low, high in calls_of_step(chunk, step, factors):
                errors = chunk.errors(self.dtype, low, high)
                keys = Vectors(errors[:, :0]) if only_errors else chunk.keys(self.dtype, low, high)
                yield Call(layer, factor, keys, errors, None if kept is None else kept[low:high])

    def _chunk(self, step: int) -> tuple[list[_OpenChunk], Tensor | None]:
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


def weighted_parts(keys: Keys, layer: Layer, taken: Tensor) -> Keys:
    """An elementwise weight has no error signal to weigh: its slots' own parts are weighed instead."""
    if layer.form != "parts":
        return keys
    return Vectors(keys.vectors() * taken.unsqueeze(1))
