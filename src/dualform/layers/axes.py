"""Which entries of a layer's input belong to which row.

A slot that carries the wrong sample's name would leave every sum right, so nothing here guesses: where two readings
are possible, an AxisError asks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from dualform.errors import AxisError


@dataclass(frozen=True)
class Layout:
    """How a tensor (*lead, features) is read as (rows, positions, features)."""

    split: tuple[int, ...]
    """The leading shape, with a flattened axis taken apart."""
    axis: int
    """The axis of `split` that holds the rows."""

    @cached_property
    def rows(self) -> int:
        """How many rows."""
        return self.split[self.axis] if self.split else 1

    @cached_property
    def positions(self) -> int:
        """How many slots a row has: the product of the other axes."""
        return math.prod(n for axis, n in enumerate(self.split) if axis != self.axis)

    def slots(self, tensor: Tensor) -> Tensor:
        """(*lead, features) → (rows × positions, features), row-major; a view where possible."""
        if tensor.dim() == 2 and len(self.split) == 1:
            return tensor
        features = tensor.shape[-1]
        if not self.split:
            return tensor.reshape(1, features)
        apart = tensor.reshape(*self.split, features)
        return apart.movedim(self.axis, 0).reshape(-1, features)


@lru_cache(maxsize=1024)  # the same at every step
def layout(
    lead: tuple[int, ...],
    rows: int,
    *,
    layer: str,
    axis: int | None = None,
    evidence: tuple[int | None, ...] = (),
) -> Layout:
    """Find the rows among the leading axes of a layer's input.

    lead: the input's shape without its features. axis: what the user said, if anything; for a flattened input 0 means
    that the rows are the slow part (rows × positions), 1 that they are the fast one (positions × rows).
    evidence: for a flattened input, the axis of the rows in the tensor that was flattened (None: it cannot be seen).
    """
    if axis is not None:
        return _as_told(lead, rows, layer, axis)
    if not lead:
        if rows == 1:
            return Layout((), 0)
        raise AxisError(
            f"layer {layer!r} got a single vector, but batch() announced {rows} rows. Call recorder.batch() for the "
            f"sample that runs through it, or leave the layer out with layers=."
        )
    fits = [i for i, n in enumerate(lead) if n == rows]
    if len(fits) == 1 or (fits and rows == 1):
        return Layout(lead, fits[0])
    if not fits and len(lead) == 1 and rows and lead[0] % rows == 0 and lead[0]:
        positions = lead[0] // rows
        axes = {a for a in evidence if a is not None}
        if rows == 1 or axes == {0}:
            return Layout((rows, positions), 0)
        raise AxisError(
            f"layer {layer!r} got {lead[0]} vectors, but batch() announced {rows} rows. If there are {lead[0]} samples, give "
            f"batch() one entry for each. If each row has {positions} positions, say how they were flattened: "
            f"batch_axis={{{layer!r}: 0}} if each row's positions stand together (x.reshape(rows * positions, …)), "
            f"batch_axis={{{layer!r}: 1}} if the rows alternate (sequence first)."
        )
    shape = f"({', '.join(map(str, lead))}, features)"
    if fits:
        raise AxisError(
            f"layer {layer!r} got an input of shape {shape}, and batch() announced {rows} rows: axes "
            f"{' and '.join(map(str, fits))} both fit. Say which one it is: batch_axis={{{layer!r}: {fits[0]}}}."
        )
    raise AxisError(
        f"layer {layer!r} got an input of shape {shape}, but batch() announced {rows} rows, and no axis has that "
        f"length. Give batch() one entry per sample of this forward pass, or name the axis: "
        f"batch_axis={{{layer!r}: 0}} (its length must be a multiple of the rows)."
    )


def module_layout(lead: tuple[int, ...], rows: int, *, layer: str, axis: int, told: int | None) -> Layout:
    """For modules that say themselves which axis the batch is (recurrent layers, attention).

    told: where the batch is a multiple of the rows, 0 if each row's entries stand together, 1 if the rows alternate.
    """
    if lead[axis] == rows:
        return Layout(lead, axis)
    if rows and lead[axis] % rows == 0 and told in (0, 1):
        times = lead[axis] // rows
        apart, place = ((rows, times), axis) if told == 0 else ((times, rows), axis + 1)
        return Layout((*lead[:axis], *apart, *lead[axis + 1 :]), place)
    raise AxisError(
        f"layer {layer!r} got a batch of {lead[axis]}, but batch() announced {rows} rows. Give batch() one entry per sample of "
        f"this forward pass; or, if each row comes several times, say batch_axis={{{layer!r}: 0}} if its entries stand "
        f"together, batch_axis={{{layer!r}: 1}} if the rows alternate."
    )


def _as_told(lead: tuple[int, ...], rows: int, layer: str, axis: int) -> Layout:
    if len(lead) == 1 and lead[0] != rows and axis in (0, 1) and rows and lead[0] % rows == 0:
        positions = lead[0] // rows
        return Layout((rows, positions), 0) if axis == 0 else Layout((positions, rows), 1)
    place = axis + len(lead) + 1 if axis < 0 else axis  # counted as the user sees it, with the features at the end
    if not 0 <= place < len(lead):
        raise AxisError(
            f"batch_axis={{{layer!r}: {axis}}} names no leading axis of an input of shape "
            f"({', '.join(map(str, lead))}, features)."
        )
    length = lead[place]
    if length == rows:
        return Layout(lead, place)
    if rows and length % rows == 0:
        return Layout((*lead[:place], rows, length // rows, *lead[place + 1 :]), place)
    raise AxisError(
        f"batch_axis={{{layer!r}: {axis}}} names an axis of length {length}, which is no multiple of the {rows} rows "
        f"that batch() announced."
    )


def flattened_from(tensor: Tensor, rows: int) -> int | None:
    """The axis of the rows in the tensor that was flattened into this one, if that can be seen."""
    shape = _shape_before(tensor)
    if shape is None or len(shape) <= tensor.dim():
        return None
    fits = [i for i, n in enumerate(shape[:-1]) if n == rows]
    if len(fits) != 1 or (fits != [0] and shape[-1] != tensor.shape[-1]):
        return None  # rows that come first stay together, however the rest is cut into vectors (heads)
    return fits[0]


def _shape_before(tensor: Tensor) -> tuple[int, ...] | None:
    """The shape that a view or a reshape started from: as autograd wrote it down, or that of the view's base."""
    saved = getattr(tensor.grad_fn, "_saved_self_sym_sizes", None)
    if saved is not None and "View" in type(tensor.grad_fn).__name__:
        return tuple(int(n) for n in saved)
    base = tensor._base
    if base is None or not base.is_contiguous() or not tensor.is_contiguous():
        return None
    if base.data_ptr() != tensor.data_ptr() or base.numel() != tensor.numel():
        return None
    return tuple(base.shape)


def tensors_in(value: object) -> list[Tensor]:
    """The tensors among a forward's arguments: in tuples, lists and dictionaries too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_in(v)]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors_in(v)]
    return []
