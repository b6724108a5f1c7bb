"""A safetensors file, mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualform.errors import StoreDamagedError
from dualform.store.checked import Bytes, CheckedFile
from dualform.store.format import File
from dualform.store.heap import in_large_pages


class TensorFile(CheckedFile[Tensor]):
    """Its tensors."""

    def __init__(self, path: Path, file: File, *, large_pages: bool = False):
        """large_pages: see store/heap.py."""
        super().__init__(path, file)
        self._large_pages = large_pages
        try:
            self._file = safe_open(path, "pt")
            self._sums = self._file.metadata() or {}  # type: ignore[no-untyped-call]
            self._names = set(self._file.keys())  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise StoreDamagedError(f"{path} is damaged: {error}.") from None

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def _mapped(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        if self._large_pages:
            in_large_pages(tensor)
        return tensor

    @staticmethod
    def _bytes(array: Tensor) -> Bytes:
        found: Bytes = array.reshape(-1).view(torch.uint8).numpy()
        return found
