"""What a slot contributes to a target: ⟨∂target/∂parameter, coefficient ⊙ error signal ⊗ key⟩, for each use of a parameter.

∂target/∂parameter at a query is the sum of slope ⊗ query over its positions, where the slope is the gradient of the target by the
layer's output. With tied weights, one layer may use a parameter at the query and another at the slot, so products have the shape of the
parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualform.dual.rows import Rows
from dualform.layers.keys import (
    Keys,
    KeysOrGradients,
    OneHot,
    Patches,
    RowGradients,
    Vectors,
    in_groups,
    select_columns,
)
from dualform.layers.layer import Layer, Use

BLOCK_NUMBERS = 1 << 20
"""How many intermediate numbers are computed at a time."""
WRITING = 16
"""Writing a row's gradient to memory takes about as long as this many positions add to it."""


def products(
    use: Use,
    layer: Layer,
    queries: Tensor,
    slopes: Tensor,
    rows: Rows | None,
) -> Tensor:
    """Return ∂target/∂parameter for the part of the parameter that is used: (examples, rows, columns), or (examples, d) for vectors.

    queries (examples, positions, d_in); slopes (examples, positions, d_out); rows: only these of the parameter.
    """
    if use.role == "scale":
        return queries.sum(1)
    slopes = _used_slopes(use, slopes, rows)
    if use.role == "bias":
        return slopes.sum(1)
    if layer.form == "numbers":
        product = _one_hot_products(queries, slopes, layer.d_in)
    elif use.groups > 1:
        product = _grouped_products(select_columns(queries, use.keys), slopes, use.groups)
    else:
        product = slopes.transpose(1, 2) @ select_columns(queries, use.keys)
    return product.transpose(1, 2) if use.role == "table" else product


def _used_slopes(use: Use, slopes: Tensor, rows: Rows | None) -> Tensor:
    used = select_columns(slopes, use.errors)
    if rows is None or use.role == "bias":
        return used
    return used[..., rows.places]


def _one_hot_products(queries: Tensor, slopes: Tensor, d_in: int) -> Tensor:
    """Add up the slopes of each number among the queries, (examples, d_out, d_in)."""
    examples, positions, d_out = slopes.shape
    numbers = queries.reshape(examples, positions, 1).long()
    table = torch.zeros(examples, d_in, d_out, dtype=slopes.dtype)
    table.scatter_add_(1, numbers.expand(-1, -1, d_out), slopes)
    return table.transpose(1, 2)


def _grouped_products(keys: Tensor, slopes: Tensor, groups: int) -> Tensor:
    """(examples, d_out, d_in / groups)."""
    examples, positions, d_out = slopes.shape
    slopes = slopes.reshape(examples, positions, groups, -1)
    keys = keys.reshape(examples, positions, groups, -1)
    product = torch.einsum("qpgo,qpgi->qgoi", slopes, keys)
    return product.reshape(examples, d_out, -1)


def inner(
    use: Use,
    layer: Layer,
    queries: Tensor,
    slopes: Tensor,
    matrix: Tensor,
    rows: Rows | None = None,
) -> Tensor:
    """Return ⟨∂target/∂parameter, matrix⟩ for each example, (examples,). matrix: shaped like the part that is used, or these rows of it."""
    if use.role == "weight" and layer.form == "vectors" and use.groups == 1:
        # slope · (matrix query) needs no outer product for each example
        slopes = _used_slopes(use, slopes, rows)
        through = slopes @ matrix.reshape(len(matrix), -1)
        return (through * select_columns(queries, use.keys)).sum((1, 2))
    product = products(use, layer, queries, slopes, rows)
    matrix = matrix.reshape(product.shape[1:])
    return (product * matrix).flatten(1).sum(1)


def scores(
    use: Use,
    product: Tensor,
    keys: KeysOrGradients,
    errors: Tensor,
    rows: Rows | None,
) -> Tensor:
    """Return ⟨product, error signal ⊗ key⟩ for each slot, (examples, slots).

    product: what `products` returns, times the coefficients of the slots. rows: the rows of the parameter that it has; None: all.
    """
    if isinstance(keys, RowGradients):
        outputs = None if rows is None else rows.columns
        return keys.along(use, product, outputs) * errors[:, 0]
    if use.role == "scale":
        return product @ keys.vectors().T
    errors = select_columns(errors, use.errors) if rows is None else errors[:, rows.columns]
    if use.role == "bias":
        return product @ errors.T
    if use.role == "table":
        product = product.transpose(1, 2)
    return _matrix_scores(use, product, keys, errors)


