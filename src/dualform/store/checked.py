"""A safetensors file whose header and tensors are checked when they are first touched, whatever their arrays are."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from dualform.errors import StoreDamagedError
from dualform.store.format import File, checksum

A = TypeVar("A", bound=Sized)
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CheckedFile(ABC, Generic[A]):
    """Arrays by name. Do not write to them.

    The library checks the header. Its arrays are copies, or are touched before anybody could say how they are to be mapped: the map is ours.
    """

    def __init__(self, path: Path, file: File):
        self.path = path
        with path.open("rb", buffering=0) as handle:
            if hasattr(os, "posix_fadvise"):  # else the system reads on behind it, in small pages
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            length = handle.read(8)
            size = int.from_bytes(length, "little")
            header = length + (handle.read(size) if size <= file.size else b"")
        if checksum(header) != file.checksum:
            raise StoreDamagedError(f"{path} is damaged: the checksum of its header does not fit the manifest.")
        try:
            with safe_open(path, "np") as known:
                self._sums: dict[str, str] = known.metadata() or {}
        except SafetensorError as error:
            raise StoreDamagedError(f"{path} is damaged: {error}.") from None
        self._found: dict[str, dict[str, Any]] = json.loads(header[8:])
        self._found.pop("__metadata__", None)
        self._begin = len(header)
        self._checked: dict[str, A] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._found))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an array, as the header has it."""
        return tuple(self._found[name]["shape"])

    def _place(self, name: str) -> tuple[int, int]:
        """Where an array begins in the file, and where it ends."""
        begin, end = self._found[name]["data_offsets"]
        return self._begin + begin, self._begin + end

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
