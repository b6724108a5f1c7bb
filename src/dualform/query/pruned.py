"""The best slots of many queries, without multiplying all keys with all queries: |key · query| ≤ ‖key‖ · ‖query‖.

Once a query has k slots, a key that is too short to beat the last of them need not be looked at. Attention goes to long keys, so
few remain. Nothing is approximate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from dualform.query.ranking import Best

BLOCK = 256
"""Queries that are multiplied together: those that need about equally long keys."""
SLACK = 1e-3
"""A product may be rounded up beyond its bound by this much at most, relatively: d_in roundings of float32."""


def best_of(
    queries: Tensor, tiles: Iterable[tuple[Tensor, Tensor]], k: int, ranked_by: Callable[[Tensor], Tensor]
) -> Best:
    """The k best of each of n queries (n, d). tiles: numbers (m,) and keys (m, d), ascending. ranked_by: what of a score decides."""
    lengths = torch.linalg.vector_norm(queries, dim=1)
    order = torch.arange(len(queries))
    blocks = [(places, Best(len(places), k, queries.dtype)) for places in _blocks(order)]
    for number, (numbers, keys) in enumerate(tiles):
        norms = torch.linalg.vector_norm(keys, dim=1)
        for places, best in blocks:
            here = torch.nonzero(~(norms < _shortest(best, lengths[places], k)))[:, 0]
            if len(here):
                scores = queries[places] @ keys[here].T
                best.add(ranked_by(scores), numbers[here], scores)
        if number == 0:  # now it shows how long keys must be for each query: those that are alike go together
            whole = Best.join([best for _, best in blocks], k, queries.dtype)
            order = _needed(whole, lengths, k).argsort()
            blocks = [(places, whole.take(places)) for places in _blocks(order)]
    return Best.join([best for _, best in blocks], k, queries.dtype).take(order.argsort())


def _blocks(order: Tensor) -> list[Tensor]:
    return [order[low : low + BLOCK] for low in range(0, len(order), BLOCK)]


def _needed(best: Best, lengths: Tensor, k: int) -> Tensor:
    """How long a key must be at least to come among the best of each query, (n,)."""
    if best.scores.shape[1] < k:
        return torch.zeros_like(lengths)
    last = best.scores[:, -1]
    return torch.where(last > 0, last / lengths.clamp(min=torch.finfo(lengths.dtype).tiny), 0) * (1 - SLACK)


def _shortest(best: Best, lengths: Tensor, k: int) -> Tensor:
    needed = _needed(best, lengths, k)
    return needed.min() if len(needed) else needed.sum()


def spread(best: Best, slots_of: Callable[[Tensor], tuple[Tensor, Tensor]], k: int) -> Best:
    """From the best keys of each query to its best slots, where several slots share a key.

    slots_of: keys (n,) → how many slots each has, and all these slots, one key's after the other's, ascending. The k best slots
    are always slots of the k best keys.
    """
    n, width = best.numbers.shape
    counts, slots = slots_of(best.numbers.reshape(-1))
    scores, values = (t.reshape(-1).repeat_interleave(counts) for t in (best.scores, best.values))
    query = torch.arange(n).repeat_interleave(width).repeat_interleave(counts)
    order = torch.from_numpy(np.lexsort((slots.numpy(), -scores.numpy(), query.numpy())))  # the last one decides first
    slots, scores, values, query = slots[order], scores[order], values[order], query[order]
    place = torch.arange(len(query)) - torch.searchsorted(query, query)
    here = place < k
    shape = (n, int(here.sum()) // max(n, 1))
    return best.replaced(scores[here].reshape(shape), values[here].reshape(shape), slots[here].reshape(shape))
