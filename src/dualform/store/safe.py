"""Writing safetensors files piece by piece: what was recorded step by step need not be copied together first.

The format is the library's, which also reads it: 8 bytes of header length, a JSON header, the tensors' bytes. The
header holds each tensor's checksum; the manifest holds the header's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dualform.store.format import File, checksum

Array = np.ndarray[Any, Any]

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, Sequence[Array]]) -> File:
    """Write and flush a file; the parts of a tensor are joined along their first axis. Tensors are laid out by the size of their elements, so that each is aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name][0].dtype.itemsize, name))
    sums = {name: _checksum(tensors[name]) for name in order}
    header: dict[str, Any] = {"__metadata__": sums}
    offset = 0
    for name in order:
        pieces = tensors[name]
        size = sum(piece.nbytes for piece in pieces)
        shape = list(pieces[0].shape)
        if len(pieces) > 1:
            shape[0] = sum(len(piece) for piece in pieces)
        header[name] = {
            "dtype": NAMES[pieces[0].dtype.name],
            "shape": shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), memoryview(head))
        for name in order:
            for piece in tensors[name]:
                if piece.nbytes:
                    _write(file.fileno(), _bytes(piece))
        os.fsync(file.fileno())
    return File(len(head) + offset, checksum(head))


def _bytes(piece: Array) -> memoryview:
    return np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data


def _checksum(pieces: Sequence[Array]) -> str:
    total = xxhash.xxh3_64()
    for piece in pieces:
        if piece.nbytes:
            total.update(_bytes(piece))
    return total.hexdigest()


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
