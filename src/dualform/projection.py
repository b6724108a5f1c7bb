"""Projections of a parameter, or of its gradient, with a private random matrix R.

A product with R is much cheaper than computing a gradient, and shows nearly every difference (Freivalds' algorithm). The recorder
compares the projections of gradients, and stores one number of each weight after each step, so that `verify` can check weights of which
there is no copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
import xxhash
from torch import Tensor

from dualform.arrays import Floats

Projected = Floats
"""A tensor times R, (rows × columns of R,)."""

SLACK = 64.0
"""How many unit roundoffs, relative to the sum of absolute terms, pass as rounding."""

UNDERFLOW = 1e-30
"""A difference this small is never an error. Below 1e-38, float32 loses the digits of an error signal, and keys, which may be large,
multiply the loss."""

SMALL = 1e-15
LARGE = 1e15
"""A norm between them is right even if computed in float32: squares neither underflowed nor overflowed."""
EQUATIONS = 16
"""At least this many equations check a weight. R has more columns if there are few outputs."""
SHORT = 64
"""Up to this many inputs, the entries of R have different sizes, with a mean square of 1; beyond, they are ±1. A few random signs may all be
equal, and would then miss rows that sum to zero, such as those of LayerNorm."""


@dataclass(frozen=True, eq=False)
class Projection:
    """R and r of one parameter."""

    is_matrix: bool
    """False: a bias or an elementwise weight, which is compared without R."""
    rows: int
    columns: int
    """Of R; 1 for a vector."""
    random: Tensor
    """R, (inputs, columns), in column-major order for fast products. Its entries have sizes of about 1."""
    mixed: Projected
    """r, (rows × columns,). The number stored of a weight W is r · (W R)."""
    copies: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict)
    """Copies of R on other devices and in other types."""

    @staticmethod
    def of(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, vector: bool) -> Projection:
        """Return the projection of a parameter, which depends only on its name, shape, dtype and the seed of the recording."""
        numel = math.prod(shape)
        rows = numel if vector else shape[0]
        inputs = 1 if vector else numel // max(rows, 1)
        # A generator of its own, so that the user's random numbers do not change
        hashed = xxhash.xxh3_64_intdigest(name.encode())
        generator = torch.Generator().manual_seed(seed ^ hashed >> 2)
        random = random_columns(inputs, rows, wide_enough(dtype), generator)
        columns = 1 if vector else random.shape[1]
        normal = np.random.default_rng(generator.initial_seed())
        mixed = normal.standard_normal(rows * columns)
        return Projection(not vector, rows, columns, random, mixed)

    def project(self, tensor: Tensor) -> Projected:
        """Return tensor @ R, for a tensor like the parameter or some of its rows. The product runs on the tensor's device."""
        tensor = tensor.detach()
        tensor = tensor.to(wide_enough(tensor.dtype))
        if self.is_matrix:
            matrix = tensor if tensor.dim() == 2 else tensor.reshape(len(tensor), -1)
            tensor = matrix @ self.random_like(matrix)
        projected: Projected = tensor.cpu().numpy().astype(np.float64)  # a copy, also of what is float64 already
        return projected.reshape(-1)

    def random_like(self, tensor: Tensor) -> Tensor:
        """Return R in the type and on the device of a tensor."""
        if tensor.dtype is self.random.dtype and tensor.device == self.random.device:
            return self.random
        key = (tensor.device, tensor.dtype)
        if key not in self.copies:
            self.copies[key] = self.random.to(tensor.device, tensor.dtype)
        return self.copies[key]

    def fingerprint(self, projected: Projected) -> float:
        """Return one number for a projected tensor: r · (W R)."""
        with np.errstate(all="ignore"):  # what has diverged may overflow
            return float(self.mixed @ projected)


def wide_enough(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which to multiply and add numbers of this type: float32 for 16-bit types."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def norm_of_tensor(tensor: Tensor) -> float:
    """Return the Euclidean norm of a tensor, however small or large its numbers are."""
    norm = float(torch.linalg.vector_norm(tensor, dtype=wide_enough(tensor.dtype)))
    if SMALL < norm < LARGE:
        return norm
    wide = tensor if has_float64(tensor.device.type) else tensor.cpu()
    return float(torch.linalg.vector_norm(wide, dtype=torch.float64))


@cache
def has_float64(device: str) -> bool:
    """Return whether a type of device computes with 64 bits: MPS does not."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def random_columns(inputs: int, outputs: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return R, (inputs, k), with enough columns for EQUATIONS equations, or as many columns as inputs."""
    needed = math.ceil(EQUATIONS / max(outputs, 1))
    columns = max(1, min(inputs, needed))
    signs = 2 * torch.randint(0, 2, (inputs, columns), generator=generator) - 1
    if inputs > SHORT:
        return signs.to(dtype).T.contiguous().T
    squares = 0.5 + torch.rand(inputs, columns, generator=generator, dtype=torch.float64)
    return (signs * squares.sqrt()).to(dtype).T.contiguous().T
