"""Memory that is used again: fresh pages cost more than what is written to them."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualform.store.encoding import Encoded

PAGE = 4096
STREAMS = 8
"""A slab of more streams is no larger than one of this many."""
BLOCKS = 32
"""A slab holds this many blocks, if they fit."""
SHAPES = 64
"""This many views of the scratch memory are kept: making one takes as long as filling it."""


class Stream(NamedTuple):
    """The width and type of vectors that are stored together."""

    width: int
    dtype: torch.dtype

    def allocate(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """Return memory for vectors, (rows, width), and for their powers of two, (rows,), where they have any."""
        exponents = torch.empty(rows, dtype=torch.int16) if self.dtype is torch.float16 else None
        return _page_aligned(rows, self.width, self.dtype), exponents


@dataclass(eq=False, slots=True)
class Part:
    """Some rows of a slab: the vectors of each stream."""

    vectors: list[Encoded]
    note: Any = None
    """What its user wants to find again whenever it gets this part again."""


class Slab:
    """A stretch of memory that is filled step by step, and used again once all its parts have been given back."""

    def __init__(self, rows: int, streams: tuple[Stream, ...]):
        self.rows = rows
        self.streams = streams
        self.used = 0
        """How many rows are taken."""
        self.out = 0
        """How many vectors of its parts have not been given back."""
        self.memory = [stream.allocate(rows) for stream in streams]
        self._parts: list[Part] = []
        """All of it, cut once into parts as long as the first one: most batches are alike."""
        self._length = 0
        """How many rows these parts have."""

    @property
    def nbytes(self) -> int:
        """The size of all vectors."""
        return sum(vectors.nbytes for vectors, _ in self.memory)

    def take(self, rows: int) -> Part:
        """Return the next rows."""
        low = self.used
        self.used += rows
        self.out += len(self.streams)
        if low == 0 and rows and rows != self._length:
            self._cut(rows)
        if rows and rows == self._length and low % rows == 0:
            return self._parts[low // rows]
        return self._part(low, rows)

    def _cut(self, rows: int) -> None:
        self._length = 0
        self._parts = []
        if self.rows <= BLOCKS * rows:
            self._length = rows
            self._parts = [self._part(low, rows) for low in range(0, self.rows, rows)]

    def _part(self, low: int, rows: int) -> Part:
        return Part([self.vectors(stream, low, rows) for stream in range(len(self.streams))])

    def vectors(self, stream: int, low: int, rows: int) -> Encoded:
        """Return some rows of one stream."""
        vectors, exponents = self.memory[stream]
        here = slice(low, low + rows)
        return Encoded(vectors[here], None if exponents is None else exponents[here], self, low, stream)


class Pool:
    """Memory that goes round between recorder and writer.

    What is taken under one name follows each other in memory, so that the writer finds whole stretches, not pieces.

    One thread takes memory; any thread gives it back, into a queue that the first one empties. There is no lock that an exception
    from outside (Ctrl-C) could leave locked.
    """

    def __init__(self, most_bytes: int = 256 << 20, slab_bytes: int = 4 << 20):
        self._most_bytes = most_bytes
        self._slab_bytes = slab_bytes
        self._free: dict[tuple[int, tuple[Stream, ...]], list[Slab]] = defaultdict(list)
        self._free_bytes = 0
        self._filling: dict[str, Slab] = {}
        self._given: deque[Encoded] = deque()
        self._scratch = torch.empty(0)
        self._scratch_views: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def take(self, name: str, count: int, width: int, dtype: torch.dtype) -> Encoded:
        """Return memory for vectors (count, width), with any content."""
        streams = (Stream(width, dtype),)
        self._take_back()
        slab = self._filling.get(name)
        if slab is None or slab.used + count > slab.rows or slab.streams != streams:
            if slab is not None and not slab.out:
                self._keep(slab)
            slab = self._filling[name] = self._slab(count, streams)
        return slab.take(count).vectors[0]

    def take_slab(self, count: int, streams: tuple[Stream, ...]) -> list[Part]:
        """Return all parts of a slab, each with memory for `count` vectors of every stream."""
        self._take_back()
        slab = self._slab(count, streams)
        return [slab.take(count) for _ in range(slab.rows // max(count, 1))]

    def scratch(self, like: Tensor) -> Tensor:
        """Return memory of the same shape and type, valid until the next call."""
        view = self._scratch_views.get((like.shape, like.dtype))
        if view is not None:
            return view
        if self._scratch.dtype != like.dtype or self._scratch.numel() < like.numel():
            self._scratch = torch.empty(like.numel(), dtype=like.dtype)
            self._scratch_views.clear()
        if len(self._scratch_views) == SHAPES:
            self._scratch_views.clear()
        view = self._scratch[: like.numel()].view(like.shape)
        self._scratch_views[like.shape, like.dtype] = view
        return view

    def give(self, *vectors: Encoded | None) -> None:
        """Give back vectors that are no longer needed; from any thread."""
        self._given.extend([one for one in vectors if one is not None and one.slab is not None])

    def _take_back(self) -> None:
        while self._given:
            slab = self._given.popleft().slab
            assert slab is not None
            slab.out -= 1
            if not slab.out and not any(slab is other for other in self._filling.values()):
                self._keep(slab)

    def _slab(self, count: int, streams: tuple[Stream, ...]) -> Slab:
        # Small layers get small slabs: a large network has hundreds of them
        row_bytes = sum(stream.width * stream.dtype.itemsize for stream in streams)
        fitting = min(len(streams), STREAMS) * self._slab_bytes // max(1, row_bytes)
        rows = max(count, min(fitting, BLOCKS * count))
        free = self._free[rows, streams]
        if not free:
            return Slab(rows, streams)
        slab = free.pop()
        self._free_bytes -= slab.nbytes
        return slab

    def _keep(self, slab: Slab) -> None:
        if self._free_bytes + slab.nbytes <= self._most_bytes:
            slab.used = 0
            self._free[slab.rows, slab.streams].append(slab)
            self._free_bytes += slab.nbytes


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
