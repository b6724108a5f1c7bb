"""A safetensors file, mapped into memory as NumPy arrays: for questions that need no PyTorch."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dualform.errors import StoreDamagedError
from dualform.store.checked import Bytes, CheckedFile
from dualform.store.format import File
from dualform.store.safe import NAMES, Array

TYPES = {stored: np.dtype(name) for name, stored in NAMES.items()}


class ArrayFile(CheckedFile[Array]):
    """Its arrays. The library gives NumPy copies, so they are found by the header, whose checksum has been compared by then.

    Python's maps hold a file descriptor each: for the few files of totals and snapshots, not for chunks.
    """

    def __init__(self, path: Path, file: File):
        super().__init__(path, file)
        try:
            header: dict[str, Any] = json.loads(self._header[8:])
        except ValueError as error:
            raise StoreDamagedError(f"{path} is damaged: {error}.") from None
        self._sums = header.pop("__metadata__", {})
        self._found = header
        with path.open("rb") as handle:
            self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._found))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an array, as the header has it."""
        return tuple(self._found[name]["shape"])

    def _mapped(self, name: str) -> Array:
        try:
            about = self._found[name]
            shape, begin = self.shape(name), len(self._header) + about["data_offsets"][0]
            return np.frombuffer(self._map, TYPES[about["dtype"]], math.prod(shape), begin).reshape(shape)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreDamagedError(
                f"{self.path} is damaged: {name!r} is not where its header says ({error!r})."
            ) from None

    @staticmethod
    def _bytes(array: Array) -> Bytes:
        return array.reshape(-1).view(np.uint8)
