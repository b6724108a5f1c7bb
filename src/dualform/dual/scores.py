"""What a slot adds to a target: ⟨∂target/∂parameter, coefficient ⊙ error signal ⊗ key⟩, for every use of a parameter.

∂target/∂parameter at a query is a sum of slope ⊗ query over its positions. A parameter may be used by one layer at the query
and by another one at the slot (tied weights): everything is brought to the parameter's own orientation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.dual.gradients import Rows
from dualform.layers.keys import Keys, Numbers, in_groups, part
from dualform.layers.streams import Layer, Use

AT_ONCE = 1 << 20
"""How many intermediate numbers are held at a time."""


def products(use: Use, layer: Layer, queries: Tensor, slopes: Tensor, rows: Rows | None) -> Tensor:
    """∂target/∂parameter (that part of it which is used), (examples, rows, columns), or (examples, d) for vectors.

    queries (examples, positions, d_in); slopes (examples, positions, d_out); rows: only these of the parameter.
    """
    if use.role == "scale":
        return queries.sum(1)
    slopes = part(slopes, use.errors)
    if use.role == "bias":
        return slopes.sum(1)
    if rows is not None:
        slopes = slopes[..., rows.places]
    examples, positions, d_out = slopes.shape
    if layer.form == "numbers":
        places = queries.reshape(examples, positions).long()
        table = torch.zeros(examples, layer.d_in, d_out, dtype=slopes.dtype)
        table.scatter_add_(1, places.unsqueeze(-1).expand(-1, -1, d_out), slopes)
        return table if use.role == "table" else table.transpose(1, 2)
    keys = part(queries, use.keys)
    if use.groups > 1:
        slopes = slopes.reshape(examples, positions, use.groups, -1)
        keys = keys.reshape(examples, positions, use.groups, -1)
        return torch.einsum("qpgo,qpgi->qgoi", slopes, keys).reshape(examples, d_out, -1)
    found = slopes.transpose(1, 2) @ keys
    return found.transpose(1, 2) if use.role == "table" else found


def inner(use: Use, layer: Layer, queries: Tensor, slopes: Tensor, matrix: Tensor, rows: Rows | None = None) -> Tensor:
    """⟨∂target/∂parameter, matrix⟩ for each example, (examples,). matrix: like (that part of) the parameter, or these rows of it."""
    if use.role == "weight" and layer.form == "vectors" and use.groups == 1:  # without a matrix for each example
        errors = part(slopes, use.errors) if rows is None else part(slopes, use.errors)[..., rows.places]
        return ((errors @ matrix.reshape(len(matrix), -1)) * part(queries, use.keys)).sum((1, 2))
    product = products(use, layer, queries, slopes, rows)
    return (product * matrix.reshape(product.shape[1:])).flatten(1).sum(1)


def scores(use: Use, product: Tensor, keys: Keys, errors: Tensor, rows: Rows | None) -> Tensor:
    """⟨product, error signal ⊗ key⟩ for each slot, (examples, slots). product: as above, coefficients included."""
    if use.role == "scale":
        return product @ keys.vectors().T
    errors = part(errors, use.errors) if rows is None else errors[:, rows.columns]
    if use.role == "bias":
        return product @ errors.T
    if use.role == "table":
        product = product.transpose(1, 2)
    if isinstance(keys, Numbers):
        return torch.stack([(errors * one[:, keys.places].T).sum(1) for one in product])
    vectors = part(keys.vectors(), use.keys)
    if use.groups == 1:
        return _bilinear(product, vectors, errors)
    apart = in_groups(errors, use.groups).transpose(0, 1)
    taken = in_groups(vectors, use.groups).transpose(0, 1)
    blocks = product.reshape(len(product), use.groups, apart.shape[-1], taken.shape[-1])
    return torch.stack([((apart @ one) * taken).sum((0, 2)) for one in blocks])


def _bilinear(product: Tensor, keys: Tensor, errors: Tensor) -> Tensor:
    """error · P · key for the P of each example, (examples, slots)."""
    if errors.shape[1] > keys.shape[1]:
        product, keys, errors = product.transpose(1, 2), errors, keys
    examples, few, many = product.shape
    found = product.new_empty(examples, len(keys))
    size = max(1, AT_ONCE // max(1, len(keys) * few))
    for low in range(0, examples, size):
        some = product[low : low + size]
        halves = (keys @ some.reshape(-1, many).T).reshape(len(keys), len(some), few)
        found[low : low + size] = (halves * errors.unsqueeze(1)).sum(2).T
    return found
