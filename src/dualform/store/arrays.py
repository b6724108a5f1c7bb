"""A safetensors file, mapped into memory as NumPy arrays: for questions that need no PyTorch."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from dualform.errors import StoreDamagedError
from dualform.store.checked import Bytes, CheckedFile
from dualform.store.format import File
from dualform.store.safe import NAMES, Array

TYPES = {stored: np.dtype(name) for name, stored in NAMES.items()}


class ArrayFile(CheckedFile[Array]):
    """Its arrays. The library gives copies where NumPy is asked for, so it reads the header, and the map is ours.

    Python's maps hold a file descriptor each: for the few files of totals and snapshots, not for chunks.
    """

    def __init__(self, path: Path, file: File):
        super().__init__(path, file)
        try:
            with safe_open(path, "np") as known:
                self._sums = known.metadata() or {}
        except SafetensorError as error:
            raise StoreDamagedError(f"{path} is damaged: {error}.") from None
        self._found = json.loads(self._header[8:])
        self._found.pop("__metadata__", None)
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
        kind, shape = TYPES[self._found[name]["dtype"]], self.shape(name)
        begin = len(self._header) + self._found[name]["data_offsets"][0]
        return np.frombuffer(self._map, kind, math.prod(shape), begin).reshape(shape)

    @staticmethod
    def _bytes(array: Array) -> Bytes:
        return array.reshape(-1).view(np.uint8)
