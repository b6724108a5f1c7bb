"""Memory that is used again: fresh pages cost more than what is written to them."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch import Tensor

from dualform.store.encoding import Encoded

PAGE = 4096
BLOCKS = 32
"""A slab holds this many blocks, if they fit."""


class Slab:
    """A stretch of memory that is filled step by step, and used again once all its parts have been given back."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype):
        self.rows = rows
        self.used = 0
        """How many rows are taken."""
        self.out = 0
        """How many of its parts have not been given back."""
        self.is_filling = True
        """Whether more parts may be taken of it."""
        self.vectors = _page_aligned(rows, width, dtype)
        """(rows, width), …"""
        self.exponents = torch.empty(rows, dtype=torch.int16) if dtype is torch.float16 else None
        """… and their powers of two, (rows,), where they have any."""

    @property
    def kind(self) -> tuple[int, int, torch.dtype]:
        """Slabs of one kind can stand in for each other."""
        return self.rows, self.vectors.shape[1], self.vectors.dtype

    def take(self, rows: int) -> Encoded:
        """Return the next rows."""
        low = self.used
        self.used += rows
        self.out += 1
        return self.part(low, rows)

    def part(self, low: int, rows: int) -> Encoded:
        """Return some rows."""
        here = slice(low, low + rows)
        return Encoded(self.vectors[here], None if self.exponents is None else self.exponents[here], self, low)


class Pool:
    """Memory that goes round between recorder and writer.

    What is taken under one name follows each other in memory, so that the writer finds whole stretches, not pieces.

    One thread takes memory; any thread gives it back, into a queue that the first one empties. There is no lock that an exception
    from outside (Ctrl-C) could leave locked.
    """

    def __init__(self, most_bytes: int = 256 << 20, slab_bytes: int = 4 << 20):
        self._most_bytes = most_bytes
        self._slab_bytes = slab_bytes
        self._free: dict[tuple[int, int, torch.dtype], list[Slab]] = defaultdict(list)
        self._free_bytes = 0
        self._filling: dict[str, Slab] = {}
        self._given: deque[Encoded] = deque()

    def take(self, name: str, count: int, width: int, dtype: torch.dtype) -> Encoded:
        """Return memory for vectors (count, width), with any content."""
        self._take_back()
        slab = self._filling.get(name)
        if slab is None or slab.used + count > slab.rows or slab.kind[1:] != (width, dtype):
            if slab is not None:
                slab.is_filling = False
                if not slab.out:
                    self._keep(slab)
            slab = self._filling[name] = self._slab(count, width, dtype)
        return slab.take(count)

    def share(self, vectors: Encoded) -> Encoded:
        """Return the same vectors once more, to be given back apart from the others."""
        slab = vectors.slab
        if slab is None:
            return vectors
        slab.out += 1
        return slab.part(vectors.first, vectors.count)

    def give(self, *vectors: Encoded | None) -> None:
        """Give back vectors that are no longer needed; from any thread."""
        self._given.extend([one for one in vectors if one is not None and one.slab is not None])

    def _take_back(self) -> None:
        while self._given:
            slab = self._given.popleft().slab
            assert slab is not None
            slab.out -= 1
            if not slab.out and not slab.is_filling:
                self._keep(slab)

    def _slab(self, count: int, width: int, dtype: torch.dtype) -> Slab:
        # Small layers get small slabs: a large network has hundreds of them
        fitting = self._slab_bytes // max(1, width * dtype.itemsize)
        rows = max(count, min(fitting, BLOCKS * count))
        free = self._free[rows, width, dtype]
        if not free:
            return Slab(rows, width, dtype)
        slab = free.pop()
        slab.is_filling = True
        self._free_bytes -= slab.vectors.nbytes
        return slab

    def _keep(self, slab: Slab) -> None:
        nbytes = slab.vectors.nbytes
        if self._free_bytes + nbytes <= self._most_bytes:
            slab.used = 0
            self._free[slab.kind].append(slab)
            self._free_bytes += nbytes


def _page_aligned(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return memory that begins at a page, so that it can be written to the disk from where it is."""
    size = rows * columns * dtype.itemsize
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    skip = -memory.data_ptr() % PAGE
    return memory[skip : skip + size].view(dtype).view(rows, columns)


def give_back() -> None:
    """Return free memory to the system; takes milliseconds. Does nothing where the C library has no such call.

    PyTorch asks for aligned memory, and glibc before 2.38 seldom uses a freed aligned block again: a loop that decodes chunk after
    chunk would seem to need more and more.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return function
