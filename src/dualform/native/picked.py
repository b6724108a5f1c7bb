"""Products with selected vectors of a long list: a loop in C reads each where it is stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dualform.native.kernels import kernels

KINDS = (torch.float32, torch.float16, torch.bfloat16)
"""The types of vectors, in the order of their numbers in asking.c."""
FEW = 4
"""For more queries, a matrix product is faster."""


class Picked:
    """Vectors (n, d) in one or several tables, numbered consecutively."""

    def __init__(self, tables: Sequence[tuple[Tensor, Tensor | None]]):
        """tables: vectors (n, d), and the power of two that multiplies each vector (n,), if any."""
        self._tables = [(vectors, powers) for vectors, powers in tables if len(vectors)]
        self._ends = np.cumsum([len(vectors) for vectors, _ in self._tables])
        self._places = np.array([vectors.data_ptr() for vectors, _ in self._tables])
        self._powers = np.array([0 if powers is None else powers.data_ptr() for _, powers in self._tables])
        self._kind = self._find_kind()

    def _find_kind(self) -> int | None:
        """Return the number of the vectors' type in asking.c; None: the loop cannot read them."""
        kinds = {vectors.dtype for vectors, _ in self._tables}
        if len(kinds) != 1 or not kinds <= set(KINDS):
            return None
        for vectors, powers in self._tables:
            if not vectors.is_contiguous() or (powers is not None and not powers.is_contiguous()):
                return None
        return KINDS.index(kinds.pop())

    def dots(self, queries: Tensor, numbers: Tensor) -> Tensor | None:
        """Return queries (m, d) · the vectors with these numbers, (m, n); None if the loop cannot do it."""
        loops = kernels()
        count, width = queries.shape
        if loops is None or self._kind is None or not 0 < count <= FEW:
            return None
        if queries.dtype != torch.float32 or numbers.dtype != torch.int64:
            return None
        queries = queries.contiguous()
        numbers = numbers.contiguous()
        out = queries.new_empty(count, len(numbers))
        is_missing = loops.picked(
            len(numbers),
            len(self._ends),
            width,
            count,
            self._kind,
            numbers.data_ptr(),
            self._ends.ctypes.data,
            self._places.ctypes.data,
            self._powers.ctypes.data,
            queries.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if is_missing:
            raise IndexError(f"a vector was asked for that is not there: there are {self._ends[-1]}")
        return out
