"""The highest scores of one query in each group: one pass in C, without copying any group's scores."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualform.native.kernels import is_plain, kernels

MOST_HELD = 1 << 16
"""At most this many places are kept, of all groups together, so that they stay in the processor's cache."""
LAST = 2**32 - 1
"""The loop packs a score and LAST − place into one number of 64 bits, so that sorting these numbers sorts by score, then by place."""


def highest(scores: Tensor, codes: Tensor | None, groups: int, k: int) -> list[Tensor] | None:
    """Return the places of the k highest scores of each group, best first, (1, up to k) each; None if the loop cannot do it.

    scores: (1, n) float32. codes: (n,) int32, the group of each score; None: all are one group. Ties go to the lower place.
    """
    loops = kernels()
    count = scores.shape[1]
    fits = 0 < k * groups <= MOST_HELD and count <= LAST
    if loops is None or not fits or not _is_supported(scores, codes):
        return None
    threads = torch.get_num_threads()
    best = np.empty((threads, groups, 2 * k), np.uint64)
    counts = np.empty((threads, groups), np.int64)
    lowest_held = np.empty((threads, groups), np.float32)
    loops.highest(
        count,
        groups,
        k,
        scores.data_ptr(),
        None if codes is None else codes.data_ptr(),
        best.ctypes.data,
        counts.ctypes.data,
        lowest_held.ctypes.data,
        threads,
    )
    # All groups are sorted together; in one with fewer than k scores, zeros follow them, since no packed score is 0
    packed = best[0, :, :k]
    packed[np.arange(k) >= counts[0, :, np.newaxis]] = 0
    best_first = np.sort(packed)[:, ::-1]
    places = torch.from_numpy(LAST - (best_first & LAST).astype(np.int64))
    return [places[group : group + 1, :filled] for group, filled in enumerate(counts[0].tolist())]


def _is_supported(scores: Tensor, codes: Tensor | None) -> bool:
    if len(scores) != 1 or not is_plain(scores):
        return False
    return codes is None or is_plain(codes, torch.int32)
