"""The whitened path: a query's gradient, multiplied by the inverse of the curvature, meets slots as in attention.

−[x_qᵀ (A + αI)⁻¹ x_i] · [g_qᵀ (S + βI)⁻¹ e_i], with α and β a part ρ of the mean eigenvalue. Only queries are whitened.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.influence.curvature import Factors
from dualform.influence.pairings import Pairing
from dualform.influence.products import OneHotProducts, Products

DAMPING = 0.3
"""ρ: what is added to the curvature, relative to its mean eigenvalue."""


def plain(pairing: Pairing, queries: Tensor, slopes: Tensor) -> Products | OneHotProducts:
    """Inner products of gradients as they are. queries (examples, positions, groups, width), slopes (…, outputs)."""
    if pairing.numbers:
        return OneHotProducts(queries, slopes)
    return Products(with_constant(pairing, queries), slopes, pairing.constant)


def whitened(
    pairing: Pairing, queries: Tensor, slopes: Tensor, factors: Factors, damping: float
) -> Products | OneHotProducts:
    """The same, with the inverse curvature between them; minus: what supports is positive."""
    dtype = slopes.dtype
    slopes = _solved(factors.errors, slopes.double(), damping) / -max(factors.positions, 1e-30)
    if pairing.numbers:
        inverse = 1 / (factors.keys + _added(factors.keys.mean(), damping))
        weights = torch.where(queries >= 0, inverse[queries.clamp(min=0)], 0)
        return OneHotProducts(queries, (slopes * weights[..., None, None]).to(dtype))
    extended = with_constant(pairing, queries).double()[..., : factors.keys.shape[1]]
    found = _solved(factors.keys, extended, damping)
    if not pairing.constant:
        found = torch.cat([found, found.new_zeros(*found.shape[:-1], 1)], -1)
    return Products(found.to(dtype), slopes.to(dtype), pairing.constant)


def with_constant(pairing: Pairing, queries: Tensor) -> Tensor:
    """(…, width) → (…, width + 1)."""
    return torch.cat([queries, queries.new_full((*queries.shape[:-1], 1), pairing.constant)], -1)


def _added(mean: Tensor, damping: float) -> Tensor:
    """What is added to the curvature. Where there is none, all error signals are zero: any number will do."""
    return torch.where(mean > 0, damping * mean, 1)


def _solved(curvature: Tensor, vectors: Tensor, damping: float) -> Tensor:
    """(curvature + damping · its mean eigenvalue)⁻¹ vectors; curvature (groups, d, d), vectors (…, groups, d)."""
    groups, width, _ = curvature.shape
    added = _added(curvature.diagonal(dim1=1, dim2=2).mean(1), damping)
    damped = curvature + torch.diag_embed(added[:, None].expand(groups, width))
    flat = vectors.reshape(-1, groups, width).permute(1, 2, 0)
    found = torch.cholesky_solve(flat, torch.linalg.cholesky(damped))
    return found.permute(2, 0, 1).reshape(vectors.shape)
