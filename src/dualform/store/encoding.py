"""How vectors are stored: as they are, or in float16 with a power of two per vector.

Unscaled, most error signals would fall below float16's normal range; scaled, each element keeps 11 significant bits
unless it is 2²⁹ times smaller than the norm of its vector.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

TORCH = {"float32": torch.float32, "float16": torch.float16, "float64": torch.float64}
TOP = 15  # stored vectors have norms in [2¹⁴, 2¹⁵): no element can overflow
UNIT = 126 + TOP  # such a norm's exponent, as a float32 has it in its bits
PAGE = 4096
STREAMS = 8  # a slab of many streams is no larger than one of so many
BLOCKS = 32  # so many blocks go into a slab of memory, if they fit
SHAPES = 64  # so many views of the scratch memory are kept: making one takes as long as filling it
STRETCH = (
    512  # so many vectors are decoded at a time, where they are picked out or only looked at: they stay in the cache
)
SMALLEST, LARGEST = -100, 127  # powers of two beyond these would themselves overflow in float32


@dataclass(slots=True)
class Encoded:
    """Vectors (n, d) as stored; `exponents` (n,) int16 says by which power of two each was divided."""

    data: Tensor
    exponents: Tensor | None
    slab: Slab | None = None
    """The memory that `data` is a part of, if it goes back to a pool, …"""
    first: int = 0
    """… its first row there, …"""
    stream: int = 0
    """… and which of the slab's streams it belongs to."""
    count: int = field(init=False)
    """How many there are."""
    nbytes: int = field(init=False)
    """How many bytes are stored."""
    places: tuple[int, int] = field(init=False)
    """Where vectors and exponents begin in memory; 0: there are none."""

    def __post_init__(self) -> None:
        self.count = self.data.size(0)
        self.nbytes = self.data.nbytes + (0 if self.exponents is None else self.exponents.nbytes)
        self.places = self.data.data_ptr(), _place(self.exponents)

    def scales(self, places: slice | Tensor) -> Tensor | None:
        """The exponents of some of the vectors."""
        return None if self.exponents is None else self.exponents[places]

    def decoded(self, places: Tensor, out: Tensor, times: Tensor | None = None) -> Tensor:
        """Some of the vectors, by their places, in a type that can be computed with. times: (n, 1), multiplies each of them."""
        scales = None if self.exponents is None else self.exponents[places]
        if scales is not None and bool(scales.any()):
            powers = torch.exp2(scales.to(out.dtype)).unsqueeze(1)
            times = powers if times is None else powers * times
        here = slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0, 0)
        # as long is not enough: places of shared keys come in any order
        if here.stop - here.start == len(places) and bool((places.diff() == 1).all()):
            out.copy_(self.data[here])
            return out if times is None else out.mul_(times)
        if self.data.dtype == out.dtype:
            torch.index_select(self.data, 0, places, out=out)
            return out if times is None else out.mul_(times)
        room = self.data.new_empty(min(len(places), STRETCH), self.data.shape[1])
        for low in range(0, len(places), STRETCH):
            some = places[low : low + STRETCH]
            part = out[low : low + STRETCH].copy_(torch.index_select(self.data, 0, some, out=room[: len(some)]))
            if times is not None:
                part.mul_(times[low : low + STRETCH])
        return out

    def take(self, places: np.ndarray[Any, np.dtype[np.int64]]) -> Encoded:
        """Some of the vectors, copied. By NumPy: an operation of PyTorch in another thread would bring up threads of its own, and from
        then on those of the training would sleep at every turn instead of waiting for each other awake (libgomp)."""
        exponents = None if self.exponents is None else torch.from_numpy(self.exponents.numpy()[places])
        return Encoded(torch.from_numpy(self.data.numpy()[places]), exponents)


