"""Curvature: for each linear map and segment, the mean key ⊗ key and the mean error ⊗ error.

Their Kronecker product stands for the mean of gradient ⊗ gradient over samples, as in K-FAC; where a row has several positions, times
their number, as if positions were independent of each other. Error signals count with the loss's mean undone; slots that wrote nothing
(padding, ignored labels) do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.curvature.maps import LinearMap
from dualform.layers.keys import Keys


@dataclass(frozen=True)
class Factors:
    """Of one linear map in one segment, float64."""

    keys: Tensor
    """(groups, width + 1, width + 1), the constant last, (groups, width, width) if there is none; of one-hot keys: (width,)."""
    errors: Tensor
    """(groups, outputs, outputs)"""
    positions: float
    """Slots for each row."""


DAMPING = 0.3
"""What is added to the curvature, relative to its mean eigenvalue, unless told otherwise."""


def damped(curvature: Tensor, damping: float) -> Tensor:
    """curvature (groups, d, d) + damping · its mean eigenvalue. Where there is none, all vectors are zero: any number will do."""
    groups, width, _ = curvature.shape
    mean = curvature.diagonal(dim1=1, dim2=2).mean(1)
    added = torch.where(mean > 0, damping * mean, 1)
    return curvature + torch.diag_embed(added[:, None].expand(groups, width))


@dataclass(frozen=True)
class Curvature:
    """Of one layer in one segment."""

    maps: list[Factors]
    norms: Tensor | None
    """(rows,) float32, if each row has one slot and its key is a vector: √(keyᵀ (A + αI)⁻¹ key) at the usual damping. With them, keys
    that cannot matter are passed over."""


def size(linear_map: LinearMap) -> int:
    """How many numbers the curvature of a map has."""
    width = linear_map.width + bool(linear_map.constant)
    of_keys = linear_map.width if linear_map.is_one_hot else linear_map.groups * width**2
    return of_keys + linear_map.groups * linear_map.outputs**2


class Sums:
    """The same, while slots are added."""

    def __init__(self, linear_map: LinearMap):
        self._pairing = linear_map
        width = linear_map.width + bool(linear_map.constant)
        shape = (linear_map.width,) if linear_map.is_one_hot else (linear_map.groups, width, width)
        self.keys = torch.zeros(shape, dtype=torch.float64)
        self.errors = torch.zeros(linear_map.groups, linear_map.outputs, linear_map.outputs, dtype=torch.float64)
        self.slots = 0

    def add(self, keys: Keys, errors: Tensor, divisor: Tensor, written: Tensor | None = None) -> None:
        """errors (slots, d_out) as they are; divisor (slots,): by what the loss's mean has divided them.

        written (slots,): which slots wrote something; the others do not count. None: all.
        """
        linear_map = self._pairing
        own_keys = linear_map.key_side(keys)
        own_errors = linear_map.error_side(keys, errors) * divisor[:, None, None]
        if written is not None:
            own_keys = own_keys[written]
            own_errors = own_errors[written]
        self.slots += len(own_errors)
        self.errors += _squares(own_errors)
        if linear_map.is_one_hot:
            self.keys += torch.bincount(own_keys[own_keys >= 0], minlength=linear_map.width)
            return
        width = linear_map.width
        self.keys[:, :width, :width] += _squares(own_keys)
        if linear_map.constant:
            sums = linear_map.constant * own_keys.sum(0).double()
            self.keys[:, :width, width] += sums
            self.keys[:, width, :width] += sums
            self.keys[:, width, width] += linear_map.constant**2 * len(own_errors)

    def add_counted(self, keys: Tensor, errors: Tensor, slots: int, divisor: float) -> None:
        """Add what other sums hold of error signals as they are. divisor: by what the loss's mean has divided them."""
        self.keys += keys
        self.errors += errors * divisor**2
        self.slots += slots

    def factors(self, positions: float) -> Factors:
        """The means. positions: slots for each row."""
        count = max(1, self.slots)
        return Factors(self.keys / count, self.errors / count, positions)


def _squares(vectors: Tensor) -> Tensor:
    """(n, groups, d) → (groups, d, d)."""
    apart = vectors.transpose(0, 1)
    return (apart.transpose(1, 2) @ apart).double()
