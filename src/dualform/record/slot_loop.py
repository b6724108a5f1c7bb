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

from dualform.native.kernels import address, kernels
from dualform.record.parameters import RecordedParameter
from dualform.record.silent import silent_slots
from dualform.store.encoding import TORCH, Encoded
from dualform.store.memory import Part, Pool, Stream
from dualform.store.records import Bools

Sums = np.ndarray[Any, np.dtype[np.float64]]
NOWHERE = (0, 0)
FIELDS = 12
"""So many numbers the loop is told of a call."""


@dataclass(frozen=True, eq=False)
class LoopPlan:
    """How the slots of a layer are taken."""

    weight: RecordedParameter
    bias: RecordedParameter | None
    key_name: str
    """Where the memory of the copies comes from (see Pool)."""
    error_name: str
    keeps_errors: bool
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
    how: LoopPlan
    may_repeat: bool = False
    """Whether its keys may come again, so that equal ones are stored once."""
    taken: bool = False
    """Whether there is anything of the following; else they are to be taken in the plain way."""
    key_copy: Encoded | None = None
    error_copy: Encoded | None = None
    sums: Sums = field(init=False)
    """Of all calls that were taken together, …"""
    begin: int = 0
    """… and where those of this one begin."""
    silent: Bools | None = None
    """(n,): which error signals are zero; None: none of them."""

    def added(self, error_terms: float = 0.0) -> list[tuple[RecordedParameter, Sums, float]]:
        """Weight and bias: what is added to the gradient, and a bound on the sum of its absolute terms.

        error_terms: as LayerSlots has it.
        """
        weight, bias, outputs, begin = self.how.weight, self.how.bias, self.how.weight.rows, self.begin
        middle = begin + weight.columns * outputs
        end = middle + outputs
        size_of_errors, size_of_keys, root_of_count = self.sums[end : end + 3].tolist()
        error_terms = max(error_terms, size_of_errors)
        found = [(weight, self.sums[begin:middle], error_terms * size_of_keys)]
        if bias is not None:
            found.append((bias, self.sums[middle:end], error_terms * root_of_count))
        return found


class CallBuffers:
    """Memory for the slots of some calls, and what the loop is told of it. LayerSlots again with the memory."""

    def __init__(self, calls: Sequence[Slots], copies: Sequence[Encoded], cut_for: tuple[Any, ...] = ()):
        self.told, self.size, self.cut_for = array("q"), 0, cut_for
        self.copies: list[tuple[Encoded, Encoded | None, int]] = []
        """Of each call: keys, error signals, and where its sums begin."""
        rest = iter(copies)
        for call in calls:
            weight, (count, d_in), d_out = call.how.weight, call.keys.shape, call.errors.shape[1]
            key_copy, error_copy = next(rest), next(rest) if call.how.keeps_errors else None
            key_at, key_exponents = key_copy.places
            error_at, error_exponents = NOWHERE if error_copy is None else error_copy.places
            self.told.extend((count, d_in, d_out, weight.columns, 0, 0, call.how.random, key_at, key_exponents))
            self.told.extend((error_at, error_exponents, 0))
            self.copies.append((key_copy, error_copy, self.size))
            self.size += (weight.columns + 1) * d_out + 3

    def tell(self, calls: Sequence[Slots]) -> None:
        """Tell the loop of some calls, and these of their memory."""
        told, at = self.told, 0
        for call, (key_copy, error_copy, begin) in zip(calls, self.copies, strict=True):
            call.key_copy, call.error_copy, call.begin = key_copy, error_copy, begin
            told[at + 4], told[at + 5] = call.keys.data_ptr(), call.errors.data_ptr()
            at += FIELDS


class SlotLoop:
    """Takes the slots of ordinary calls, into memory of a pool."""

    def __init__(self, dtype: str, pool: Pool):
        self._loops = kernels() if dtype != "float64" else None
        self._kind = TORCH[dtype]
        self._pool = pool
        self._last: tuple[Any, ...] = ()
        """What was taken the last time, all together."""
        self._cut_for: tuple[Any, ...] = ()
        self._parts: list[Part] = []
        """Memory that is cut for what came together twice in a row."""

    def take(self, calls: Sequence[Slots]) -> bool:
        """Find what there is to know of each call's slots, and copy them; gives whether that could be done."""
        if self._loops is None:
            return False
        todo, alike = [], True
        for call in calls:
            keys, errors = call.keys, call.errors  # both as `is_plain` has it: a function is too much here
            if not keys.dtype is errors.dtype is torch.float32 or not (keys.is_cpu and errors.is_cpu):
                continue
            if keys.layout is errors.layout is torch.strided and keys.is_contiguous() and errors.is_contiguous():
                todo.append(call)
                alike = alike and keys.size(0) == todo[0].keys.size(0)
        if not todo:
            return not calls
        told, size = self._buffers(todo, alike)
        threads = torch.get_num_threads()
        sums = np.empty(size * threads)
        odd = self._loops.slots(len(todo), told.buffer_info()[0], address(sums), threads)
        for call in todo:
            call.sums = sums
            call.taken = True
            call.silent = silent_slots(call.errors)
        if odd:
            self._give_back_odd(todo, sums[:size])
        return not odd and len(todo) == len(calls)

    def _buffers(self, calls: list[Slots], alike: bool) -> tuple[array[int], int]:
        """Give calls their memory; gives what the loop is told, and how many sums there are.

        Those that come together again and again, as many slots of each, get memory that is cut for all of them.
        """
        count = calls[0].keys.size(0)
        now = (count, *[(call.how, call.may_repeat) for call in calls]) if alike and count else ()
        if now and now == self._last != self._cut_for:
            self._pool.give(*[vectors for part in self._parts for vectors in part.vectors])
            self._cut_for, self._parts = now, []
        self._last = now
        if now and now == self._cut_for:
            if not self._parts:
                self._parts = self._pool.take_slab(count, _streams(calls, self._kind))[::-1]
            part = self._parts.pop()
            if part.note is None or part.note.cut_for != now:  # other layers of the same sizes had it before
                part.note = CallBuffers(calls, part.vectors, now)
            room = part.note
            room.tell(calls)
            return room.told, room.size
        told, size = array("q"), 0
        for call in calls:
            count, streams = call.keys.size(0), _streams([call], self._kind)
            names = call.how.key_name, call.how.error_name
            room = CallBuffers(
                [call], [self._pool.take(name, count, *one) for name, one in zip(names, streams, strict=False)]
            )
            room.tell([call])
            call.begin = size
            told, size = told + room.told, size + room.size
        return told, size

    def _give_back_odd(self, calls: Sequence[Slots], sums: Sums) -> None:
        """Those with numbers that are not finite, or too large for float32, are left to the plain way."""
        for call, end in zip(calls, [*(one.begin for one in calls[1:]), len(sums)], strict=True):
            if not math.isfinite(sums[end - 3]):
                self.give_back(call)

    def give_back(self, call: Slots) -> None:
        """Nobody will look at what was taken."""
        call.taken = False
        self._pool.give(call.key_copy, call.error_copy)


def _streams(calls: Sequence[Slots], kind: torch.dtype) -> tuple[Stream, ...]:
    wanted = []
    for call in calls:
        wanted.append(Stream(call.keys.shape[1], kind))
        if call.how.keeps_errors:
            wanted.append(Stream(call.errors.shape[1], kind))
    return tuple(wanted)
