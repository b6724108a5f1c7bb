"""The header of a safetensors file: which arrays it holds, of which type and shape, and where.

The format is the library's: 8 bytes of header length, a JSON header, the arrays' bytes, one array after the other. Its metadata, which
the library leaves to us, holds the checksum of each array, the label of the file (store/labels.py) and other names of arrays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualform.arrays import Array
from dualform.layers.layer import COUNT_LIMIT
from dualform.store.format import checksum, shortened
from dualform.store.labels import ALIASES, DIRECTORY, LABEL

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""How headers call NumPy's types."""
TYPES = {stored: np.dtype(name) for name, stored in NAMES.items()}
"""NumPy's types by their names in headers."""
STORED = {dtype: stored for stored, dtype in TYPES.items()}
"""The same the other way round. Not by the types' names: NumPy puts these together anew each time, in Python."""
MAX_AXES = 32

Arrays = dict[str, dict[str, Any]]
"""By array: its "dtype", "shape" and "data_offsets"."""


@dataclass(frozen=True)
class Header:
    """What a header says."""

    arrays: Arrays
    checksums: Mapping[str, str]
    """By array."""
    aliases: Mapping[str, str]
    """Other names of arrays, each with the name under which the array is stored."""
    label: str | None
    """Which run the file belongs to, and where in it (store/labels.py); None: it does not say."""


def describe(pieces: Sequence[Array], begin: int, end: int) -> dict[str, Any]:
    """Return the entry of an array in the header. Its pieces are joined along their first axis."""
    shape = list(pieces[0].shape)
    if len(pieces) > 1:
        shape[0] = sum(len(piece) for piece in pieces)
    return {"dtype": STORED[pieces[0].dtype], "shape": shape, "data_offsets": [begin, end]}


def header_bytes(header: Header, unit: int) -> bytes:
    """Return the header with its length before it, padded to whole units."""
    metadata = dict(header.checksums)
    if header.label is not None:
        metadata[LABEL] = header.label
    if header.aliases:
        metadata[ALIASES] = json.dumps(header.aliases)
    metadata[DIRECTORY] = _directory(header.arrays, header.aliases)
    content = {"__metadata__": metadata, **header.arrays}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % unit)
    return len(text).to_bytes(8, "little") + text


def _directory(arrays: Arrays, aliases: Mapping[str, str]) -> str:
    """Return a checksum of the arrays' names, types and shapes, so that a missing or shortened array is noticed."""
    described: list[list[Any]] = [[name, arrays[name]["dtype"], arrays[name]["shape"]] for name in sorted(arrays)]
    described += [[name, aliases[name]] for name in sorted(aliases)]
    return checksum(json.dumps(described, separators=(",", ":")).encode())


def parse_header(text: bytes, data_size: int) -> Header:
    """Parse a header, without its length. Raise ValueError if it does not fit data of this size."""
    arrays = json.loads(text)
    if not isinstance(arrays, dict):
        raise ValueError("its header is no JSON object")
    metadata = arrays.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the metadata of its header are not texts")
    _check_ranges(arrays, data_size)
    aliases = _parse_aliases(metadata.pop(ALIASES, "{}"), arrays)
    if metadata.pop(DIRECTORY, None) != _directory(arrays, aliases):
        raise ValueError("its arrays are not those that were written")
    label = metadata.pop(LABEL, None)
    return Header(arrays, metadata, aliases, label)


def _check_ranges(arrays: Mapping[str, object], data_size: int) -> None:
    """Raise ValueError unless the arrays fill the data, one after the other."""
    end = 0
    for begin, array_end, name in sorted(_checked_range(name, array) for name, array in arrays.items()):
        if begin != end:
            raise ValueError(f"the array {name!r} begins at byte {begin}, expected {end}")
        end = array_end
    if end != data_size:
        raise ValueError(f"its arrays take {end:,} bytes, there are {data_size:,}")


def _checked_range(name: str, array: object) -> tuple[int, int, str]:
    """Return where an array begins and ends, if its shape and type take exactly that many bytes."""
    if not isinstance(array, dict) or array.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the array {name!r} is not described as expected")
    shape = array["shape"]
    offsets = array["data_offsets"]
    if not (_are_counts(shape, MAX_AXES) and _are_counts(offsets, 2) and len(offsets) == 2):
        raise ValueError(f"shape or place of the array {name!r} are no counts")
    if not isinstance(array["dtype"], str) or array["dtype"] not in TYPES:
        raise ValueError(f"the array {name!r} is of an unknown type")
    begin, end = offsets
    if end - begin != math.prod(shape) * TYPES[array["dtype"]].itemsize:
        raise ValueError(f"the array {name!r} of shape {shortened(shape)} does not take {end - begin:,} bytes")
    return begin, end, name


def _are_counts(values: object, length: int) -> bool:
    """Whether it is a list, at most this long, of numbers that are no larger than a file can be."""
    if not isinstance(values, list) or len(values) > length:
        return False
    return all(type(value) is int and 0 <= value < COUNT_LIMIT for value in values)


def _parse_aliases(text: str, arrays: Arrays) -> dict[str, str]:
    aliases = json.loads(text)
    if not isinstance(aliases, dict):
        raise ValueError("the other names of its arrays are no JSON object")
    for name, stored in aliases.items():
        if name in arrays or not isinstance(stored, str) or stored not in arrays:
            raise ValueError(f"the array {name!r} is another name of an array that is not there")
    return aliases
