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
from dualform.record.parameters import ParameterLedger
from dualform.store.encoding import TORCH, Encoded, Pool

Sums = np.ndarray[Any, np.dtype[np.float64]]
NOWHERE = (0, 0, 0)


@dataclass(frozen=True)
class Taking:
    """How the slots of a layer are taken."""

    weight: ParameterLedger
    bias: ParameterLedger | None
    key_name: str
    """Where the memory of the copies comes from (see Pool)."""
    error_name: str | None
    """None: error signals are not kept."""
    random: int = field(init=False)
    """Where R is in memory, column after column."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "random", self.weight.random.data_ptr())


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
    key_copy: Encoded | None = None
    error_copy: Encoded | None = None
    sums: Sums = field(init=False)
    """Of all calls that were taken together, and where those of this one begin: there, and in memory."""
    begin: int = 0
    at: int = 0

    def added(self) -> list[tuple[ParameterLedger, Sums, float, int]]:
        """Weight and bias: what is added to the gradient, a bound on the sum of its absolute terms, and where that is in memory."""
        weight, bias, outputs, begin = self.how.weight, self.how.bias, self.errors.shape[1], self.begin
        middle = begin + weight.columns * outputs
        end = middle + outputs
        _, scale, scale_of_bias = self.sums[end : end + 3].tolist()
        found = [(weight, self.sums[begin:middle], scale, self.at)]
        if bias is not None:
            found.append((bias, self.sums[middle:end], scale_of_bias, self.at + 8 * (middle - begin)))
        return found


def take_all(calls: Sequence[Slots], dtype: str, pool: Pool, arena: Arena) -> bool:
    """Find what there is to know of each call's slots, and copy them; gives whether that could be done. arena: where sums go."""
    loops = kernels()
    if loops is None or dtype == "float64":
        return False
    kind, table, size, todo = TORCH[dtype], array("q"), 0, []
    for call in calls:
        keys, errors, how = call.keys, call.errors, call.how
        if not (is_plain(keys) and is_plain(errors)):
            continue
        weight, bias, (count, d_in), d_out = how.weight, how.bias, keys.shape, errors.shape[1]
        key_copy = call.key_copy = pool.take(how.key_name, count, d_in, kind, named=call.named)
        error_copy = call.error_copy = None if how.error_name is None else pool.take(how.error_name, count, d_out, kind)
        key_at, key_exponents, names = key_copy.places
        error_at, error_exponents, _ = NOWHERE if error_copy is None else error_copy.places
        table.extend((count, d_in, d_out, weight.columns, keys.data_ptr(), errors.data_ptr(), how.random, key_at))
        table.extend((key_exponents, error_at, error_exponents, names))
        table.extend((weight.look_at, 0 if bias is None else bias.look_at, 0))
        call.begin = size
        size += (weight.columns + 1) * d_out + 3
        todo.append(call)
    if not todo:
        return not calls
    threads = torch.get_num_threads()
    sums, at = arena.take(size * threads)
    odd = loops.slots(len(todo), table.buffer_info()[0], at, threads)
    for call in todo:
        call.sums, call.at, call.taken = sums, at + 8 * call.begin, True
    if odd:
        _give_back_odd(todo, sums[:size], pool)
    return not odd and len(todo) == len(calls)


def _give_back_odd(calls: Sequence[Slots], sums: Sums, pool: Pool) -> None:
    """Those with numbers that are not finite, or too large for float32, are left to the plain way."""
    for call, end in zip(calls, [*(one.begin for one in calls[1:]), len(sums)], strict=True):
        if not math.isfinite(sums[end - 3]):
            give_back(call, pool)


def give_back(call: Slots, pool: Pool) -> None:
    """Nobody will look at what was taken."""
    call.taken = False
    for copy in (call.key_copy, call.error_copy):
        if copy is not None:
            pool.give(copy)
