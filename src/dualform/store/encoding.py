"""How vectors are stored: as they are, or in float16 with a power of two per vector.

Unscaled, most error signals would fall below float16's normal range; scaled, each element keeps 11 significant bits
unless it is 2²⁹ times smaller than the norm of its vector.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

TORCH = {"float32": torch.float32, "float16": torch.float16, "float64": torch.float64}
TOP = 15  # stored vectors have norms in [2¹⁴, 2¹⁵): no element can overflow
SMALLEST, LARGEST = -100, 127  # powers of two beyond these would themselves overflow in float32


@dataclass(frozen=True)
class Encoded:
    """Vectors (n, d) as stored; `exponents` (n,) int16 says by which power of two each was divided."""

    data: Tensor
    exponents: Tensor | None

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self.data.nbytes + (0 if self.exponents is None else self.exponents.nbytes)

    def take(self, places: np.ndarray[Any, np.dtype[np.int64]]) -> Encoded:
        """Some of the vectors, copied."""
        which = torch.from_numpy(places)
        return Encoded(self.data[which], None if self.exponents is None else self.exponents[which])


class Pool:
    """Memory that goes round between recorder and writer: fresh pages cost more than the copy into them."""

    def __init__(self, most_bytes: int = 256 << 20):
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self._most, self._bytes = most_bytes, 0
        self._lock = threading.Lock()

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor with any content."""
        with self._lock:
            free = self._free[shape, dtype]
            if free:
                tensor = free.pop()
                self._bytes -= tensor.nbytes
                return tensor
        return torch.empty(shape, dtype=dtype)

    def give(self, tensor: Tensor) -> None:
        """Take back a tensor that nobody looks at any more."""
        with self._lock:
            if self._bytes + tensor.nbytes <= self._most:
                self._free[tensor.shape, tensor.dtype].append(tensor)
                self._bytes += tensor.nbytes


Norms = np.ndarray[Any, np.dtype[np.floating[Any]]]


def encode(vectors: Tensor, dtype: str, pool: Pool | None = None, norms: Norms | None = None) -> Encoded:
    """Copy vectors (n, d) into their stored form; the copy shares no memory with the original.

    norms: the vectors' Euclidean norms (n,), if they are known already.
    """
    vectors = vectors.detach().cpu()
    data = (pool or Pool(0)).take(vectors.shape, TORCH[dtype])
    if dtype != "float16":
        return Encoded(data.copy_(vectors), None)
    if not vectors.numel():
        return Encoded(data, torch.zeros(len(vectors), dtype=torch.int16))
    if vectors.dtype not in (torch.float32, torch.float64):
        vectors = vectors.float()
    # A norm is as good a bound as the largest element, and one pass over the data instead of two
    bounds = torch.linalg.vector_norm(vectors, dim=1).numpy() if norms is None else norms
    if not (bounds.min() > 1e-15 and bounds.max() < 1e15):  # squares might leave float32, or something is not finite
        largest = vectors.abs().where(vectors.isfinite(), 0).amax(1).numpy()
        bounds = np.clip(largest, np.ldexp(1.0, SMALLEST), np.ldexp(1.0, LARGEST))
    # The exponent is in the bits of a float32, and a power of two is nothing but its exponent
    exponents = (bounds.astype(np.float32, copy=False).view(np.int32) >> 23) - (126 + TOP)
    scale = torch.from_numpy(((127 - exponents) << 23).view(np.float32))
    torch.mul(vectors, scale.unsqueeze(1), out=data)
    return Encoded(data, torch.from_numpy(exponents.astype(np.int16)))


def decode(data: Tensor, exponents: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The vectors again, in a type that can be computed with."""
    if exponents is None:
        return data.to(dtype)
    return data.to(dtype).mul_(torch.exp2(exponents.to(dtype)).unsqueeze(1))
