"""Sketches: the coordinates of vectors along a few directions, and the length of what is left. They bound inner products.

x = x_near + x_rest, so |x · y − x_near · y_near| ≤ ‖x_rest‖ · ‖y_rest‖. Keys of trained layers lie close to a few directions, so that
16 to 64 numbers per key are enough to rule most keys out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.native.picked import Picked

DIRECTIONS = (16, 32, 64)
"""A sketch has the smallest of these numbers of directions that hold SHARE of the vectors' squared lengths, or else the largest."""
SHARE = 0.92
SKETCH_BYTES = 96 << 20
"""How much memory a sketch may take."""
COMPACT_BYTES = 160 << 20
"""The same for vectors that do not fit: their coordinates are kept in bfloat16, and with very many vectors along fewer directions."""
MOST_VECTORS = SKETCH_BYTES // 8
"""More vectors have no sketch."""
SAMPLE = 1024
"""The directions are computed from this many vectors, spread evenly."""
STRETCH = 1 << 15
"""How many coordinates are decoded at a time, so that they stay in the processor's cache."""
ROUNDING = 1 / 64
"""A rest counts as at least this fraction of its vector, whose square exceeds the rounding error of a product of 4000 numbers."""
COMPACT_ROUNDING = 1 / 16
"""The same for coordinates in bfloat16, which are off by at most 2⁻⁸ / (1 + 2⁻⁸). The square of this is just above that."""
SMALLEST = 1e-15
"""No rest is shorter, since squares of smaller numbers underflow in float32."""


class Sketched(NamedTuple):
    """The sketch of some vectors: their coordinates along m directions."""

    near: Tensor
    """(n, m): their coordinates."""
    rest: Tensor
    """(n,): at least the length of what is left, including rounding."""


@dataclass(frozen=True)
class Sketch:
    """The sketch of all n vectors (n, d), with the directions."""

    directions: Tensor
    """(d, m), orthonormal"""
    vectors: Sketched
    rounding: float

    @cached_property
    def lengths(self) -> Tensor:
        """(n,): at least the length of each vector."""
        return lengths(self.vectors)

    @cached_property
    def table(self) -> Picked:
        """The coordinates as a table for the loop in C."""
        return Picked([(self.vectors.near, None)])

    def of(self, vectors: Tensor) -> Sketched:
        """Return the sketch of other vectors along the same directions."""
        return _sketched(vectors, self.directions, self.rounding)


def make_sketch(
    count: int, dtype: torch.dtype, read: Callable[[Tensor], Tensor], pieces: Iterable[tuple[int, Tensor]]
) -> Sketch:
    """Sketch `count` vectors. read: from numbers (k,) to vectors (k, d). pieces: all vectors, with the number of each piece's first."""
    sample = _finite(read(torch.arange(0, count, max(1, count // SAMPLE))))
    directions = _directions(sample, min(DIRECTIONS[-1], sample.shape[1]))
    wanted = _enough_directions(sample, directions)
    is_compact = count * (wanted + 1) * dtype.itemsize > SKETCH_BYTES
    kept_dtype = torch.bfloat16 if is_compact else dtype
    memory = COMPACT_BYTES if is_compact else SKETCH_BYTES
    fitting = (memory // max(count, 1) - dtype.itemsize) // kept_dtype.itemsize
    directions = directions[:, : max(1, min(wanted, fitting))].contiguous()
    rounding = COMPACT_ROUNDING if is_compact else ROUNDING
    near = torch.empty(count, directions.shape[1], dtype=kept_dtype)
    rest = torch.empty(count, dtype=dtype)
    for first, vectors in pieces:
        here = slice(first, first + len(vectors))
        near[here], rest[here] = _sketched(vectors, directions, rounding)
    return Sketch(directions, Sketched(near, rest), rounding)


def lengths(sketched: Sketched) -> Tensor:
    """Return at least the length of each vector, (n,)."""
    pieces = []
    near_parts = torch.split(sketched.near, STRETCH)
    rest_parts = torch.split(sketched.rest, STRETCH)
    for near, rest in zip(near_parts, rest_parts, strict=True):
        near_lengths = torch.linalg.vector_norm(near.to(rest.dtype), dim=1)
        pieces.append(torch.hypot(near_lengths, rest))
    return torch.cat(pieces)


def _sketched(vectors: Tensor, directions: Tensor, rounding: float) -> Sketched:
    near = vectors @ directions
    squares = torch.linalg.vector_norm(vectors, dim=1).square()
    rest = (squares - near.square().sum(1)).clamp(min=0) + squares * rounding**2
    return Sketched(near, rest.sqrt().clamp(min=SMALLEST))


def _finite(vectors: Tensor) -> Tensor:
    """Return those vectors that are finite, scaled together such that no square overflows."""
    finite = vectors[vectors.isfinite().all(1)]
    if not len(finite):
        return finite
    return finite / finite.abs().max().clamp(min=SMALLEST)


def _directions(vectors: Tensor, m: int) -> Tensor:
    """Return orthonormal directions (d, m) that vectors (k, d) are close to: roughly those of their largest singular values,
    the largest first."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(vectors.shape[1], m, dtype=vectors.dtype, generator=generator)
    if len(vectors):
        for _ in range(3):
            directions = vectors.T @ (vectors @ _orthonormal(directions))
    return _orthonormal(directions)


def _enough_directions(vectors: Tensor, directions: Tensor) -> int:
    """Return how many of some directions, sorted by importance, a sketch needs."""
    held = (vectors @ directions).square().sum(0).cumsum(0)
    needed = SHARE * float(vectors.square().sum())
    most = directions.shape[1]
    for count in DIRECTIONS:
        if count < most and float(held[count - 1]) >= needed:
            return count
    return most


def _orthonormal(columns: Tensor) -> Tensor:
    orthonormal: Tensor = torch.linalg.qr(columns).Q
    return orthonormal
