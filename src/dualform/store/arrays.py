"""A safetensors file, mapped into memory as NumPy arrays: for questions that need no PyTorch."""

from __future__ import annotations

import math
import mmap
from typing import BinaryIO

import numpy as np

from dualform.store.checked import Bytes, CheckedFile
from dualform.store.tensor_writer import NAMES, Array

TYPES = {stored: np.dtype(name) for name, stored in NAMES.items()}


class ArrayFile(CheckedFile[Array]):
    """Its arrays. Python's maps hold a file descriptor each: for the few files of totals and snapshots, not for chunks."""

    def _map_file(self, handle: BinaryIO, header: bytes) -> None:
        self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)

    def _mapped(self, name: str) -> Array:
        kind, shape = TYPES[self._found[name]["dtype"]], self.shape(name)
        return np.frombuffer(self._map, kind, math.prod(shape), self._place(name)[0]).reshape(shape)

    @staticmethod
    def _bytes(array: Array) -> Bytes:
        return array.reshape(-1).view(np.uint8)
