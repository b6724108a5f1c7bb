"""Gradients put together again from slots: what an optimizer saw of a parameter, step by step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.arrays import Bools, Floats, Ints
from dualform.dual.coefficients import Updates
from dualform.dual.rows import Rows, kept_rows
from dualform.layers.keys import KeysOrGradients, RowGradients, Vectors, select_columns
from dualform.layers.layer import Layer, Use
from dualform.layers.written import each_written, sum_written, used_errors, used_rows
from dualform.store.format import Parameter
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk
from dualform.store.unkept import require_gradients
from dualform.totals.sums import sum_by_group

Keep = Callable[[SlotChunk], Bools]
"""Which slots of a chunk take part, (slots,)."""


def description(store: Store, parameter: str) -> Parameter:
    """Return what the manifest says of a parameter."""
    return store.manifest.parameters[store.parameter(parameter)]


def compute_dtype(store: Store, parameter: str) -> torch.dtype:
    """float64 for float64 parameters, float32 for all others."""
    is_double = description(store, parameter).dtype == "float64"
    return torch.float64 if is_double else torch.float32


def chunk_place(store: Store, step: int) -> int:
    """Return the place of the chunk that holds a step."""
    return bisect_right(store.manifest.chunks, step, key=lambda chunk: chunk.end_step)


def _with_unkept(
    layer: Layer,
    use: Use,
    written: Tensor,
    length: int,
) -> Tensor:
    """What slots write to a bias, with zeros for the outputs whose error signals were not kept."""
    if not layer.outputs or use.role != "bias":
        return written
    spread = written.new_zeros(length)
    spread[list(layer.outputs)] = written
    return spread


class Sum:
    """What slots write to a parameter, put together in memory that is used again: fresh pages cost as much as the product."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        columns: Tensor | None = None,
    ):
        """columns: only these of the error signals."""
        self._total = torch.zeros(*shape, dtype=dtype)
        self._matrix = self._total.flatten(1) if len(shape) > 1 else self._total
        self._columns = columns
        self.added = 0

    def add(
        self,
        layer: Layer,
        use: Use,
        keys: KeysOrGradients,
        errors: Tensor,
        factor: float = 1.0,
    ) -> None:
        """Add what a use makes of some slots, times a factor."""
        if not self.added:
            self._total.zero_()
        self.added += 1
        own = used_rows(use, self._matrix)
        is_one_product = use.role in ("weight", "table") and use.groups == 1
        if is_one_product and isinstance(keys, Vectors):
            self._add_product(own, use, keys, errors, factor)
            return
        written = sum_written(use, keys, errors, self._columns)
        written = _with_unkept(layer, use, written, len(own))
        own.add_(written.reshape(own.shape), alpha=factor)

    def _add_product(
        self,
        own: Tensor,
        use: Use,
        keys: Vectors,
        errors: Tensor,
        factor: float,
    ) -> None:
        """Add errors.T @ keys without memory for the product."""
        own_errors = used_errors(use, errors, self._columns)
        used_keys = select_columns(keys.vectors(), use.keys)
        if use.role == "table":
            own.addmm_(used_keys.T, own_errors, alpha=factor)
        else:
            own.addmm_(own_errors.T, used_keys, alpha=factor)

    def taken(self) -> Tensor:
        """The sum, which stays what it is until the next one begins."""
        if not self.added:
            self._total.zero_()
        self.added = 0
        return self._total


@dataclass(frozen=True)
class Call:
    """The slots of one call of a layer."""

    layer: Layer
    factor: float
    """Of its backward pass."""
    keys: KeysOrGradients
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
            keys = self.keys.select(places)
            return Call(self.layer, self.factor, keys, self.errors.index_select(0, places))
        all_keys = weighted_parts(self.keys, self.layer, kept)
        errors = self.errors * kept.unsqueeze(1)
        return Call(self.layer, self.factor, all_keys, errors)


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


@dataclass(frozen=True)
class _OpenChunk:
    """What a chunk has of a parameter."""

    place: int
    layers: list[tuple[SlotChunk, Bools | None]]
    """The slots of each layer, and which of them a mask keeps; None: all."""
    gradients: Tensor | None
    """The gradients of a bias, as they were."""


