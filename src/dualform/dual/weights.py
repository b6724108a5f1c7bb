"""Rebuild parameters: the initial part plus what the slots wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Bools
from dualform.dual.coefficients import Coefficients, Updates, is_elementwise, updates_of, walked
from dualform.dual.gradients import Keep, Sum, compute_dtype, weighted_parts
from dualform.dual.replay import Backward, Moment, forward
from dualform.dual.rows import Rows, kept_rows
from dualform.layers.keys import KeysOrGradients, Vectors
from dualform.layers.layer import Layer, Use, spans
from dualform.layers.written import used_rows
from dualform.recursions import KINDS
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk
from dualform.store.unkept import require_gradients

PRODUCTS = 8
"""This many products are added in their own type before their sum is added in float64."""

PRODUCT_SLOTS = 512
"""Slots in one product: about as many as in a step of training, so that our products round no more than those of the training."""

Reached = dict[str, tuple[int, Moment]]
"""By parameter: the step up to which it has been replayed, and its state there."""


def initial_part(store: Store, parameter: str, coefficients: Coefficients, rows: Rows | None = None) -> Tensor:
    """Return a·W_begin + b·average_begin, float64; `begin` must have a snapshot."""
    updates = coefficients.updates
    snapshot = store.snapshot(updates.begin)
    total = snapshot[f"model.{parameter}"].double() * coefficients.walked.a
    average = KINDS[updates.kind].average
    state = f"state.{parameter}.{average}"
    if average and state in snapshot:
        total += snapshot[state].double() * coefficients.walked.b
    return total if rows is None else rows.of(total)


def initial(store: Store, parameter: str, end: int, rows: Rows | None = None) -> Tensor:
    """Return the initial part of a parameter at `end`, float64."""
    updates = updates_of(store, parameter, end=end)
    if not is_elementwise(updates):
        return initial_part(store, parameter, walked(updates), rows)
    result = _initial_of_walk(Backward(store, updates, rows))
    if not result.isfinite().all():
        result = _initial_of_walk(Backward(store, updates, rows, wide=True))
    return result


def _initial_of_walk(walk: Backward) -> Tensor:
    for _ in walk:
        pass
    return walk.initial


def scaled(
    chunk: SlotChunk,
    coefficients: Coefficients,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return −coefficient of each slot, (slots, 1)."""
    by_slot = -chunk.per_slot(coefficients.of_blocks(chunk))
    return torch.from_numpy(by_slot[low:high]).to(dtype).unsqueeze(1)


