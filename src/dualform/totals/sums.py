"""Exact sums of numbers that cancel: the result may be far below the rounding error of a plain sum.

This happens to the bias of an attention's keys, whose true gradient is zero, and to a bias before a normalisation. An optimizer that
divides a gradient by its size takes a full step even then.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dualform.arrays import Array, Ints

FLOAT64_BITS = 53
HIGHER_BITS = 30
"""This many bits of each number are summed apart from the rest: the sum of 2²³ such numbers fits into a float64."""


def sum_by_group(
    values: Array,
    longer: Any,
    groups: Ints | None = None,
    count: int = 1,
) -> Array:
    """Return Σ values (n, …) of each group in a longer type, (count, …), without rounding error where values cancel.

    groups: (n,), from 0 to count − 1; None: one group.
    """
    higher, lower = _cut(values)
    if groups is None:
        groups = np.zeros(len(values), np.int64)
    # The sum of the higher parts is exact. If they cancel, it is as small as the sum of the lower parts
    total = _added(higher, longer, groups, count)
    total += _added(lower, longer, groups, count)
    return total


def _cut(values: Array) -> tuple[Array, Array]:
    """Split numbers into their higher bits, which are multiples of one number in each column, and the rest."""
    doubles = values.astype(np.float64)
    largest = np.abs(doubles).max(0, initial=0.0)
    _, exponents = np.frexp(largest)
    # Adding a number this large rounds the lower bits away
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
