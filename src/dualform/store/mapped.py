"""A safetensors file, mapped into memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dualform.store.checked import Bytes, CheckedFile
from dualform.store.format import File
from dualform.store.pages import in_large_pages
from dualform.store.safe import NAMES

TYPES: dict[str, torch.dtype] = {stored: getattr(torch, name) for name, stored in NAMES.items()}


class TensorFile(CheckedFile[Tensor]):
    """Its tensors."""

    def __init__(self, path: Path, file: File, *, large_pages: bool = False):
        """large_pages: whether it is worth it to read much at a time (see store/pages.py)."""
        super().__init__(path, file)
        self._map = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
        if large_pages:
            in_large_pages(self._map.data_ptr(), self._map.nbytes())

    def _mapped(self, name: str) -> Tensor:
        begin, end = self._place(name)
        bytes_of_it = torch.asarray(self._map[begin:end], dtype=torch.uint8)
        return bytes_of_it.view(TYPES[self._found[name]["dtype"]]).reshape(self.shape(name))

    @staticmethod
    def _bytes(array: Tensor) -> Bytes:
        found: Bytes = array.reshape(-1).view(torch.uint8).numpy()
        return found
