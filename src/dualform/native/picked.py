"""Products with vectors that are picked out of a long list: each is read from where it lies, in one loop in C."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dualform.native.kernels import is_plain, kernels

KINDS = (torch.float32, torch.float16, torch.bfloat16)
"""What vectors may be stored as; their numbers in asking.c."""
FEW = 4
"""Of more queries, a product of matrices takes less time for each."""


class Picked:
    """Vectors (n, d) in one or several tables, which go on counting where the one before ends."""

    def __init__(self, tables: Sequence[tuple[Tensor, Tensor | None]], rests: Tensor | None = None):
        """tables: vectors (n, d), and for each the power of two (n,) that multiplies it, if any. rests: of all vectors, how much is not seen."""
        self._tables = [(vectors, powers) for vectors, powers in tables if len(vectors)]
        self._ends = np.cumsum([len(vectors) for vectors, _ in self._tables])
        self._places = np.array([vectors.data_ptr() for vectors, _ in self._tables])
        self._powers = np.array([0 if powers is None else powers.data_ptr() for _, powers in self._tables])
        self._rests = rests
        every = [one for table in self._tables for one in table if one is not None]
        kinds = {vectors.dtype for vectors, _ in self._tables}
        known = len(kinds) == 1 and kinds <= set(KINDS)
        known = known and (rests is None or (is_plain(rests) and len(rests) == self._ends[-1]))
        self._kind = KINDS.index(kinds.pop()) if known and all(one.is_contiguous() for one in every) else None

    def dots(self, queries: Tensor, numbers: Tensor) -> Tensor | None:
        """Queries (m, d) · the vectors with these numbers, (m, n); None: is to be done in another way."""
        return self._found(queries, numbers, None, False)

    def bounds(self, queries: Tensor, own: Tensor, numbers: Tensor, *, absolute: bool = False) -> Tensor | None:
        """What none of these products, or of their sizes, is above. own: (m,), how much is not seen of each query."""
        if self._rests is None or len(own) != len(queries) or not is_plain(own):
            return None
        return self._found(queries, numbers, own, absolute)

    def _found(self, queries: Tensor, numbers: Tensor, own: Tensor | None, absolute: bool) -> Tensor | None:
        loops, (m, d), n = kernels(), queries.shape, len(numbers)
        if loops is None or self._kind is None or not 0 < m <= FEW:
            return None
        if queries.dtype != torch.float32 or numbers.dtype != torch.int64:
            return None
        queries, numbers, out = queries.contiguous(), numbers.contiguous(), queries.new_empty(m, n)
        tables = self._ends.ctypes.data, self._places.ctypes.data, self._powers.ctypes.data
        sizes = n, len(self._ends), d, m, self._kind
        rests = None if own is None or self._rests is None else self._rests.data_ptr()
        unseen = None if own is None else own.data_ptr(), rests, absolute
        vectors = numbers.data_ptr(), *tables, queries.data_ptr()
        if loops.picked(*sizes, *vectors, *unseen, out.data_ptr(), torch.get_num_threads()):
            raise IndexError(f"a vector was asked for that is not there: there are {self._ends[-1]}")
        return out
