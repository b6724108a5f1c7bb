"""Writing safetensors files piece by piece: what was recorded step by step need not be copied together first.

The format is the library's, which checks its headers when they are read: 8 bytes of header length, a JSON header, the tensors' bytes. The
header holds each tensor's checksum; the manifest holds the header's.

Files are written beside a training that wants the processor for itself. So each byte is fetched from memory once, for its checksum: whole
blocks go to the disk from where they are, without a copy in the system's page cache (O_DIRECT), where system and file system can do so, and
as many as there are in one call, which takes half the processor's time of a call for each few megabytes.
What does not begin at a block, in memory or in the file, is copied to a staging buffer first, and summed while the cache still holds it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dualform.store.access import create
from dualform.store.format import File, checksum
from dualform.store.labels import DIRECTORY, LABEL

Array = np.ndarray[Any, Any]

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip

BLOCK = 4096  # direct writes start and end at multiples of it, in memory and in the file
STAGE = 4 << 20  # so much is copied, at most, before it is written
HOT = 256 << 10  # copied and summed at a time; fits into a core's own cache
JOINED = 64 << 10  # small pieces are joined to this first: a call for each would cost more than their bytes
DIRECT_FROM = 1 << 20  # smaller files are written the ordinary way
PIECES = 512  # so many go into one call, at most


def write_tensors(path: Path, tensors: Mapping[str, Sequence[Array]], label: str | None = None) -> File:
    """Write and flush a file; the parts of a tensor are joined along their first axis. label: see store/labels.py.

    Tensors of whole blocks come first, so that each begins at one, the others by the size of their elements, so that each is aligned.
    """
    sizes = {name: sum(piece.nbytes for piece in pieces) for name, pieces in tensors.items()}
    order = sorted(tensors, key=lambda name: (sizes[name] % BLOCK > 0, -tensors[name][0].dtype.itemsize, name))
    metadata = dict.fromkeys(order, checksum(b""))  # in the place of those to come, which are as long
    if label is not None:
        metadata[LABEL] = label
    header: dict[str, Any] = {"__metadata__": metadata}
    size = 0
    for name in order:
        pieces = tensors[name]
        start, size = size, size + sizes[name]
        shape = list(pieces[0].shape)
        if len(pieces) > 1:
            shape[0] = sum(len(piece) for piece in pieces)
        header[name] = {"dtype": NAMES[pieces[0].dtype.name], "shape": shape, "data_offsets": [start, size]}
    metadata[DIRECTORY] = directory(header)
    unit = BLOCK if size >= DIRECT_FROM else 8
    with create(path) as file:
        stage = _Stage(file.fileno(), len(_head(header, unit)), size)
        for name in order:
            metadata[name] = stage.add(tensors[name])
        stage.close()
        head = _head(header, unit)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        stage.write(memoryview(head))
        os.fsync(file.fileno())
    return File(len(head) + size, checksum(head))


def directory(header: Mapping[str, Any]) -> str:
    """A checksum of the tensors' names, types and shapes: one that is missing or cut short is noticed, even if nobody counts it."""
    described = [
        [name, header[name]["dtype"], header[name]["shape"]] for name in sorted(header) if name != "__metadata__"
    ]
    return checksum(json.dumps(described, separators=(",", ":")).encode())


def _head(header: dict[str, Any], unit: int) -> bytes:
    """The header, as long as some whole units."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % unit)
    return len(text).to_bytes(8, "little") + text


class _Stage:
    """A buffer through which size bytes go into a file, from byte number start on.

    What it holds begins at a block of the file; the part of the first block before start is to be written afterwards.
    """

    def __init__(self, descriptor: int, start: int, size: int):
        self._descriptor, self._used = descriptor, start % BLOCK
        self._waiting: list[memoryview] = []
        """Whole blocks that come before what it holds, and are written with it."""
        self._direct = size >= DIRECT_FROM and _set_direct(descriptor, True)
        blocks = -(-min(self._used + size, STAGE if self._direct else HOT) // BLOCK)
        memory = np.zeros((blocks + 1) * BLOCK, np.uint8)
        self._memory = memory[-memory.ctypes.data % BLOCK :][: blocks * BLOCK]
        os.lseek(descriptor, start - self._used, os.SEEK_SET)

    def add(self, pieces: Sequence[Array]) -> str:
        """Append a tensor; gives its checksum."""
        total = xxhash.xxh3_64()
        for piece in _joined(pieces):
            data = self._straight(piece.reshape(-1).view(np.uint8), total)
            while len(data):
                hot = self._memory[self._used : self._used + min(len(data), HOT)]
                hot[:] = data[: len(hot)]
                total.update(hot.data)
                data = data[len(hot) :]
                self._used += len(hot)
                if self._used == len(self._memory):
                    self._empty(self._used)
        return total.hexdigest()

    def _straight(self, data: Array, total: xxhash.xxh3_64) -> Array:
        """Sum the whole blocks that a piece begins with, which wait to be written from where they are; gives the rest."""
        whole = len(data) // BLOCK * BLOCK
        if not (self._direct and whole) or self._used % BLOCK or data.ctypes.data % BLOCK:
            return data
        if self._used:
            self._empty(self._used)
        total.update(data[:whole].data)
        self._waiting.append(data[:whole].data)
        return data[whole:]

    def _empty(self, count: int) -> None:
        """Write what waits, and so many bytes of what it holds."""
        waiting, self._waiting = self._waiting, []
        self.write(*waiting, self._memory[:count].data)
        self._used -= count

    def close(self) -> None:
        """Write what is left; after that, any number of bytes can be written to any place."""
        whole = self._used // BLOCK * BLOCK if self._direct else 0
        rest = self._memory[whole : self._used].data
        self._empty(whole)
        self._direct = self._direct and _set_direct(self._descriptor, False)
        self.write(rest)

    def write(self, *pieces: memoryview) -> None:
        """Write at the file's present place."""
        left = [piece for piece in pieces if len(piece)]
        while left:
            done = self._write(left[:PIECES])
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]

    def _write(self, pieces: list[memoryview]) -> int:
        try:
            return _written(self._descriptor, pieces)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
        self._direct = _set_direct(self._descriptor, False)  # some file systems refuse only now, not when asked
        return _written(self._descriptor, pieces)


def _written(descriptor: int, pieces: list[memoryview]) -> int:
    """Write some pieces, or a part of them; gives how many bytes. Windows has no call for several."""
    return os.writev(descriptor, pieces) if hasattr(os, "writev") else os.write(descriptor, pieces[0])


def _joined(pieces: Sequence[Array]) -> Iterator[Array]:
    group: list[Array] = []
    size = 0
    for piece in pieces:
        if group and size + piece.nbytes > JOINED:
            yield np.concatenate(group) if len(group) > 1 else group[0]
            group, size = [], 0
        group.append(piece)
        size += piece.nbytes
    yield np.concatenate(group) if len(group) > 1 else group[0]


def _set_direct(descriptor: int, direct: bool) -> bool:
    """Let writes go around the page cache, or not; gives whether they do. System or file system may not know how."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    import fcntl  # not on Windows, which has no O_DIRECT either

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if direct else flags & ~flag)
    except OSError:
        return False
    return direct
