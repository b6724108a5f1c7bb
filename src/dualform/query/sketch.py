"""Vectors as seen along a few directions, with the length of what is not seen: inner products without reading the vectors.

x = x_near + x_rest, so |x · y − x_near · y_near| ≤ ‖x_rest‖ · ‖y_rest‖. Keys of trained layers lie close to a few directions, so
16 numbers for each tell which few of them can be among the best at all. Nothing is approximate: those few are multiplied in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.native.picked import Picked

DIRECTIONS, FINE = 16, 128
"""So many directions; of a fine sketch, which is for what a first one cannot tell apart."""
SKETCH_BYTES, COMPACT_BYTES, FINE_BYTES = 96 << 20, 160 << 20, 104 << 20
"""A sketch may take so much memory. Vectors that do not fit are kept in bfloat16; very many are seen along fewer directions."""
MOST = SKETCH_BYTES // 8
"""Of more vectors than this, there is no sketch."""
SAMPLE = 2048
"""From so many vectors, evenly spread, the directions are found."""
STRETCH = 1 << 15
"""So many vectors are decoded at a time: they stay in the cache."""
ROUNDING = 1 / 64
"""A rest counts as at least this part of the vector: its square is more than a product of 4000 numbers is ever rounded by."""
COMPACT_ROUNDING = 1 / 16
"""The same where coordinates are kept in bfloat16, whose 8 bits are off by 2⁻⁸ / (1 + 2⁻⁸) at most: the square is just above."""
SMALLEST = 1e-15
"""No rest is shorter: squares of smaller numbers vanish in float32."""


class Glimpse(NamedTuple):
    """Some vectors as seen along m directions."""

    near: Tensor
    """(n, m): their coordinates."""
    rest: Tensor
    """(n,): at least the length of what is left, rounding included."""


@dataclass(frozen=True)
class Sketch:
    """n vectors (n, d), seen along m directions."""

    directions: Tensor
    """(d, m), orthonormal"""
    seen: Glimpse
    rounding: float

    @cached_property
    def lengths(self) -> Tensor:
        """(n,): at least those of the vectors."""
        return lengths(self.seen)

    @cached_property
    def picked(self) -> Picked:
        """Their coordinates, for who multiplies some of them."""
        return Picked([(self.seen.near, None)], self.seen.rest)

    def of(self, vectors: Tensor) -> Glimpse:
        """The same of other vectors."""
        return _seen(vectors, self.directions, self.rounding)


def sketch(
    count: int,
    dtype: torch.dtype,
    some: Callable[[Tensor, None], Tensor],
    pieces: Iterable[tuple[int, Tensor]],
    *,
    fine: bool = False,
) -> Sketch:
    """some: numbers (k,) → these vectors (k, d). pieces: the number of the first and vectors (k, d), until all were seen."""
    sample = some(torch.arange(0, count, max(1, count // SAMPLE)), None)
    compact = fine or count * (min(DIRECTIONS, sample.shape[1]) + 1) * dtype.itemsize > SKETCH_BYTES
    kept = torch.bfloat16 if compact else dtype
    room = FINE_BYTES if fine else COMPACT_BYTES if compact else SKETCH_BYTES
    fitting = (room // max(count, 1) - dtype.itemsize) // kept.itemsize
    m = max(1, min(FINE if fine else DIRECTIONS, sample.shape[1], fitting))
    m = m // 16 * 16 if m > 16 else m  # 64 directions take half as long as 63
    directions = _directions(sample, m)
    rounding = COMPACT_ROUNDING if compact else ROUNDING
    seen = Glimpse(torch.empty(count, directions.shape[1], dtype=kept), torch.empty(count, dtype=dtype))
    for first, vectors in pieces:
        for whole, part in zip(seen, _seen(vectors, directions, rounding), strict=True):
            whole[first : first + len(vectors)] = part
    return Sketch(directions, seen, rounding)


def lengths(seen: Glimpse) -> Tensor:
    """(n,): at least those of the vectors."""
    pieces = zip(torch.split(seen.near, STRETCH), torch.split(seen.rest, STRETCH), strict=True)
    found = [torch.hypot(torch.linalg.vector_norm(near.to(rest.dtype), dim=1), rest) for near, rest in pieces]
    return torch.cat(found)


def _seen(vectors: Tensor, directions: Tensor, rounding: float) -> Glimpse:
    near, squares = vectors @ directions, torch.linalg.vector_norm(vectors, dim=1).square()
    left = (squares - near.square().sum(1)).clamp(min=0) + squares * rounding**2
    return Glimpse(near, left.sqrt().clamp(min=SMALLEST))


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
