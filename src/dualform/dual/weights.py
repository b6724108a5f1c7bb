"""Parameters put together again: initial part plus what the slots wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.dual.coefficients import Coefficients, is_elementwise, updates_of, walked
from dualform.dual.gradients import Keep, Rows, Sum, compute_dtype, kept_rows, uses_of, weighted_parts
from dualform.dual.replay import Backward, Moment, forward
from dualform.layers.keys import Keys, Vectors
from dualform.layers.streams import Layer, Use
from dualform.recursions import KINDS
from dualform.store.format import SLOTS
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk

PRODUCTS = 8
"""How many products are added in their own type before the sum is added in float64."""

PRODUCT_SLOTS = 512
"""So many slots are summed in one product: about as many as in a step of training, so that ours rounds no more than the training's."""

Reached = dict[str, tuple[int, Moment]]
"""By parameter: after which step, and what it is there."""


def initial_part(store: Store, parameter: str, found: Coefficients, rows: Rows | None = None) -> Tensor:
    """a·W_begin + b·average_begin, float64; `begin` must have a snapshot."""
    snapshot = store.snapshot(found.updates.begin)
    average = KINDS[found.updates.kind].average
    total = snapshot[f"model.{parameter}"].double() * found.walked.a
    if average and f"state.{parameter}.{average}" in snapshot:
        total += snapshot[f"state.{parameter}.{average}"].double() * found.walked.b
    return total if rows is None else rows.of(total)


def initial(store: Store, parameter: str, end: int, rows: Rows | None = None) -> Tensor:
    """The initial part of a parameter at `end`, float64."""
    updates = updates_of(store, parameter, end=end)
    if not is_elementwise(updates):
        return initial_part(store, parameter, walked(updates), rows)
    found = _initial_of_walk(Backward(store, updates, rows))
    if not found.isfinite().all():
        found = _initial_of_walk(Backward(store, updates, rows, wide=True))
    return found


def _initial_of_walk(walk: Backward) -> Tensor:
    for _ in walk:
        pass
    return walk.initial


