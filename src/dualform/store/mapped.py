"""A safetensors file, mapped into memory."""

from __future__ import annotations

import os
from typing import BinaryIO

import torch
from torch import Tensor

from dualform.errors import StoreDamagedError, StoreError
from dualform.store.access import READ_AGAIN
from dualform.store.checked import Bytes, CheckedFile
from dualform.store.tensor_writer import NAMES

TYPES: dict[str, torch.dtype] = {stored: getattr(torch, name) for name, stored in NAMES.items()}


class TensorFile(CheckedFile[Tensor]):
    """Its tensors."""

    def _map_file(self, handle: BinaryIO, header: bytes) -> None:
        size = os.fstat(handle.fileno()).st_size
        try:
            self._map = torch.UntypedStorage.from_file(str(self.path), False, size)
        except RuntimeError as error:  # PyTorch opens it by its name: it may be gone, or be another one
            raise StoreError(f"{self.path} cannot be mapped into memory: {error}.{READ_AGAIN}") from None
        # The header has the checksums of all tensors: if it is the same, it does not matter which file it was read from
        mapped = torch.asarray(self._map[: len(header)], dtype=torch.uint8)
        if mapped.numpy().tobytes() != header:
            raise StoreDamagedError(f"{self.path} was replaced while it was being opened.")

    def _mapped(self, name: str) -> Tensor:
        begin, end = self._place(name)
        bytes_of_it = torch.asarray(self._map[begin:end], dtype=torch.uint8)
        return bytes_of_it.view(TYPES[self._found[name]["dtype"]]).reshape(self.shape(name))

    @staticmethod
    def _bytes(array: Tensor) -> Bytes:
        found: Bytes = array.reshape(-1).view(torch.uint8).numpy()
        return found