class Replayed:
    """The gradients of a parameter, put together again. Chunks are opened as they are needed."""

    def __init__(
        self,
        store: Store,
        updates: Updates,
        rows: Rows | None = None,
        keep: Keep | None = None,
    ):
        require_gradients(store, "this question", updates.parameter)
        self.store = store
        self.updates = updates
        self._keep = keep
        self._parameter = updates.parameter
        self.rows = kept_rows(store, self._parameter) if rows is None else rows
        self.dtype = compute_dtype(store, self._parameter)
        self.shape = self._shape()
        self._users = store.users(self._parameter)
        self._uses = {layer.name: layer.uses_of(self._parameter) for layer in self._users}
        self._is_vector = store.is_vector(self._parameter)
        self._open: _OpenChunk | None = None

    def uses(self, layer: Layer) -> list[Use]:
        """How a layer's slots make up the parameter."""
        return self._uses[layer.name]

    def _shape(self) -> tuple[int, ...]:
        shape = description(self.store, self._parameter).shape
        return shape if self.rows is None else (len(self.rows.places), *shape[1:])

    def sum(self) -> Sum:
        """Memory for a gradient."""
        columns = None if self.rows is None else self.rows.columns
        return Sum(self.shape, self.dtype, columns)

    def read(self, place: int) -> Step:
        """The slots of one update."""
        step = int(self.updates.steps[place])
        chunk = self._chunk_of(step)
        recorded = None
        if self._is_vector and chunk.gradients is not None:
            recorded = chunk.gradients[self._row(chunk, step)].to(self.dtype)
        if recorded is not None and self._keep is None:
            return Step(recorded, [])
        factors = self.updates.factors[place]
        calls = list(self._calls(chunk, step, factors))
        return Step(recorded, calls)

    def __call__(self, step: Step, total: Sum) -> Tensor:
        """The gradient of one update, as the optimizer saw it."""
        if step.recorded is not None:
            return step.recorded
        return self._added(step.calls, total)

    def kept(self, step: Step, total: Sum) -> Tensor:
        """The part of it that the mask keeps."""
        if step.recorded is not None:
            return self._without(step.recorded, step.calls)
        masked = [call.masked() for call in step.calls]
        return self._added(masked, total)

    def _added(self, calls: list[Call], total: Sum) -> Tensor:
        for call in calls:
            for use in self.uses(call.layer):
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
            left_out = ~np.asarray(call.kept)
            outputs = list(call.layer.outputs) or slice(None)
            for use in self.uses(call.layer):
                written = each_written(use, call.keys, call.errors)
                [sum_of_left] = sum_by_group(written.numpy()[left_out], longer)
                used_rows(use, rest)[outputs] -= sum_of_left * longer(call.factor)
        result = torch.from_numpy(rest.astype(np.float64))
        return result.reshape(full.shape).to(self.dtype)

    def _calls(
        self,
        opened: _OpenChunk,
        step: int,
        factors: Floats,
    ) -> Iterator[Call]:
        """The slots of a step, call by call."""
        for chunk, kept in opened.layers:
            layer = chunk.layer
            only_errors = all(use.role == "bias" for use in self.uses(layer))
            for factor, low, high in calls_of_step(chunk, step, factors):
                kept_here = None if kept is None else kept[low:high]
                if only_errors and not chunk.is_gradient(low, high):
                    errors = chunk.errors(self.dtype, low, high)
                    yield Call(layer, factor, Vectors(errors[:, :0]), errors, kept_here)
                else:
                    yield Call(layer, factor, *chunk.pairs(self.dtype, low, high), kept_here)

    def _chunk_of(self, step: int) -> _OpenChunk:
        """The chunk that holds a step; the last one stays open."""
        place = chunk_place(self.store, step)
        if self._open is None or self._open.place != place:
            self._open = self._opened(place)
        return self._open

    def _opened(self, place: int) -> _OpenChunk:
        chunks = [self.store.chunk_of(layer.name, place, self.updates.end) for layer in self._users]
        layers = []
        for chunk in chunks:
            if chunk is not None:
                kept = None if self._keep is None else self._keep(chunk)
                layers.append((chunk, kept))
        return _OpenChunk(place, layers, self.store.gradients_in(place, self._parameter))

    def _row(self, chunk: _OpenChunk, step: int) -> int:
        """The place of an update among those of its chunk."""
        first = self.store.manifest.chunks[chunk.place].first_step
        low, high = np.searchsorted(self._kept_steps, [first, step])
        return int(high - low)

    @cached_property
    def _kept_steps(self) -> Ints:
        is_mine = pl.col("parameter") == self.store.parameter(self._parameter)
        mine = self.store.updates.filter(is_mine & pl.col("gradient_kept"))
        steps: Ints = mine["step"].to_numpy().astype(np.int64)
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


def weighted_parts(keys: KeysOrGradients, layer: Layer, taken: Tensor) -> KeysOrGradients:
    """An elementwise weight has no error signal to weigh: its slots' own parts are weighed instead."""
    if layer.form != "parts" or isinstance(keys, RowGradients):
        return keys
    return Vectors(keys.vectors() * taken.unsqueeze(1))
