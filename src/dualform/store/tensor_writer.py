"""Writing safetensors files piece by piece: what was recorded step by step need not be copied together first.

The format is the library's, which checks its headers when they are read: 8 bytes of header length, a JSON header, the tensors' bytes. The
header holds each tensor's checksum; the manifest holds the header's.
"""

from __future__ import annotations

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

JOINED = 64 << 10
"""Small pieces are joined up to this many bytes: a system call for each would cost more than writing them."""


def write_tensors(path: Path, tensors: Mapping[str, Sequence[Array]], label: str | None = None) -> File:
    """Write and flush a file; the pieces of a tensor are joined along their first axis. label: see store/labels.py."""
    # Larger elements come first, so that each tensor is aligned in the file
    order = sorted(tensors, key=lambda name: (-tensors[name][0].dtype.itemsize, name))
    checksums = dict.fromkeys(order, checksum(b""))  # as long as those to come, so that the header's length is known
    header = _header(tensors, order, checksums, label)
    with create(path) as file:
        descriptor = file.fileno()
        os.lseek(descriptor, len(_encoded(header)), os.SEEK_SET)
        for name in order:
            header["__metadata__"][name] = _write_tensor(descriptor, tensors[name])
        head = _encoded(header)
        os.lseek(descriptor, 0, os.SEEK_SET)
        _write_all(descriptor, memoryview(head))
        os.fsync(descriptor)
        size = os.fstat(descriptor).st_size
    return File(size, checksum(head))


def directory(header: Mapping[str, Any]) -> str:
    """A checksum of the tensors' names, types and shapes: one that is missing or cut short is noticed, even if nobody counts it."""
    described = [
        [name, header[name]["dtype"], header[name]["shape"]] for name in sorted(header) if name != "__metadata__"
    ]
    return checksum(json.dumps(described, separators=(",", ":")).encode())


def _header(
    tensors: Mapping[str, Sequence[Array]], order: Sequence[str], checksums: dict[str, str], label: str | None
) -> dict[str, Any]:
    metadata = dict(checksums)
    if label is not None:
        metadata[LABEL] = label
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in order:
        pieces = tensors[name]
        begin = end
        end += sum(piece.nbytes for piece in pieces)
        shape = list(pieces[0].shape)
        if len(pieces) > 1:
            shape[0] = sum(len(piece) for piece in pieces)
        header[name] = {"dtype": NAMES[pieces[0].dtype.name], "shape": shape, "data_offsets": [begin, end]}
    metadata[DIRECTORY] = directory(header)
    return header


def _encoded(header: dict[str, Any]) -> bytes:
    """The header as it is in the file. Blanks at its end let the first tensor begin at a multiple of 8 bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(descriptor: int, pieces: Sequence[Array]) -> str:
    """Write a tensor at the file's present place; return its checksum."""
    total = xxhash.xxh3_64()
    for piece in _joined(pieces):
        data = piece.reshape(-1).view(np.uint8).data
        total.update(data)
        _write_all(descriptor, data)
    return total.hexdigest()


def _joined(pieces: Sequence[Array]) -> Iterator[Array]:
    """The same bytes in fewer pieces."""
    group: list[Array] = []
    size = 0
    for piece in pieces:
        if group and size + piece.nbytes > JOINED:
            yield np.concatenate(group) if len(group) > 1 else group[0]
            group = []
            size = 0
        group.append(piece)
        size += piece.nbytes
    yield np.concatenate(group) if len(group) > 1 else group[0]


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[_write_some(descriptor, data) :]


def _write_some(descriptor: int, data: memoryview) -> int:
    """Write as much as the system takes in one call; return how many bytes. Tests slow it down or let it fail."""
    return os.write(descriptor, data)
