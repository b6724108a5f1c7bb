"""How vectors are stored: as they are, or in float16 with a power of two per vector.

Unscaled, most error signals would fall below float16's normal range; scaled, each element keeps 11 significant bits
unless it is 2²⁹ times smaller than the largest of its vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TORCH = {"float32": torch.float32, "float16": torch.float16, "float64": torch.float64}
TOP = 15  # stored vectors have their largest element in [2¹⁴, 2¹⁵)
SMALLEST, LARGEST = -100, 128  # powers of two beyond these would themselves overflow in float32


@dataclass(frozen=True)
class Encoded:
    """Vectors (n, d) as stored; `exponents` (n,) int16 says by which power of two each was divided."""

    data: Tensor
    exponents: Tensor | None

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self.data.nbytes + (0 if self.exponents is None else self.exponents.nbytes)


def encode(vectors: Tensor, dtype: str) -> Encoded:
    """Copy vectors (n, d) into their stored form; the copy shares no memory with the original."""
    vectors = vectors.detach()
    if dtype != "float16":
        return Encoded(vectors.to("cpu", TORCH[dtype], copy=True, memory_format=torch.contiguous_format), None)
    if vectors.dtype not in (torch.float32, torch.float64):
        vectors = vectors.float()
    if vectors.numel() == 0:
        return Encoded(vectors.to("cpu", torch.float16), torch.zeros(len(vectors), dtype=torch.int16))
    largest = torch.linalg.vector_norm(vectors, ord=torch.inf, dim=1)
    if not bool(torch.isfinite(largest).all()):
        largest = vectors.abs().where(vectors.isfinite(), 0).amax(1)
    exponents = torch.frexp(largest).exponent.clamp_(SMALLEST, LARGEST).sub_(TOP)
    data = torch.mul(vectors, torch.exp2(-exponents.to(vectors.dtype)).unsqueeze(1)).to("cpu", torch.float16)
    return Encoded(data, exponents.to("cpu", torch.int16))


def decode(data: Tensor, exponents: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The vectors again, in a type that can be computed with."""
    if exponents is None:
        return data.to(dtype)
    return data.to(dtype).mul_(torch.exp2(exponents.to(dtype)).unsqueeze(1))
