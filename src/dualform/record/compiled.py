"""The slots of ordinary calls in one compiled loop: what they add to the gradients as seen through R, and their copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.native.kernels import is_plain, kernels
from dualform.store.encoding import TORCH, Encoded, Pool

Sums = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(slots=True)
class Slots:
    """The slots of one call."""

    keys: Tensor
    """(n, d_in)."""
    errors: Tensor
    """(n, d_out)."""
    random: int
    """Where R (d_in, k) is in memory, column after column, …"""
    k: int
    """… and how many columns it has."""
    key_name: str
    """Where the memory of the copies comes from (see Pool)."""
    error_name: str | None
    """None: error signals are not kept."""


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


def take_all(calls: Sequence[Slots], dtype: str, pool: Pool) -> list[Taken | None]:
    """What there is to know of each call's slots, and their copies; None: they are to be taken in the plain way."""
    found: list[Taken | None] = [None] * len(calls)
    loops = kernels()
    if loops is None or dtype == "float64":
        return found
    kind, table, copies = TORCH[dtype], [], []
    for place, call in enumerate(calls):
        keys, errors = call.keys, call.errors
        if not (is_plain(keys) and is_plain(errors)):
            continue
        key_copy = pool.take(call.key_name, keys.shape, kind)
        error_copy = None if call.error_name is None else pool.take(call.error_name, errors.shape, kind)
        copies.append((place, key_copy, error_copy))
        table.append(
            (
                *(*keys.shape, errors.shape[1], call.k),
                *(keys.data_ptr(), errors.data_ptr(), call.random),
                *(*key_copy.places, *(error_copy.places if error_copy is not None else (0, 0)), 0),
            )
        )
    if not table:
        return found
    sizes = [((k + 1) * d_out, d_out) for _, _, d_out, k, *_ in table]
    threads = torch.get_num_threads()
    sums, given = np.empty((sum(size for size, _ in sizes) + 3 * len(table)) * threads), np.array(table, np.int64)
    loops.slots(len(table), given.ctypes.data, sums.ctypes.data, threads)
    end = 0
    for (place, key_copy, error_copy), (size, d_out) in zip(copies, sizes, strict=True):
        begin, end = end, end + size + 3
        error, projected, key = map(math.sqrt, sums[end - 3 : end].tolist())
        if math.isfinite(error):
            added = sums[begin : end - 3].reshape(-1, d_out)
            found[place] = Taken(added, error, projected, key, key_copy, error_copy)
        else:
            pool.give(key_copy)
            if error_copy is not None:
                pool.give(error_copy)
    return found
