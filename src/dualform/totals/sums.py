"""Sums of numbers that cancel each other: what is left of them may be far below the rounding of a plain sum.

So it is with the bias of an attention's keys, whose true gradient is zero, and with that before a normalisation. An optimizer that divides by
the size of a gradient makes a step like any other of what is left.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dualform.arrays import Array, Ints

FLOAT64_BITS = 53
HIGHER_BITS = 30
"""So many bits of each number are summed apart from the rest: 2²³ of such numbers have a sum that fits into a float64."""


def sum_by_group(
    values: Array,
    longer: Any,
    groups: Ints | None = None,
    count: int = 1,
) -> Array:
    """Return Σ values (n, …) of each group in a longer type, (count, …), not rounded where the values cancel.

    groups: (n,), from 0 to count − 1; None: all are of one.
    """
    higher, lower = _cut(values)
    if groups is None:
        groups = np.zeros(len(values), np.int64)
    # The sum of the higher parts is exact. If they cancel, it is as small as that of the lower parts
    total = _added(higher, longer, groups, count)
    total += _added(lower, longer, groups, count)
    return total


def _cut(values: Array) -> tuple[Array, Array]:
    """Cut numbers in two: multiples of one number in each column, and the rest."""
    doubles = values.astype(np.float64)
    largest = np.abs(doubles).max(0, initial=0.0)
    _, exponents = np.frexp(largest)
    # Beside a number this large, no lower bits have room
    shift_bits = FLOAT64_BITS - 1 - HIGHER_BITS
    shift = np.ldexp(1.5, exponents + shift_bits)
    higher = (doubles + shift) - shift
    return higher, doubles - higher


def _added(
    values: Array,
    longer: Any,
    groups: Ints,
    count: int,
) -> Array:
    sums: Array = np.zeros((count, *values.shape[1:]), longer)
    if count == 1:
        sums[0] = values.sum(0, dtype=longer)
    else:
        np.add.at(sums, groups, values.astype(longer))
    return sums