def values(
    chunk: SlotChunk,
    coefficients: Coefficients,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return −coefficient × error signal, (slots, d_out): the e_t of the paper's equation 11."""
    return chunk.errors(dtype, low, high) * scaled(chunk, coefficients, low, high, dtype)


def rebuilt(
    store: Store,
    parameter: str,
    *,
    begin: int,
    end: int,
    keep: Keep | None = None,
    reached: Reached | None = None,
) -> Tensor:
    """Return the initial part plus what the selected slots wrote, float64; of a layer with outputs=, only those rows.

    reached: where earlier replays without a mask ended. This one continues from there, and notes where it ends.
    """
    updates = updates_of(store, parameter, begin=begin, end=end)
    if is_elementwise(updates):
        if reached is None or keep is not None:
            _, moment = forward(store, updates, keep, only_masked=True)
            return moment.weight.double()
        return _replayed_on(store, updates, reached)
    coefficients = walked(updates)
    require_gradients(store, "this question", parameter)
    if store.is_vector(parameter):
        return _rebuilt_vector(store, parameter, coefficients, keep)
    rows = kept_rows(store, parameter)
    total = initial_part(store, parameter, coefficients, rows)
    add_slots(store, parameter, coefficients, total, rows, keep)
    return total


def _replayed_on(store: Store, updates: Updates, reached: Reached) -> Tensor:
    """Replay an optimizer from where an earlier replay ended, if that lies within these updates; else from their beginning."""
    step, moment = reached.get(updates.parameter, (-1, None))
    if updates.begin <= step <= updates.end:
        updates = updates.between(step, updates.end)
    else:
        moment = None
    moment, _ = forward(store, updates, first=moment)
    reached[updates.parameter] = (updates.end, moment)
    return moment.weight.to(torch.float64, copy=True)


def _rebuilt_vector(store: Store, parameter: str, coefficients: Coefficients, keep: Keep | None) -> Tensor:
    """Return a vector from its recorded gradients, less what the slots that are left out wrote.

    The recorded gradients are exact, so that even a bias that moves on rounding noise alone is exact.
    """
    updates = coefficients.updates
    total = initial_part(store, parameter, coefficients)
    gradients = store.gradients(parameter)
    if gradients is not None:
        steps = updates_of(store, parameter).steps
        in_stretch = torch.from_numpy((steps >= updates.begin) & (steps < updates.end))
        by_step = torch.from_numpy(coefficients.walked.c)
        total -= torch.tensordot(by_step, gradients[in_stretch].double(), 1)
    if keep is not None:
        left_out = torch.zeros_like(total)
        add_slots(store, parameter, coefficients, left_out, None, lambda chunk: ~keep(chunk))
        total -= left_out
    return total


def add_slots(
    store: Store,
    parameter: str,
    coefficients: Coefficients,
    total: Tensor,
    rows: Rows | None,
    keep: Keep | None,
) -> None:
    """Add Σ value ⊗ key over the selected slots to `total`."""
    is_vector = store.is_vector(parameter)
    dtype = compute_dtype(store, parameter)
    columns = None if rows is None else rows.columns
    require_gradients(store, "this question", parameter)
    partial_sum = Sum(total.shape, torch.float64 if is_vector else dtype, columns)
    for layer in store.users(parameter):
        uses = layer.uses_of(parameter)
        only_errors = all(use.role == "bias" for use in uses)
        # What slots write to an elementwise weight is a vector, which is summed in float64
        own_dtype = torch.float64 if is_vector and not only_errors else dtype
        for keys, errors in _slots_of_layer(store, layer, coefficients, keep, own_dtype, only_errors):
            if partial_sum.added >= PRODUCTS:
                total += partial_sum.taken()
            for use in uses:
                partial_sum.add(layer, use, keys, errors)
    total += partial_sum.taken()


def _slots_of_layer(
    store: Store,
    layer: Layer,
    coefficients: Coefficients,
    keep: Keep | None,
    dtype: torch.dtype,
    only_errors: bool,
) -> Iterator[tuple[KeysOrGradients, Tensor]]:
    """Yield keys and values of a layer's selected slots, a piece at a time."""
    updates = coefficients.updates
    decodes_keys = not only_errors and layer.form != "numbers"
    width = layer.d_out + (layer.d_in if decodes_keys else 0)
    for chunk in store.addresses(layer.name, begin_step=updates.begin, end_step=updates.end):
        kept = None if keep is None else keep(chunk)
        if kept is not None and not kept.any():
            continue
        scales = scaled(chunk, coefficients, 0, chunk.slots, dtype)
        read = _read_some if layer.form == "vectors" and chunk.sums is None else _read_all
        yield from read(chunk, kept, scales, only_errors)
        # A chunk's file holds all layers: by its size, memory would be given back several times as often as it fills up
        store.decoded(chunk.slots * width * dtype.itemsize)


def _read_some(
    chunk: SlotChunk, kept: Bools | None, scales: Tensor, only_errors: bool
) -> Iterator[tuple[KeysOrGradients, Tensor]]:
    """Yield keys and values of the selected slots, and read no others. only_errors: yield the sum of the values, without keys."""
    wanted = np.arange(chunk.slots) if kept is None else np.flatnonzero(kept)
    for places in chunk.some_pieces(wanted, chunk.layer.d_in + chunk.layer.d_out):
        scale = scales[torch.from_numpy(places)]
        errors = chunk.some_errors(places, scales.dtype)
        if only_errors:
            yield Vectors(errors[:0]), scale.T @ errors
            continue
        errors *= scale
        keys = Vectors(chunk.some_keys(places, scales.dtype))
        for low in range(0, len(errors), PRODUCT_SLOTS):
            here = slice(low, low + PRODUCT_SLOTS)
            yield keys.select(here), errors[here]


def _read_all(
    chunk: SlotChunk, kept: Bools | None, scales: Tensor, only_errors: bool
) -> Iterator[tuple[KeysOrGradients, Tensor]]:
    """Yield keys and values of all slots; those that are not selected have the value 0."""
    if kept is not None:
        scales = scales * torch.from_numpy(kept).unsqueeze(1)
    for low, high in chunk.pieces(chunk.layer.d_in + chunk.layer.d_out):
        if kept is None or kept[low:high].any():
            scale = scales[low:high]
            keys, errors = chunk.pairs(scale.dtype, low, high)
            yield weighted_parts(keys, chunk.layer, scale[:, 0]), errors * scale


def as_matrix(layer: Layer, weights: Mapping[str, Tensor]) -> Tensor:
    """Return a layer's parameters as the one matrix that maps its key to its output, (outputs, d_in)."""
    first = next(iter(weights.values()))
    matrix = first.new_zeros(layer.kept_outputs, layer.d_in)
    for use in layer.bilinear():
        weight = used_rows(use, weights[use.parameter].flatten(1))
        if use.role == "table":
            weight = weight.T
        if use.groups > 1:
            weight = torch.block_diag(*weight.chunk(use.groups))  # type: ignore[no-untyped-call]
        columns = slice(*use.keys) if use.keys else slice(None)
        _add_rows(matrix[:, columns], weight, use)
    return matrix


def as_bias(layer: Layer, weights: Mapping[str, Tensor]) -> Tensor | None:
    """Return the sum of a layer's biases, (outputs,); None if it has none."""
    uses = layer.biases()
    if not uses:
        return None
    bias = weights[uses[0].parameter].new_zeros(layer.d_out)
    for use in uses:
        _add_rows(bias, used_rows(use, weights[use.parameter]), use)
    return bias[list(layer.outputs)] if layer.outputs else bias


def _add_rows(total: Tensor, rows: Tensor, use: Use) -> None:
    """Add the rows of a parameter to the outputs that its use belongs to."""
    outputs = use.errors or (0, len(total))
    places = [torch.arange(begin, end) for begin, end in spans(outputs)]
    total[torch.cat(places)] += rows
