"""The whitened path: a query's gradient, multiplied by the inverse of the curvature, meets slots as in attention.

−[x_qᵀ (A + αI)⁻¹ x_i] · [g_qᵀ (S + βI)⁻¹ e_i], with α and β a part ρ (the damping) of the mean eigenvalue. Only queries are whitened.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.influence.curvature import DAMPING, Factors, damped
from dualform.influence.pairings import Pairing
from dualform.influence.products import OneHotProducts, Products


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
        inverse = 1 / (factors.keys + damping * factors.keys.mean())
        weights = torch.where(queries >= 0, inverse[queries.clamp(min=0)], 0)
        return OneHotProducts(queries, (slopes * weights[..., None, None]).to(dtype))
    extended = with_constant(pairing, queries).double()[..., : factors.keys.shape[1]]
    found = _solved(factors.keys, extended, damping)
    if not pairing.constant:
        found = torch.cat([found, found.new_zeros(*found.shape[:-1], 1)], -1)
    # At another damping than the usual one, norms are longer by this much at most
    longer = max(1.0, DAMPING / damping) ** 0.5
    lengths = (extended * found[..., : extended.shape[-1]]).sum(-1).clamp(min=0).sqrt() * longer
    return Products(found.to(dtype), slopes.to(dtype), pairing.constant, lengths.flatten(1).sum(1).to(dtype))


def with_constant(pairing: Pairing, queries: Tensor) -> Tensor:
    """(…, width) → (…, width + 1)."""
    return torch.cat([queries, queries.new_full((*queries.shape[:-1], 1), pairing.constant)], -1)


def _solved(curvature: Tensor, vectors: Tensor, damping: float) -> Tensor:
    """(curvature + damping · its mean eigenvalue)⁻¹ vectors; curvature (groups, d, d), vectors (…, groups, d)."""
    groups, width, _ = curvature.shape
    flat = vectors.reshape(-1, groups, width).permute(1, 2, 0)
    found = torch.cholesky_solve(flat, torch.linalg.cholesky(damped(curvature, damping)))
    return found.permute(2, 0, 1).reshape(vectors.shape)
