"""Vectors along a few directions, with the length of the rest: bounds on inner products without reading the vectors.

x = x_near + x_rest, so |x · y − x_near · y_near| ≤ ‖x_rest‖ · ‖y_rest‖. Keys of trained layers lie close to a few directions, so that
16 to 64 numbers for each key tell which few of them can be among the best at all.
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
"""A sketch has the fewest of these directions that hold SHARE of the vectors' squared lengths; else the most."""
SHARE = 0.92
SKETCH_BYTES = 96 << 20
"""How much memory a sketch may take."""
COMPACT_BYTES = 160 << 20
"""The same for vectors that do not fit: their coordinates are kept in bfloat16. Very many are seen along fewer directions."""
MOST_VECTORS = SKETCH_BYTES // 8
"""Of more vectors, there is no sketch."""
SAMPLE = 2048
"""From this many vectors, evenly spread, the directions are found."""
STRETCH = 1 << 15
"""How many coordinates are decoded at a time: they stay in the processor's cache."""
ROUNDING = 1 / 64
"""A rest counts as at least this part of the vector: its square is more than the rounding of a product of 4000 numbers."""
COMPACT_ROUNDING = 1 / 16
"""The same for coordinates in bfloat16, whose 8 bits are off by at most 2⁻⁸ / (1 + 2⁻⁸): the square is just above."""
SMALLEST = 1e-15
"""No rest is shorter: squares of smaller numbers vanish in float32."""


class Sketched(NamedTuple):
    """Some vectors along m directions."""

    near: Tensor
    """(n, m): their coordinates."""
    rest: Tensor
    """(n,): at least the length of what is left, rounding included."""


@dataclass(frozen=True)
class Sketch:
    """n vectors (n, d) along m directions."""

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
        """The coordinates, for products with few queries."""
        return Picked([(self.vectors.near, None)])

    def of(self, vectors: Tensor) -> Sketched:
        """Return other vectors along the same directions."""
        return _sketched(vectors, self.directions, self.rounding)


def make_sketch(
    count: int, dtype: torch.dtype, read: Callable[[Tensor], Tensor], pieces: Iterable[tuple[int, Tensor]]
) -> Sketch:
    """Sketch `count` vectors. read: from numbers (k,) to vectors (k, d). pieces: all vectors, with the number of each piece's first."""
    sample = read(torch.arange(0, count, max(1, count // SAMPLE)))
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
    found = []
    near_parts = torch.split(sketched.near, STRETCH)
    rest_parts = torch.split(sketched.rest, STRETCH)
    for near, rest in zip(near_parts, rest_parts, strict=True):
        near_lengths = torch.linalg.vector_norm(near.to(rest.dtype), dim=1)
        found.append(torch.hypot(near_lengths, rest))
    return torch.cat(found)


def _sketched(vectors: Tensor, directions: Tensor, rounding: float) -> Sketched:
    near = vectors @ directions
    squares = torch.linalg.vector_norm(vectors, dim=1).square()
    rest = (squares - near.square().sum(1)).clamp(min=0) + squares * rounding**2
    return Sketched(near, rest.sqrt().clamp(min=SMALLEST))


def _directions(vectors: Tensor, m: int) -> Tensor:
    """Return orthonormal directions (d, m) that vectors (k, d) are close to: roughly those of their largest singular values,
    the largest first."""
    finite = vectors[vectors.isfinite().all(1)]
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(vectors.shape[1], m, dtype=vectors.dtype, generator=generator)
    if len(finite):
        finite = finite / finite.abs().max().clamp(min=SMALLEST)
        for _ in range(3):
            found = finite.T @ (finite @ _orthonormal(found))
    return _orthonormal(found)


def _enough_directions(vectors: Tensor, directions: Tensor) -> int:
    """Return how many of some directions, of which the first hold most, a sketch needs."""
    finite = vectors[vectors.isfinite().all(1)].double()
    held = (finite @ directions.double()).square().sum(0).cumsum(0)
    needed = SHARE * float(finite.square().sum())
    most = directions.shape[1]
    for count in DIRECTIONS:
        if count < most and float(held[count - 1]) >= needed:
            return count
    return most


def _orthonormal(columns: Tensor) -> Tensor:
    found: Tensor = torch.linalg.qr(columns).Q
    return found
