"""BM25 (Robertson and Zaragoza 2009): passages by the words that they share with a query, rare words first."""

from __future__ import annotations

import torch
from torch import Tensor

K1, B = 1.5, 0.75


def bm25(queries: Tensor, passages: Tensor) -> Tensor:
    """Scores (queries, passages) from word numbers (queries, length) and (passages, length); a repeated query word counts again."""
    words = int(max(queries.max(), passages.max())) + 1
    counts, asked = _counts(passages, words), _counts(queries, words)
    having = (counts > 0).sum(0)
    rarity = torch.log1p((len(passages) - having + 0.5) / (having + 0.5))
    length = counts.sum(1, keepdim=True)
    weight = counts * (K1 + 1) / (counts + K1 * (1 - B + B * length / length.mean()))
    return asked @ (weight * rarity).T


def _counts(passages: Tensor, words: int) -> Tensor:
    """(passages, words): how often each word occurs."""
    counts = torch.zeros(len(passages), words, dtype=torch.float64)
    return counts.scatter_add_(1, passages, torch.ones_like(passages, dtype=torch.float64))