def scaled(chunk: SlotChunk, found: Coefficients, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """(slots, 1): −coefficient of each slot."""
    return torch.from_numpy(-chunk.per_slot(found.of_blocks(chunk))[low:high]).to(dtype).unsqueeze(1)


def values(chunk: SlotChunk, found: Coefficients, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """−coefficient × error signal, (slots, d_out): the e_t of the paper's equation 11."""
    return chunk.errors(dtype, low, high) * scaled(chunk, found, low, high, dtype)


def rebuilt(
    store: Store, parameter: str, *, begin: int, end: int, keep: Keep | None = None, reached: Reached | None = None
) -> Tensor:
    """Initial part + what the slots that take part wrote, float64; of a layer with outputs=, those rows.

    reached: how far walks through training have come without a mask; this one goes on from there, and writes down where it ends.
    """
    updates = updates_of(store, parameter, begin=begin, end=end)
    if is_elementwise(updates):
        if reached is None or keep is not None:
            return forward(store, updates, keep, only_masked=True)[1].weight.double()
        step, first = reached.get(parameter, (-1, None))
        on = begin <= step <= end
        now, _ = forward(store, updates.between(step, end) if on else updates, first=first if on else None)
        reached[parameter] = end, now
        return now.weight.to(torch.float64, copy=True)
    found = walked(updates)
    if store.is_vector(parameter):
        return _rebuilt_small(store, parameter, found, keep)
    rows = kept_rows(store, parameter)
    total = initial_part(store, parameter, found, rows)
    add_slots(store, parameter, found, total, rows, keep)
    return total


def _rebuilt_small(store: Store, parameter: str, found: Coefficients, keep: Keep | None) -> Tensor:
    """A bias from its recorded gradients, less what the slots left out wrote.

    Its gradients are kept as they were, so that even a bias that moves on rounding noise alone is exact.
    """
    updates = found.updates
    total = initial_part(store, parameter, found)
    gradients = store.gradients(parameter)
    if gradients is not None:
        every = updates_of(store, parameter)
        here = torch.from_numpy((every.steps >= updates.begin) & (every.steps < updates.end))
        total -= torch.tensordot(torch.from_numpy(found.walked.c), gradients[here].double(), 1)
    if keep is not None:
        left = torch.zeros_like(total)
        add_slots(store, parameter, found, left, None, lambda chunk: ~keep(chunk))
        total -= left
    return total


def add_slots(
    store: Store, parameter: str, found: Coefficients, total: Tensor, rows: Rows | None, keep: Keep | None
) -> None:
    """Add value ⊗ key over the slots that take part."""
    is_vector = store.is_vector(parameter)
    dtype = compute_dtype(store, parameter)
    columns = None if rows is None else rows.columns
    near = Sum(total.shape, torch.float64 if is_vector else dtype, columns)
    for layer in store.users(parameter):
        uses = uses_of(layer, parameter)
        only_errors = all(use.role == "bias" for use in uses)
        # What slots write to an elementwise weight is a vector already: it is summed in float64
        own_dtype = torch.float64 if is_vector and not only_errors else dtype
        for keys, values in _slots_of_layer(store, layer, found, keep, own_dtype, only_errors):
            if near.added >= PRODUCTS:
                total += near.taken()
            for use in uses:
                near.add(layer, use, keys, values)
    total += near.taken()


def _slots_of_layer(
    store: Store, layer: Layer, found: Coefficients, keep: Keep | None, dtype: torch.dtype, only_errors: bool
) -> Iterator[tuple[Keys, Tensor]]:
    """Keys and values of a layer's slots that take part, some at a time."""
    read = _some if layer.form == "vectors" else _all
    for chunk in store.addresses(layer.name, begin_step=found.updates.begin, end_step=found.updates.end):
        kept = None if keep is None else keep(chunk)
        if kept is not None and not kept.any():
            continue
        scales = scaled(chunk, found, 0, chunk.slots, dtype)
        yield from read(chunk, kept, scales, only_errors)
        store.decoded(chunk.chunk.files[SLOTS].size)


Kept = np.ndarray[Any, np.dtype[np.bool_]] | None


def _some(chunk: SlotChunk, kept: Kept, scales: Tensor, only_errors: bool) -> Iterator[tuple[Keys, Tensor]]:
    """Keys and values of the slots that take part, a piece at a time: nothing else is read. only_errors: the sum of the values."""
    every = np.arange(chunk.slots) if kept is None else np.flatnonzero(kept)
    for places in chunk.some_pieces(every, chunk.layer.d_in + chunk.layer.d_out):
        scale = scales[torch.from_numpy(places)]
        errors = chunk.some_errors(places, scales.dtype)
        if only_errors:
            yield Vectors(errors[:0]), scale.T @ errors
        else:
            errors *= scale
            keys = Vectors(chunk.some_keys(places, scales.dtype))
            for low in range(0, len(errors), PRODUCT_SLOTS):
                part = slice(low, low + PRODUCT_SLOTS)
                yield keys.some(part), errors[part]


def _all(chunk: SlotChunk, kept: Kept, scales: Tensor, only_errors: bool) -> Iterator[tuple[Keys, Tensor]]:
    """Those of all slots, with the value 0 for those that take no part."""
    if kept is not None:
        scales = scales * torch.from_numpy(kept).unsqueeze(1)
    for low, high in chunk.pieces(chunk.layer.d_in + chunk.layer.d_out):
        if kept is None or kept[low:high].any():
            scale = scales[low:high]
            keys = weighted_parts(chunk.keys(scale.dtype, low, high), chunk.layer, scale[:, 0])
            yield keys, chunk.errors(scale.dtype, low, high) * scale


def as_matrix(layer: Layer, weights: Mapping[str, Tensor]) -> Tensor:
    """A layer's parameters as the one matrix that maps its key to its output, (outputs, d_in)."""
    some = next(iter(weights.values()))
    matrix = some.new_zeros(len(layer.outputs) or layer.d_out, layer.d_in)
    for use in layer.bilinear():
        found = weights[use.parameter].flatten(1)
        found = found[use.rows[0] : use.rows[1]] if use.rows else found
        found = found.T if use.role == "table" else found
        if use.groups > 1:
            found = torch.block_diag(*found.chunk(use.groups))  # type: ignore[no-untyped-call]
        columns = slice(*use.keys) if use.keys else slice(None)
        _add_rows(matrix[:, columns], found, use)
    return matrix


def _add_rows(total: Tensor, found: Tensor, use: Use) -> None:
    """Add what a use makes of its parameter to the outputs that it is of."""
    ranges = use.errors or (0, len(total))
    parts = [torch.arange(low, high) for low, high in zip(ranges[::2], ranges[1::2], strict=True)]
    total[torch.cat(parts)] += found


def as_bias(layer: Layer, weights: Mapping[str, Tensor]) -> Tensor | None:
    """A layer's biases as one vector, (outputs,)."""
    uses = [use for use in layer.uses if use.role == "bias"]
    if not uses:
        return None
    total = weights[uses[0].parameter].new_zeros(layer.d_out)
    for use in uses:
        found = weights[use.parameter]
        _add_rows(total, found[use.rows[0] : use.rows[1]] if use.rows else found, use)
    return total[list(layer.outputs)] if layer.outputs else total
