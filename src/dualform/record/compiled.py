"""The slots of an ordinary call in one compiled loop: what they add to the gradients as seen through R, and their copies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.native.kernels import is_plain, kernels
from dualform.store.encoding import TORCH, Encoded, Pool

Sums = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(slots=True)
class Taken:
    """What the loop has found."""

    added: Sums
    """(k + 1, d_out): Σ (key · R) ⊗ error, and Σ error."""
    error_norm: float
    projected_norm: float
    """Of keys @ R."""
    key_norm: float
    keys: Encoded
    errors: Encoded | None


def take(
    keys: Tensor, errors: Tensor, random: Tensor, dtype: str, pool: Pool, names: tuple[str, str | None]
) -> Taken | None:
    """Keys (n, d_in), error signals (n, d_out), R (d_in, k); None: they are to be taken in the plain way.

    names: where the memory of the copies comes from (see Pool); None: error signals are not kept.
    """
    loops, columns = kernels(), random.T
    if loops is None or dtype == "float64" or not (is_plain(keys) and is_plain(errors) and is_plain(columns)):
        return None
    (count, d_in), (k, d_out) = keys.shape, (columns.shape[0], errors.shape[1])
    size, threads = (k + 1) * d_out + 3, torch.get_num_threads()
    sums = torch.empty(size * threads, dtype=torch.float64)
    exponents = torch.empty(2, count, dtype=torch.int16).unbind() if dtype == "float16" else (None, None)
    copies = [
        Encoded(room, exponent, slab, first)
        for one, name, exponent in zip((keys, errors), names, exponents, strict=True)
        if name is not None
        for room, slab, first in (pool.take(name, one.shape, TORCH[dtype]),)
    ]
    places = [place for copy in copies for place in _places(copy)]
    failed = loops.slots(
        *(count, d_in, d_out, k),
        *(keys.data_ptr(), errors.data_ptr(), columns.data_ptr()),
        *(places if len(places) == 4 else [*places, None, None]),
        *(sums.data_ptr(), threads),
    )
    if failed:
        for copy in copies:
            pool.give(copy)
        return None
    found = sums.numpy()
    error_norm, projected_norm, key_norm = map(math.sqrt, found[size - 3 : size].tolist())
    added = found[: size - 3].reshape(k + 1, d_out)
    return Taken(added, error_norm, projected_norm, key_norm, copies[0], copies[1] if len(copies) > 1 else None)


def _places(copy: Encoded) -> tuple[int, int | None]:
    return copy.data.data_ptr(), None if copy.exponents is None else copy.exponents.data_ptr()