def _matrix_scores(use: Use, product: Tensor, keys: Keys, errors: Tensor) -> Tensor:
    """Return the scores for a weight. product: (examples, d_out, d_in); errors: those of the outputs in the product."""
    if isinstance(keys, OneHot):
        by_slot = (matrix[:, keys.places].T for matrix in product)
        return torch.stack([(errors * columns).sum(1) for columns in by_slot])
    vectors = select_columns(keys.vectors(), use.keys)
    if use.groups > 1:
        return _grouped_scores(product, vectors, errors, use.groups)
    # The longer side is multiplied first, so that the intermediate result is small
    if errors.shape[1] > vectors.shape[1]:
        return _bilinear(product.transpose(1, 2), errors, vectors)
    return _bilinear(product, vectors, errors)


def row_scores(
    use: Use,
    product: Tensor,
    keys: KeysOrGradients,
    errors: Tensor,
    rows: Rows | None,
    positions: int,
) -> Tensor:
    """The same, summed over the positions of each row: (examples, slots / positions)."""
    if use.role == "weight" and use.groups == 1 and isinstance(keys, (Vectors, Patches)) and positions > 1:
        own_errors = select_columns(errors, use.errors) if rows is None else errors[:, rows.columns]
        return _product_scores(product, keys, use.keys, own_errors, positions)
    by_slot = scores(use, product, keys, errors, rows)
    return torch.unflatten(by_slot, 1, (-1, positions)).sum(2)


def _product_scores(
    product: Tensor,
    keys: Vectors | Patches,
    columns: Sequence[int],
    errors: Tensor,
    positions: int,
) -> Tensor:
    """Σ over a row's positions of error · P · key for the P of each example, (examples, rows)."""
    count = len(errors) // positions
    examples = len(product)
    # A product with all slots for each example, or one that gives the gradients of the rows, which then meet every example
    if examples * positions > positions + examples + WRITING:
        by_row = torch.unflatten(errors, 0, (count, positions))
        if isinstance(keys, Patches):
            gradients = keys.outer_by_row(by_row, 1)
        else:
            own_keys = torch.unflatten(select_columns(keys.vectors(), columns), 0, (count, positions))
            gradients = (by_row.transpose(1, 2) @ own_keys).flatten(1)
        return product.flatten(1) @ gradients.T
    return torch.stack([_dots_by_row(*_through(matrix, keys, columns, errors), count) for matrix in product])


def _through(matrix: Tensor, keys: Vectors | Patches, columns: Sequence[int], errors: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the inner product of each slot is to be taken of. The longer side is multiplied: less is left over."""
    if isinstance(keys, Patches):
        return keys.project(matrix.T), errors
    vectors = select_columns(keys.vectors(), columns)
    if errors.shape[1] > vectors.shape[1]:
        return errors @ matrix, vectors
    return vectors @ matrix.T, errors


def _dots_by_row(left: Tensor, right: Tensor, rows: int) -> Tensor:
    """The inner products of stretches of two matrices, (rows,), without a matrix of products."""
    return torch.bmm(left.reshape(rows, 1, -1), right.reshape(rows, -1, 1))[:, 0, 0]


def _grouped_scores(
    product: Tensor,
    keys: Tensor,
    errors: Tensor,
    groups: int,
) -> Tensor:
    """Return the scores for a weight with groups, each of which is a linear map of its own."""
    keys = in_groups(keys, groups).transpose(0, 1)
    errors = in_groups(errors, groups).transpose(0, 1)
    blocks = product.reshape(len(product), groups, errors.shape[2], keys.shape[2])
    return torch.stack([((errors @ block) * keys).sum((0, 2)) for block in blocks])


def _bilinear(product: Tensor, long: Tensor, short: Tensor) -> Tensor:
    """Return short · P · long for the P of each example, (examples, slots)."""
    examples, short_width, long_width = product.shape
    slots = len(long)
    scores = product.new_empty(examples, slots)
    size = max(1, BLOCK_NUMBERS // max(1, slots * short_width))
    for low in range(0, examples, size):
        block = product[low : low + size]
        through = long @ block.reshape(-1, long_width).T
        through = through.reshape(slots, len(block), short_width)
        scores[low : low + size] = (through * short.unsqueeze(1)).sum(2).T
    return scores
