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

    def ordered(self) -> Tensor:
        """Their places, (groups, k), best first, ties to the lower place; of a group that has fewer, the last are −1."""
        return torch.from_numpy(self._places(np.sort(self.standings, 1)[:, ::-1]))

    def ascending(self, n: int) -> Tensor:
        """The places of all of them, ascending, of n that there are."""
        marks = np.zeros(n + 1, bool)  # −1 is the last, which is none
        marks[self._places(self.standings)] = True
        return marked(marks[:-1])

    def last(self) -> Tensor:
        """The places of the k-th best of each group, (groups,); −1: it has fewer."""
        return torch.from_numpy(self._places(self.standings.min(1)))

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
    return Highest(best, found)


def reaching(bound: Tensor, codes: Tensor | None, least: Tensor) -> Tensor | None:
    """Whether bounds (1, n) are not below what their groups need, (1, groups): (n,); None: find out in another way."""
    loops, out, least = kernels(), torch.empty(bound.shape[1], dtype=torch.bool), least.contiguous()
    if loops is None or not _fit(bound, codes) or not _fit(least, None):
        return None
    places = (bound.data_ptr(), None if codes is None else codes.data_ptr(), least.data_ptr(), out.data_ptr())
    loops.reaching(len(out), *places, torch.get_num_threads())
    return out


def marked(marks: np.ndarray[Any, np.dtype[np.bool_]]) -> Tensor:
    """The places of marks (n,), ascending."""
    loops = kernels()
    if loops is None or not marks.flags.c_contiguous:
        return torch.from_numpy(np.flatnonzero(marks))
    out = np.empty(len(marks), np.int64)
    return torch.from_numpy(out[: loops.marked(len(marks), marks.ctypes.data, out.ctypes.data)])


def _fit(scores: Tensor, codes: Tensor | None) -> bool:
    return len(scores) == 1 and is_plain(scores) and (codes is None or is_plain(codes, torch.int32))