def _place(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Stream(NamedTuple):
    """Vectors that are alike."""

    width: int
    dtype: torch.dtype

    def memory(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """For the vectors, (rows, width), and for their powers of two, (rows,), where they have any."""
        exponents = torch.empty(rows, dtype=torch.int16) if self.dtype is torch.float16 else None
        return _aligned(rows, self.width, self.dtype), exponents


@dataclass(eq=False, slots=True)
class Part:
    """Some rows of a slab: the vectors of each stream."""

    vectors: list[Encoded]
    note: Any = None
    """What its taker wants to find again whenever it gets this part again."""


class Slab:
    """A stretch of memory that is filled step by step; goes round once all its parts have been given back."""

    def __init__(self, rows: int, streams: tuple[Stream, ...]):
        self.rows, self.streams, self.used, self.out = rows, streams, 0, 0
        self.memory = [stream.memory(rows) for stream in streams]
        self._parts: list[Part] = []
        """It cut into parts as long as the first one, for batches that are all alike: made once."""
        self._length = 0
        """How long they are."""

    @property
    def nbytes(self) -> int:
        """Of all vectors."""
        return sum(vectors.nbytes for vectors, *_ in self.memory)

    def taken(self, rows: int) -> Part:
        """The next rows."""
        low, self.used, self.out = self.used, self.used + rows, self.out + len(self.streams)
        if not low and rows and rows != self._length:
            self._length = rows if self.rows <= BLOCKS * rows else 0
            self._parts = [self._part(at, rows) for at in range(0, self.rows, rows)] if self._length else []
        if rows and rows == self._length and not low % rows:
            return self._parts[low // rows]
        return self._part(low, rows)

    def _part(self, low: int, rows: int) -> Part:
        return Part([self.vectors(stream, low, rows) for stream in range(len(self.streams))])

    def vectors(self, stream: int, low: int, rows: int) -> Encoded:
        """Some rows of one stream."""
        vectors, exponents = self.memory[stream]
        here = slice(low, low + rows)
        scales = None if exponents is None else exponents[here]
        return Encoded(vectors[here], scales, self, low, stream)


class Pool:
    """Memory that goes round between recorder and writer: fresh pages cost more than the copy into them.

    What is taken under one name follows each other in memory, so that the writer finds whole stretches, not pieces.

    One thread takes memory; any thread gives it back, into a queue that the first one empties. There is no lock that an exception
    from outside (Ctrl-C) could leave locked.
    """

    def __init__(self, most_bytes: int = 256 << 20, slab_bytes: int = 4 << 20):
        self._free: dict[tuple[int, tuple[Stream, ...]], list[Slab]] = defaultdict(list)
        self._filling: dict[str, Slab] = {}
        self._most, self._slab_bytes, self._bytes = most_bytes, slab_bytes, 0
        self._given: deque[Encoded] = deque()
        self._scratch = torch.empty(0)
        self._rooms: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def take(self, name: str, count: int, width: int, dtype: torch.dtype) -> Encoded:
        """Room for some vectors (count, width), with any content."""
        wanted = (Stream(width, dtype),)
        self._take_back()
        slab = self._filling.get(name)
        if slab is None or slab.used + count > slab.rows or slab.streams != wanted:
            if slab is not None and not slab.out:
                self._keep(slab)
            slab = self._filling[name] = self._slab(count, wanted)
        return slab.taken(count).vectors[0]

    def take_slab(self, count: int, streams: tuple[Stream, ...]) -> list[Part]:
        """Room for as many vectors of several streams, again and again: all parts of a slab."""
        self._take_back()
        slab = self._slab(count, streams)
        return [slab.taken(count) for _ in range(slab.rows // max(count, 1))]

    def like(self, wanted: Wanted, dtype: torch.dtype) -> Encoded:
        """Room for what is wanted."""
        count, width = wanted.vectors.shape
        return self.take(wanted.name, count, width, dtype)

    def scratch(self, like: Tensor) -> Tensor:
        """Room for something that is used at once, of the same shape and type."""
        room = self._rooms.get((like.shape, like.dtype))
        if room is None:
            if self._scratch.dtype != like.dtype or self._scratch.numel() < like.numel():
                self._scratch = torch.empty(like.numel(), dtype=like.dtype)
                self._rooms.clear()
            if len(self._rooms) == SHAPES:
                self._rooms.clear()
            room = self._rooms[like.shape, like.dtype] = self._scratch[: like.numel()].view(like.shape)
        return room

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
        width = sum(stream.width * stream.dtype.itemsize for stream in streams)
        fitting = min(len(streams), STREAMS) * self._slab_bytes // max(1, width)
        rows = max(count, min(fitting, BLOCKS * count))
        free = self._free[rows, streams]
        if not free:
            return Slab(rows, streams)
        slab = free.pop()
        self._bytes -= slab.nbytes
        return slab

    def _keep(self, slab: Slab) -> None:
        if self._bytes + slab.nbytes <= self._most:
            slab.used = 0
            self._free[slab.rows, slab.streams].append(slab)
            self._bytes += slab.nbytes


def _aligned(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Memory that begins at a page, so that it can be written to the disk as it is."""
    size = rows * columns * dtype.itemsize
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    skip = -memory.data_ptr() % PAGE
    return memory[skip : skip + size].view(dtype).view(rows, columns)


@dataclass(slots=True)
class Wanted:
    """Vectors (n, d) that are to be stored."""

    vectors: Tensor
    name: str = ""
    """Where the memory comes from: see Pool."""
    norms: Tensor | None = None
    """Their Euclidean norms (n,), if they are known already."""
    as_they_are: bool = False
    """Those whose norm is from 1 to 2¹⁵ are not scaled: an element is then off by 2⁻¹¹ of itself or by 2⁻²⁵, whichever is
    more. For keys."""


def encode(
    vectors: Tensor, dtype: str, pool: Pool | None = None, name: str = "", *, as_they_are: bool = False
) -> Encoded:
    """Copy vectors (n, d) into their stored form; the copy shares no memory with the original."""
    return encode_all([Wanted(vectors.detach().cpu(), name, as_they_are=as_they_are)], dtype, pool)[0]


def encode_all(wanted: Sequence[Wanted], dtype: str, pool: Pool | None = None) -> list[Encoded]:
    """The same for several at once: a call on the few numbers of one takes as long as one on all of them."""
    kind = TORCH[dtype]
    for one in wanted:
        if not one.vectors.is_cpu:
            one.vectors, one.norms = one.vectors.cpu(), None
    rooms = [_room(one.vectors.shape, kind) if pool is None else pool.like(one, kind) for one in wanted]
    if dtype != "float16" or not wanted:
        for one, room in zip(wanted, rooms, strict=True):
            room.data.copy_(one.vectors)
        return rooms
    for one in wanted:
        if one.vectors.dtype not in (torch.float32, torch.float64):
            one.vectors, one.norms = one.vectors.float(), None
    counts = [one.vectors.shape[0] for one in wanted]
    raised = _raised(wanted, counts)
    scales = torch.split(torch.from_numpy(((253 + TOP - raised) << 23).view(np.float32)[:, None]), counts)
    exponents = torch.split(torch.from_numpy(np.subtract(raised, UNIT, dtype=np.int16, casting="unsafe")), counts)
    start = 0
    for one, room, count, scale, exponent in zip(wanted, rooms, counts, scales, exponents, strict=True):
        vectors, some, start = one.vectors, raised[start : start + count], start + count
        if count and not (one.as_they_are and np.equal(some, UNIT).all()):
            # In two steps: a product that is rounded to float16 as it is made takes a slow path in PyTorch
            vectors = torch.mul(vectors, scale, out=None if pool is None else pool.scratch(vectors))
        room.data.copy_(vectors)
        assert room.exponents is not None
        room.exponents.copy_(exponent)
    return rooms


def _room(shape: torch.Size, dtype: torch.dtype) -> Encoded:
    """Memory of its own."""
    exponents = torch.empty(shape[0], dtype=torch.int16) if dtype is torch.float16 else None
    return Encoded(torch.empty(shape, dtype=dtype), exponents)


def _raised(wanted: Sequence[Wanted], counts: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The power of two of each vector, as a float32 has it in its bits; UNIT: it is stored as it is."""
    # A norm is as good a bound as the largest element, and one pass over the data instead of two
    norms = [torch.linalg.vector_norm(one.vectors, dim=1) if one.norms is None else one.norms for one in wanted]
    bounds = torch.cat(norms).numpy()
    if bounds.size and not (np.minimum.reduce(bounds) > 1e-15 and np.maximum.reduce(bounds) < 1e15):
        # Squares might leave float32, or something is not finite
        bounds = torch.cat([_within(one.vectors, some) for one, some in zip(wanted, norms, strict=True)]).numpy()
    raised = bounds.astype(np.float32, copy=False).view(np.int32) >> 23
    raised[(raised >= 127) & (raised < 127 + TOP) & _spread(tuple([one.as_they_are for one in wanted]), *counts)] = UNIT
    return raised


@lru_cache(maxsize=64)  # the same at every step
def _spread(flags: tuple[bool, ...], *counts: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.repeat(np.array(flags, dtype=np.bool_), counts)


def _within(vectors: Tensor, norms: Tensor) -> Tensor:
    """Norms, and bounds that float32 can hold of those vectors that have none."""
    if not vectors.numel():
        return torch.ones_like(norms)
    largest = vectors.abs().where(vectors.isfinite(), 0).amax(1).clamp(2.0**SMALLEST, 2.0**LARGEST)
    return norms.where((norms > 1e-15) & (norms < 1e15), largest)


def encode_numbers(numbers: Tensor) -> Encoded:
    """Copy the places of one-hot keys (n, 1)."""
    return Encoded(numbers.detach().cpu().to(torch.int32, copy=True).contiguous(), None)


def decode(data: Tensor, exponents: Tensor | None, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The vectors again, in a type that can be computed with. out: memory to use for it, if it must be copied at all."""
    if data.dtype == dtype and exponents is None:
        return data
    found = data.to(dtype) if out is None else out[: len(data)].copy_(data)
    if exponents is None or not bool(exponents.any()):
        return found
    return found.mul_(torch.exp2(exponents.to(dtype)).unsqueeze(1))
