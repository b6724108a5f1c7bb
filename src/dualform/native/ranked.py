"""The best of very many scores of one query, in each group: one pass in C, without a copy of any group's."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualform.native.kernels import is_plain, kernels

HELD = 1 << 16
"""So many places at most are wanted of all groups together: they stay in the cache."""
LAST = 2**32 - 1


class Highest(NamedTuple):
    """The highest scores of each group."""

    standings: np.ndarray[Any, np.dtype[np.uint64]]
    """(groups, k), in any order; of a group that has fewer, the last are 0."""
    counts: list[int]
    """How many there are of each group."""
    least: Tensor
    """The k-th best score of each group, (groups,); −∞: it has fewer."""

    def ordered(self) -> Tensor:
        """Their places, (groups, k), best first, ties to the lower place; of a group that has fewer, the last are −1."""
        return torch.from_numpy(self._places(np.sort(self.standings, 1)[:, ::-1]))

    def ascending(self, n: int) -> Tensor:
        """The places of all of them, ascending, of n that there are."""
        standings, bits = np.ascontiguousarray(self.standings), np.zeros(n // 64 + 1, np.uint64)
        out = np.empty(standings.size, np.int64)
        places = standings.ctypes.data, len(bits), bits.ctypes.data, out.ctypes.data
        return torch.from_numpy(out[: kernels().ascending(standings.size, *places)])

    def _places(self, standings: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        places: np.ndarray[Any, np.dtype[np.int64]] = LAST - (standings & LAST).astype(np.int64)
        if min(self.counts, default=0) < self.standings.shape[1]:
            places[standings == 0] = -1
        return places


def highest(scores: Tensor, codes: Tensor | None, groups: int, k: int) -> Highest | None:
    """The k highest scores in each group; None: find them in another way.

    scores: (1, n); codes: (n,) numbers of groups (int32), None if there is one.
    """
    loops, n = kernels(), scores.shape[1]
    if loops is None or not _fit(scores, codes) or not 0 < k * groups <= HELD or n > LAST:
        return None
    threads = torch.get_num_threads()
    held, counts = np.empty((threads, groups, 2 * k), np.uint64), np.empty((threads, groups), np.int64)
    least = np.empty((threads, groups), np.float32)
    rooms = (held.ctypes.data, counts.ctypes.data, least.ctypes.data)
    loops.highest(n, groups, k, scores.data_ptr(), None if codes is None else codes.data_ptr(), *rooms, threads)
    best, found = held[0, :, :k], counts[0].tolist()
    for group, count in enumerate(found):
        best[group, count:] = 0  # no score stands there: the last place of all is none
    return Highest(best, found, torch.from_numpy(least[0]))


def reaching(bound: Tensor, codes: Tensor | None, least: Tensor, without: Tensor | None = None) -> Tensor | None:
    """The places, ascending, of bounds (1, n) that are not below what their groups need, (1, groups); None: find them in another way.

    without: some places, ascending, that are left out.
    """
    loops, n, least, threads = kernels(), bound.shape[1], least.contiguous(), torch.get_num_threads()
    if loops is None or not _fit(bound, codes) or not _fit(least, None):
        return None
    out, room = np.empty(n, np.int64), np.empty((threads, 2), np.int64)
    left, skipped = (0, None) if without is None else (len(without), without.long().contiguous())
    scores = bound.data_ptr(), None if codes is None else codes.data_ptr(), least.data_ptr()
    rooms = None if skipped is None else skipped.data_ptr(), out.ctypes.data, room.ctypes.data
    return torch.from_numpy(out[: loops.reaching(n, least.shape[1], *scores, left, *rooms, threads)])


def joined(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two lists of places (n,), which ascend, with the scores of each, (queries, n), as one. No place is in both."""
    loops, (places, scores), (others, theirs) = kernels(), one, other
    fit = all(_fit(its, None) and is_plain(some, torch.int64) for some, its in (one, other))
    if loops is None or not fit:
        places, scores = torch.cat([places, others]), torch.cat([scores, theirs], 1)
        order = torch.from_numpy(np.argsort(places.numpy(), kind="stable"))  # two that ascend: in linear time
        return places[order], scores[:, order]
    count = len(places) + len(others)
    out, found = places.new_empty(count), scores.new_empty(1, count)
    lists = [part for some, its in (one, other) for part in (len(some), some.data_ptr(), its.data_ptr())]
    loops.joined(*lists, out.data_ptr(), found.data_ptr())
    return out, found


def _fit(scores: Tensor, codes: Tensor | None) -> bool:
    return len(scores) == 1 and is_plain(scores) and (codes is None or is_plain(codes, torch.int32))
