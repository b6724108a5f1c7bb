"""A safetensors file whose header and tensors are checked when they are first touched, whatever their arrays are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash

from dualform.errors import StoreDamagedError
from dualform.store.format import File, checksum

A = TypeVar("A", bound=Sized)
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CheckedFile(ABC, Generic[A]):
    """Arrays by name. Do not write to them."""

    _sums: dict[str, str]
    """By tensor: its checksum."""

    def __init__(self, path: Path, file: File):
        self.path = path
        with path.open("rb") as handle:
            length = handle.read(8)
            size = int.from_bytes(length, "little")
            self._header = length + (handle.read(size) if size <= file.size else b"")
        if checksum(self._header) != file.checksum:
            raise StoreDamagedError(f"{path} is damaged: the checksum of its header does not fit the manifest.")
        self._checked: dict[str, A] = {}

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def __iter__(self) -> Iterator[str]: ...

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
