"""Curvature: for each linear map and segment, the mean key ⊗ key and the mean error ⊗ error.

Their Kronecker product approximates the mean of gradient ⊗ gradient over samples, as in K-FAC. If a row has several positions, it is
multiplied by their number, as if positions were independent. Error signals are multiplied by the divisor of the loss's mean
(loss_mean.py); slots that wrote nothing (padding, ignored labels) do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.curvature.maps import LinearMap
from dualform.layers.keys import Keys


@dataclass(frozen=True)
class Factors:
    """The Kronecker factors of one linear map in one segment, float64."""

    keys: Tensor
    """(groups, width + 1, width + 1), the constant last, (groups, width, width) if there is none; of one-hot keys: (width,)."""
    errors: Tensor
    """(groups, outputs, outputs)"""
    positions: float
    """Slots per row."""


DAMPING = 0.3
"""What is added to the curvature by default, relative to its mean eigenvalue."""


def damped(curvature: Tensor, damping: float) -> Tensor:
    """Return curvature (groups, d, d) + damping · its mean eigenvalue. If that is 0, all vectors are zero, and any number will do."""
    groups, width, _ = curvature.shape
    mean = curvature.diagonal(dim1=1, dim2=2).mean(1)
    added = torch.where(mean > 0, damping * mean, 1)
    return curvature + torch.diag_embed(added[:, None].expand(groups, width))


@dataclass(frozen=True)
class Curvature:
    """The curvature of one layer in one segment."""

    maps: list[Factors]
    norms: Tensor | None
    """(rows,) float32, if each row has one slot and its key is a vector: √(keyᵀ (A + αI)⁻¹ key) at the default damping. A search skips
    rows whose norm is too small to matter."""


def size(linear_map: LinearMap) -> int:
    """Return how many numbers the curvature of a map has."""
    width = linear_map.width + bool(linear_map.constant)
    of_keys = linear_map.width if linear_map.is_one_hot else linear_map.groups * width**2
    return of_keys + linear_map.groups * linear_map.outputs**2


class Sums:
    """The sums that Factors are the means of, slot by slot."""

    def __init__(self, linear_map: LinearMap):
        self._linear_map = linear_map
        width = linear_map.width + bool(linear_map.constant)
        shape = (linear_map.width,) if linear_map.is_one_hot else (linear_map.groups, width, width)
        self.keys = torch.zeros(shape, dtype=torch.float64)
        self.errors = torch.zeros(linear_map.groups, linear_map.outputs, linear_map.outputs, dtype=torch.float64)
        self.slots = 0

    def add(self, keys: Keys, errors: Tensor, divisor: Tensor, written: Tensor | None = None) -> None:
        """Add slots. errors (slots, d_out), as recorded; divisor (slots,): what the loss's mean divided them by.

        written (slots,): which slots wrote something; the others do not count. None: all did.
        """
        linear_map = self._linear_map
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
        """Add sums over slots whose error signals are as recorded. divisor: what the loss's mean divided them by."""
        self.keys += keys
        self.errors += errors * divisor**2
        self.slots += slots

    def factors(self, positions: float) -> Factors:
        """Return the means. positions: slots per row."""
        count = max(1, self.slots)
        return Factors(self.keys / count, self.errors / count, positions)


def _squares(vectors: Tensor) -> Tensor:
    """Return Σ vector ⊗ vector in each group: (n, groups, d) → (groups, d, d)."""
    if vectors.shape[1] == 1 and vectors.is_cpu and vectors.dtype in (torch.float32, torch.float64):
        # NumPy computes one half of a symmetric product, PyTorch both
        own = vectors[:, 0].detach().numpy()
        return torch.from_numpy(own.T @ own).double().unsqueeze(0)
    apart = vectors.transpose(0, 1)
    return (apart.transpose(1, 2) @ apart).double()
