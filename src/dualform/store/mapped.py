"""A safetensors file, mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualform.errors import StoreDamagedError
from dualform.store.format import File, checksum


class TensorFile:
    """A safetensors file, mapped into memory; header and tensors are checked when they are first touched."""

    def __init__(self, path: Path, file: File):
        self.path = path
        with path.open("rb") as handle:
            length = handle.read(8)
            size = int.from_bytes(length, "little")
            header = length + (handle.read(size) if size <= file.size else b"")
        if checksum(header) != file.checksum:
            raise StoreDamagedError(f"{path} is damaged: the checksum of its header does not fit the manifest.")
        try:
            self._file = safe_open(path, "pt")
            self._sums: dict[str, str] = self._file.metadata() or {}  # type: ignore[no-untyped-call]
            self._names = set(self._file.keys())  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise StoreDamagedError(f"{path} is damaged: {error}.") from None
        self._checked: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __getitem__(self, name: str) -> Tensor:
        """A tensor, mapped: pages are read as they are used. Do not write to it."""
        if name not in self._checked:
            tensor = self._unchecked(name)
            self._compare(name, checksum(_bytes(tensor)))
            self._checked[name] = tensor
        return self._checked[name]

    def stretches(self, name: str, rows: int) -> Iterator[tuple[int, Tensor]]:
        """A tensor in stretches of so many rows, with the number of each one's first row.

        The checksum is taken as they pass, so that a tensor larger than memory is read once: damage is raised in the place of
        the last stretch.
        """
        tensor = self._checked.get(name)
        total = xxhash.xxh3_64() if tensor is None else None
        tensor = self._unchecked(name) if tensor is None else tensor
        for low in range(0, max(1, len(tensor)), rows):
            some = tensor[low : low + rows]
            if total is not None:
                total.update(_bytes(some).data)
                if low + rows >= len(tensor):
                    self._compare(name, total.hexdigest())
                    self._checked[name] = tensor
            yield low, some

    def _unchecked(self, name: str) -> Tensor:
        if name not in self._names:
            raise StoreDamagedError(f"{self.path} is damaged: it has no tensor {name!r}.")
        tensor: Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def _compare(self, name: str, found: str) -> None:
        if found != self._sums.get(name):
            raise StoreDamagedError(f"{self.path} is damaged: the checksum of {name!r} does not fit.")


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    found: np.ndarray[Any, np.dtype[np.uint8]] = tensor.reshape(-1).view(torch.uint8).numpy()
    return found
