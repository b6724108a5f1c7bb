"""A parameter, or its gradient, seen through a private random matrix R.

A product with R takes a small part of the time of the product that makes a gradient, and shows nearly every difference (Freivalds).
The recorder compares gradients and weights through it, and stores one number of each weight after each step; `verify` can so compare
weights of which there is no copy.
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
"""A tensor seen through R, (rows × columns of R,)."""

SLACK = 64.0
"""How many unit roundoffs, relative to the sum of absolute terms, pass as rounding."""

UNDERFLOW = 1e-30
"""A rest this small is no reason to doubt a gradient. Below 1e-38, float32 loses digits of an error signal, and soon all of them; keys, which may be
large, multiply what is lost."""

SMALL = 1e-15
LARGE = 1e15
"""A norm between them is right even if it was computed in float32: squares have neither vanished nor overflowed."""
EQUATIONS = 16
"""At least this many equations check a weight: R gets more columns if it has few outputs."""
SHORT = 64
"""Up to this many inputs, the entries of R are of different sizes, 1 in the mean square; else ±1. Few random signs may all be equal, and then rows
that sum to zero, as LayerNorm makes them, could not be seen."""


@dataclass(frozen=True, eq=False)
class Projection:
    """R and r of one parameter."""

    is_matrix: bool
    """False: a bias or an elementwise weight, which is compared as it is."""
    rows: int
    columns: int
    """Of R; 1 for a vector."""
    random: Tensor
    """R, (inputs, columns), entries of size 1 or about 1, column after column in memory, for fast products."""
    mixed: Projected
    """r, (rows × columns,): the number that is stored of a weight W is r · (W R)."""
    copies: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict)
    """R on other devices and in other types: copied once, not at each backward pass."""

    @staticmethod
    def of(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, vector: bool) -> Projection:
        """Always the same for a parameter of this name and shape in a recording with this seed. dtype: that of the parameter."""
        numel = math.prod(shape)
        rows = numel if vector else shape[0]
        inputs = 1 if vector else numel // max(rows, 1)
        # A generator of its own: the user's random numbers are not touched
        hashed = xxhash.xxh3_64_intdigest(name.encode())
        generator = torch.Generator().manual_seed(seed ^ hashed >> 2)
        random = random_columns(inputs, rows, wide_enough(dtype), generator)
        columns = 1 if vector else random.shape[1]
        normal = np.random.default_rng(generator.initial_seed())
        mixed = normal.standard_normal(rows * columns)
        return Projection(not vector, rows, columns, random, mixed)

    def project(self, tensor: Tensor) -> Projected:
        """Return a tensor like the parameter, or some of its rows, as seen through R. The product runs on the tensor's own device."""
        tensor = tensor.detach()
        tensor = tensor.to(wide_enough(tensor.dtype))
        if self.is_matrix:
            matrix = tensor if tensor.dim() == 2 else tensor.reshape(len(tensor), -1)
            tensor = matrix @ self.random_like(matrix)
        copied = tensor.cpu().to(torch.float64, copy=True)
        projected: Projected = copied.numpy().reshape(-1)
        return projected

    def random_like(self, tensor: Tensor) -> Tensor:
        """R in the type and place of a tensor."""
        if tensor.dtype is self.random.dtype and tensor.device == self.random.device:
            return self.random
        key = (tensor.device, tensor.dtype)
        if key not in self.copies:
            self.copies[key] = self.random.to(tensor.device, tensor.dtype)
        return self.copies[key]

    def fingerprint(self, projected: Projected) -> float:
        """One number that tells what was seen: r · (W R)."""
        with np.errstate(all="ignore"):  # what has diverged may overflow
            return float(self.mixed @ projected)


def wide_enough(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers of this type are multiplied and added up: 16-bit ones in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def norm_of_tensor(tensor: Tensor) -> float:
    """The Euclidean norm of a tensor of any size."""
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
    """R: (inputs, k), with enough columns for EQUATIONS equations, if there are as many inputs."""
    needed = math.ceil(EQUATIONS / max(outputs, 1))
    columns = max(1, min(inputs, needed))
    signs = 2 * torch.randint(0, 2, (inputs, columns), generator=generator) - 1
    if inputs > SHORT:
        return signs.to(dtype).T.contiguous().T
    squares = 0.5 + torch.rand(inputs, columns, generator=generator, dtype=torch.float64)
    return (signs * squares.sqrt()).to(dtype).T.contiguous().T
