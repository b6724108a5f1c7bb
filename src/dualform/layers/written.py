"""What slots write to a parameter, by the use that a layer makes of it."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from dualform.arrays import Array
from dualform.layers.keys import KeysOrGradients, RowGradients, select_columns
from dualform.layers.layer import Use

Matrix = TypeVar("Matrix", Tensor, Array)


def used_rows(use: Use, parameter: Matrix) -> Matrix:
    """Return the rows of a parameter that a use is about, as a view."""
    return parameter[use.rows[0] : use.rows[1]] if use.rows else parameter


def used_errors(use: Use, errors: Tensor, outputs: Tensor | None = None) -> Tensor:
    """Return the part of error signals that a use is about. outputs: these columns instead."""
    return select_columns(errors, use.errors) if outputs is None else errors[:, outputs]


def sum_written(use: Use, keys: KeysOrGradients, errors: Tensor, outputs: Tensor | None = None) -> Tensor:
    """Return what all slots write together: rows of the parameter as a matrix, or a vector. outputs: of a weight, only these."""
    if isinstance(keys, RowGradients):
        return keys.summed(use, errors[:, 0], outputs)
    if use.role == "scale":
        return keys.vectors().sum(0)
    if use.role == "bias":
        return used_errors(use, errors).sum(0)
    written = keys.outer(used_errors(use, errors, outputs), use.keys, use.groups)
    return written.T if use.role == "table" else written


def each_written(use: Use, keys: KeysOrGradients, errors: Tensor) -> Tensor:
    """Return what each slot writes to a bias or an elementwise weight, (slots, d)."""
    if isinstance(keys, RowGradients):
        return keys.added_to(use) * errors
    return keys.vectors() if use.role == "scale" else used_errors(use, errors)
