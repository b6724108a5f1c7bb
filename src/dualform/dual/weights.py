"""Parameters put together again: initial part plus what the slots wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.dual.coefficients import Coefficients, coefficients
from dualform.store.format import Layer
from dualform.store.reader import SlotChunk, Store

Keep = Callable[[SlotChunk], np.ndarray[Any, np.dtype[np.bool_]]]
"""Which slots of a chunk take part, (slots,)."""

PIECE_BYTES = 32 << 20
"""How much of a chunk is decoded at a time."""


def compute_dtype(store: Store, parameter: str) -> torch.dtype:
    """float64 for float64 parameters, float32 for all others."""
    kind = store.manifest.parameters[store.parameter(parameter)].dtype
    return torch.float64 if kind == "float64" else torch.float32


def initial_part(store: Store, parameter: str, found: Coefficients) -> Tensor:
    """a·W_begin + Σ b·state_begin, float64; `begin` must have a snapshot."""
    snapshot = store.snapshot(found.begin)
    total = snapshot[f"model.{parameter}"].double() * found.replayed.a
    for name, b in found.replayed.b.items():
        if f"state.{parameter}.{name}" in snapshot:
            total += snapshot[f"state.{parameter}.{name}"].double() * b
    return total


def pieces(chunk: SlotChunk, width: int) -> Iterator[tuple[int, int]]:
    """Cut a chunk into stretches of slots that decode to at most PIECE_BYTES."""
    size = max(1, PIECE_BYTES // (8 * max(width, 1)))
    for low in range(0, chunk.slots, size):
        yield low, min(low + size, chunk.slots)


def values(chunk: SlotChunk, found: Coefficients, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """−coefficient × error signal, (slots, d_out): the e_t of the paper's equation 11."""
    scale = torch.from_numpy(-chunk.per_slot(found.of_blocks(chunk))[low:high]).to(dtype)
    return chunk.errors(dtype, low, high) * scale.unsqueeze(1)


def rebuilt_weight(store: Store, layer: Layer, *, begin: int, end: int, keep: Keep | None = None) -> Tensor:
    """Initial part + Σ value ⊗ key over the slots that take part, float64 (d_out, d_in)."""
    found = coefficients(store, layer.weight, begin=begin, end=end)
    dtype = compute_dtype(store, layer.weight)
    total = initial_part(store, layer.weight, found)
    for chunk in store.chunks(layer.name, begin_step=begin, end_step=end):
        kept = None if keep is None else keep(chunk)
        if kept is not None and not kept.any():
            continue
        for low, high in pieces(chunk, layer.d_in + layer.d_out):
            written = values(chunk, found, low, high, dtype)
            if kept is not None:
                written *= torch.from_numpy(kept[low:high]).unsqueeze(1)
            total += (written.T @ chunk.keys(dtype, low, high)).double()
    return total


def rebuilt_bias(store: Store, layer: Layer, *, begin: int, end: int, keep: Keep | None = None) -> Tensor:
    """The bias from its recorded gradients, less what the slots left out wrote, float64 (d_out,).

    Its gradients are kept as they were, so that even a bias that moves on rounding noise alone is exact.
    """
    assert layer.bias is not None
    found = coefficients(store, layer.bias, begin=begin, end=end)
    dtype = compute_dtype(store, layer.bias)
    total = initial_part(store, layer.bias, found)
    gradients = store.gradients(layer.bias)
    if gradients is not None:
        every = coefficients(store, layer.bias)
        here = torch.from_numpy((every.steps >= begin) & (every.steps < end))
        total -= torch.from_numpy(found.replayed.c) @ gradients[here].double()
    if keep is None:
        return total
    for chunk in store.chunks(layer.name, begin_step=begin, end_step=end):
        kept = keep(chunk)
        if kept.all():
            continue
        for low, high in pieces(chunk, layer.d_out):
            left = torch.from_numpy(~kept[low:high]).to(dtype)
            total -= (left @ values(chunk, found, low, high, dtype)).double()
    return total


def rebuilt(store: Store, layer: Layer, *, begin: int, end: int, keep: Keep | None = None) -> dict[str, Tensor]:
    """All parameters of a layer by their full name, float64."""
    found = {layer.weight: rebuilt_weight(store, layer, begin=begin, end=end, keep=keep)}
    if layer.bias is not None:
        found[layer.bias] = rebuilt_bias(store, layer, begin=begin, end=end, keep=keep)
    return found
