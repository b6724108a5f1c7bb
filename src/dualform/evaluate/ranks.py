"""Ranks, and what is computed from them: Spearman's correlation and the area under the ROC curve."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks(values: Tensor) -> Tensor:
    """The rank of each entry along the last axis, from 0, float64; equal entries share the mean of theirs."""
    values = values.contiguous()
    ordered = values.sort(-1).values
    below = torch.searchsorted(ordered, values)
    return (below + torch.searchsorted(ordered, values, right=True) - 1).double() / 2


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's correlation along the last axis; 0 where one of them is constant."""
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    size = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(size > 0, (a * b).sum(-1) / size.clamp(min=torch.finfo(size.dtype).tiny), 0.0)


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's correlation along the last axis."""
    return correlation(ranks(a), ranks(b))


def auc(scores: Tensor, positive: Tensor) -> float:
    """The chance that a positive one (n,) bool has a higher score than a negative one; equal scores count half."""
    hits = int(positive.sum())
    misses = len(positive) - hits
    if not hits or not misses:
        return float("nan")
    return float((ranks(scores)[positive].sum() - hits * (hits - 1) / 2) / (hits * misses))
