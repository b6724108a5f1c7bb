"""The best of very many scores of one query, in each group: one pass in C, without a copy of any group's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualform.native.kernels import is_plain, kernels

HELD = 1 << 16
"""So many places at most are wanted of all groups together: they stay in the cache."""
LAST = 2**32 - 1


def highest(scores: Tensor, codes: Tensor | None, groups: int, k: int) -> list[Tensor] | None:
    """The places of the k highest scores in each group, best first, ties to the lower place; None: find them in another way.

    scores: (1, n); codes: (n,) numbers of groups, None if there is one.
    """
    loops, n = kernels(), scores.shape[1]
    if loops is None or not _fit(scores, codes) or not 0 < k * groups <= HELD or n > LAST:
        return None
    held, counts, least = np.zeros((groups, 2 * k), np.uint64), np.empty(groups, np.int64), np.empty(groups, np.float32)
    rooms = (held.ctypes.data, counts.ctypes.data, least.ctypes.data)
    loops.highest(n, groups, k, scores.data_ptr(), None if codes is None else codes.data_ptr(), *rooms)
    places = LAST - (np.sort(held[:, :k], axis=1)[:, ::-1] & LAST).astype(np.int64)
    return [torch.from_numpy(some[:count]) for some, count in zip(places, counts.tolist(), strict=True)]


def reaching(bound: Tensor, codes: Tensor | None, least: Tensor) -> Tensor | None:
    """Whether bounds (1, n) are not below what their groups need, (1, groups): (n,); None: find out in another way."""
    loops, out = kernels(), torch.empty(bound.shape[1], dtype=torch.bool)
    if loops is None or not _fit(bound, codes) or not _fit(least, None):
        return None
    places = (bound.data_ptr(), None if codes is None else codes.data_ptr(), least.data_ptr(), out.data_ptr())
    loops.reaching(len(out), *places)
    return out


def _fit(scores: Tensor, codes: Tensor | None) -> bool:
    return len(scores) == 1 and is_plain(scores) and (codes is None or is_plain(codes, torch.int64))
