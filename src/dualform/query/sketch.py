"""Vectors as seen along a few directions, with the length of what is not seen: inner products without reading the vectors.

x = x_near + x_rest, so |x · y − x_near · y_near| ≤ ‖x_rest‖ · ‖y_rest‖. Keys of trained layers lie close to a few directions, so
16 numbers for each tell which few of them can be among the best at all. Nothing is approximate: those few are multiplied in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

DIRECTIONS = 16
SKETCH_BYTES = 96 << 20
"""A sketch may take so much memory: very many vectors are seen along fewer directions."""
MOST = SKETCH_BYTES // 8
"""Of more vectors than this, there is no sketch."""
SAMPLE = 2048
"""From so many vectors, evenly spread, the directions are found."""
ROUNDING = 1 / 64
"""A rest counts as at least this part of the vector: its square is more than a product of 4000 numbers is ever rounded by."""
SMALLEST = 1e-15
"""No rest is shorter: squares of smaller numbers vanish in float32."""


@dataclass(frozen=True)
class Sketch:
    """n vectors (n, d), seen along m directions."""

    directions: Tensor
    """(d, m), orthonormal"""
    table: Tensor
    """(n, m + 1): their coordinates along these, and at least the length of what is left, rounding included."""

    @cached_property
    def lengths(self) -> Tensor:
        """(n,): at least those of the vectors."""
        return lengths(self.table)

    def of(self, vectors: Tensor) -> Tensor:
        """The same of other vectors."""
        return _seen(vectors, self.directions)


def sketch(
    count: int, dtype: torch.dtype, some: Callable[[Tensor, None], Tensor], pieces: Iterable[tuple[int, Tensor]]
) -> Sketch:
    """some: numbers (k,) → these vectors (k, d). pieces: the number of the first and vectors (k, d), until all were seen."""
    sample = some(torch.arange(0, count, max(1, count // SAMPLE)), None)
    m = min(DIRECTIONS, sample.shape[1], SKETCH_BYTES // (dtype.itemsize * max(count, 1)) - 1)
    directions = _directions(sample, max(1, m))
    table = torch.empty(count, directions.shape[1] + 1, dtype=dtype)
    for first, vectors in pieces:
        table[first : first + len(vectors)] = _seen(vectors, directions)
    return Sketch(directions, table)


def lengths(vectors: Tensor) -> Tensor:
    """(n, d) → (n,)."""
    found: Tensor = torch.linalg.vector_norm(vectors, dim=1)
    return found


def _seen(vectors: Tensor, directions: Tensor) -> Tensor:
    near, squares = vectors @ directions, lengths(vectors).square()
    left = (squares - near.square().sum(1)).clamp(min=0) + squares * ROUNDING**2
    return torch.cat([near, left.sqrt().clamp(min=SMALLEST).unsqueeze(1)], 1)


def _directions(vectors: Tensor, m: int) -> Tensor:
    """Orthonormal directions (d, m) that vectors (k, d) are close to: those of their largest singular values, roughly."""
    finite = vectors[vectors.isfinite().all(1)]
    found = torch.randn(vectors.shape[1], m, dtype=vectors.dtype, generator=torch.Generator().manual_seed(0))
    if len(finite):
        finite = finite / finite.abs().max().clamp(min=SMALLEST)
        for _ in range(3):
            found = finite.T @ (finite @ _orthonormal(found))
    return _orthonormal(found)


def _orthonormal(columns: Tensor) -> Tensor:
    found: Tensor = torch.linalg.qr(columns).Q
    return found
