"""The slots of ordinary calls in one compiled loop: what they add to the gradients as seen through R, and their copies."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.native.arena import Arena
from dualform.native.kernels import is_plain, kernels
from dualform.store.encoding import TORCH, Encoded, Pool

Sums = np.ndarray[Any, np.dtype[np.float64]]
NOWHERE = (0, 0, 0)


@dataclass(frozen=True)
class Taking:
    """How the slots of a layer are taken."""

    random: int
    """Where R (d_in, k) is in memory, column after column, …"""
    k: int
    """… and how many columns it has."""
    key_name: str
    """Where the memory of the copies comes from (see Pool)."""
    error_name: str | None
    """None: error signals are not kept."""


@dataclass(slots=True)
class Slots:
    """The slots of one call, and what the loop has found."""

    keys: Tensor
    """(n, d_in)."""
    errors: Tensor
    """(n, d_out)."""
    how: Taking
    named: bool = False
    """Whether its keys get names, by which equal ones are found."""
    taken: bool = False
    """Whether there is anything of the following; else they are to be taken in the plain way."""
    added: Sums = field(init=False)
    """(k + 1, d_out): Σ (key · R) ⊗ error, and Σ error; …"""
    at: int = 0
    """… where it begins in memory."""
    error_norm: float = 0.0
    projected_norm: float = 0.0
    """Of keys @ R."""
    key_norm: float = 0.0
    key_copy: Encoded | None = None
    error_copy: Encoded | None = None


def take_all(calls: Sequence[Slots], dtype: str, pool: Pool, arena: Arena) -> None:
    """Find what there is to know of each call's slots, and copy them. arena: where sums go."""
    loops = kernels()
    if loops is None or dtype == "float64":
        return
    kind, table, size, todo, ends = TORCH[dtype], array("q"), 0, [], []
    for call in calls:
        keys, errors, how = call.keys, call.errors, call.how
        if not (is_plain(keys) and is_plain(errors)):
            continue
        (count, d_in), d_out = keys.shape, errors.shape[1]
        key_copy = call.key_copy = pool.take(how.key_name, count, d_in, kind, named=call.named)
        error_copy = call.error_copy = None if how.error_name is None else pool.take(how.error_name, count, d_out, kind)
        (key_at, key_exponents, names), (error_at, error_exponents, _) = (
            key_copy.places,
            NOWHERE if error_copy is None else error_copy.places,
        )
        table.extend((count, d_in, d_out, how.k, keys.data_ptr(), errors.data_ptr(), how.random))
        table.extend((key_at, key_exponents, error_at, error_exponents, names, 0))
        size += (how.k + 1) * d_out + 3
        todo.append(call)
        ends.append(size)
    if not todo:
        return
    threads = torch.get_num_threads()
    sums, begins_at = arena.take(size * threads)
    loops.slots(len(todo), table.buffer_info()[0], begins_at, threads)
    begin = 0
    for call, end in zip(todo, ends, strict=True):
        error_square, projected_square, key_square = sums[end - 3 : end].tolist()
        if math.isfinite(error_square):
            call.taken, call.added, call.at = (
                True,
                sums[begin : end - 3].reshape(call.how.k + 1, -1),
                begins_at + 8 * begin,
            )
            call.error_norm, call.projected_norm = math.sqrt(error_square), math.sqrt(projected_square)
            call.key_norm = math.sqrt(key_square)
        else:
            for copy in (call.key_copy, call.error_copy):
                if copy is not None:
                    pool.give(copy)
        begin = end
