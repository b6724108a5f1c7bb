"""A safetensors file whose header and tensors are checked when they are first touched, whatever their arrays are."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import numpy as np
import xxhash

from dualform.errors import StoreDamagedError
from dualform.store.access import open_regular, reading
from dualform.store.format import MOST, File, checksum
from dualform.store.labels import DIRECTORY, LABEL
from dualform.store.tensor_writer import NAMES, directory

A = TypeVar("A", bound=Sized)
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
AXES = 32
"""Axes of an array, at most."""
ITEM_SIZES = {stored: np.dtype(name).itemsize for name, stored in NAMES.items()}


class CheckedFile(ABC, Generic[A]):
    """Arrays by name. Do not write to them.

    Header and data come from one opened file: between two openings it could be replaced (a resumed run). The library would open it by
    its name once more, and its arrays are copies, so the header is read here and the map is ours.
    """

    def __init__(self, path: Path, file: File):
        self.path = path
        with reading(path), open_regular(path) as handle:
            self._read(handle, file)

    def _read(self, handle: BinaryIO, file: File) -> None:
        header = _header(self.path, handle, file)
        self._begin = len(header)
        self._found, self._sums = _parsed(self.path, header, file)
        self.label = self._sums.pop(LABEL, None)
        """Which run it belongs to, and where in it (store/labels.py); None: it does not say."""
        self._checked: dict[str, A] = {}
        self._map_file(handle, header)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._found))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an array, as the header has it."""
        return tuple(self._found[name]["shape"])

    def dtype(self, name: str) -> str:
        """Of an array, by the library's name for it."""
        return str(self._found[name]["dtype"])

    def _place(self, name: str) -> tuple[int, int]:
        """Where an array begins in the file, and where it ends."""
        begin, end = self._found[name]["data_offsets"]
        return self._begin + begin, self._begin + end

    @abstractmethod
    def _map_file(self, handle: BinaryIO, header: bytes) -> None:
        """Map the file into memory."""

    @abstractmethod
    def _mapped(self, name: str) -> A:
        """An array, not yet checked: pages are read as they are used."""

    @staticmethod
    @abstractmethod
    def _bytes(array: A) -> Bytes:
        """Its bytes, where they are."""

    def __getitem__(self, name: str) -> A:
        """An array, mapped: pages are read as they are used."""
        if name not in self._checked:
            array = self._unchecked(name)
            self._compare(name, checksum(self._bytes(array)))
            self._checked[name] = array
        return self._checked[name]

    def stretches(self, name: str, rows: int) -> Iterator[tuple[int, A]]:
        """An array in stretches of so many rows, with the number of each one's first row.

        The checksum is taken as they pass, by a thread of its own, so that an array larger than memory is read once: damage is
        raised in the place of the last stretch.
        """
        if name in self._checked:
            yield from _cut(self._checked[name], rows)
            return
        array, total = self._unchecked(name), xxhash.xxh3_64()
        with ThreadPoolExecutor(1) as beside:
            sums: list[Future[None]] = []
            for low, some in _cut(array, rows):
                sums.append(beside.submit(total.update, self._bytes(some).data))
                if low + rows >= len(array):
                    for one in sums:
                        one.result()
                    self._compare(name, total.hexdigest())
                    self._checked[name] = array
                yield low, some

    def _unchecked(self, name: str) -> A:
        if name not in self:
            raise StoreDamagedError(f"{self.path} is damaged: it has no tensor {name!r}.")
        return self._mapped(name)

    def _compare(self, name: str, found: str) -> None:
        if found != self._sums.get(name):
            raise StoreDamagedError(f"{self.path} is damaged: the checksum of {name!r} does not fit.")


def _cut(array: Any, rows: int) -> Iterator[tuple[int, Any]]:
    for low in range(0, max(1, len(array)), rows):
        yield low, array[low : low + rows]


def read_label(path: Path, file: File) -> str | None:
    """The label of a file, from its header alone."""
    with reading(path), open_regular(path) as handle:
        header = _header(path, handle, file)
    _, metadata = _parsed(path, header, file)
    return metadata.get(LABEL)


def _header(path: Path, handle: BinaryIO, file: File) -> bytes:
    """The header of a file, with its length before it, as the manifest knows it."""
    found = os.fstat(handle.fileno()).st_size
    if found != file.size:
        raise StoreDamagedError(f"{path} is damaged: it has {found:,} bytes, the manifest says {file.size:,}.")
    if hasattr(os, "posix_fadvise"):  # else the system reads on behind it, in small pages
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    length = handle.read(8)
    size = int.from_bytes(length, "little")
    header = length + (handle.read(size) if size <= file.size else b"")
    if checksum(header) != file.checksum:
        raise StoreDamagedError(f"{path} is damaged: the checksum of its header does not fit the manifest.")
    return header


def _parsed(path: Path, header: bytes, file: File) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What a header says: the arrays, and its metadata."""
    try:
        return _arrays(header[8:], file.size - len(header))
    except (ValueError, RecursionError) as error:
        raise StoreDamagedError(f"{path} is damaged: {error}.") from None


def _arrays(text: bytes, data_size: int) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The same. Raises ValueError if it does not fit data of this size."""
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the metadata of its header are not texts")
    places = sorted(_place_of(name, array) for name, array in header.items())
    end = 0
    for begin, after, name in places:
        if begin != end:
            raise ValueError(f"the array {name!r} begins at byte {begin}, expected {end}")
        end = after
    if end != data_size:
        raise ValueError(f"its arrays take {end:,} bytes, there are {data_size:,}")
    if metadata.pop(DIRECTORY, None) != directory(header):
        raise ValueError("its arrays are not those that were written")
    return header, metadata


def _place_of(name: str, array: object) -> tuple[int, int, str]:
    """Where an array begins and ends, if its shape and type take just as many bytes."""
    if not isinstance(array, dict) or array.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the array {name!r} is not described as expected")
    shape, offsets = array["shape"], array["data_offsets"]
    if not (_are_counts(shape, AXES) and _are_counts(offsets, 2) and len(offsets) == 2):
        raise ValueError(f"shape or place of the array {name!r} are no counts")
    if not isinstance(array["dtype"], str) or array["dtype"] not in ITEM_SIZES:
        raise ValueError(f"the array {name!r} is of an unknown type")
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_SIZES[array["dtype"]]:
        raise ValueError(f"the array {name!r} of shape {_short(shape)} does not take {end - begin:,} bytes")
    return begin, end, name


def _are_counts(values: object, length: int) -> bool:
    """Whether it is a list, at most so long, of numbers that are no larger than a file can be."""
    if not isinstance(values, list) or len(values) > length:
        return False
    return all(type(value) is int and 0 <= value < MOST for value in values)


def _short(shape: list[int]) -> str:
    text = str(shape)
    return text if len(text) <= 60 else f"{text[:60]}…"
