"""Inner products of a query's gradient with those of slots: what every method computes, whatever it made of the query.

⟨Σ over a query's positions of slope ⊗ query, error ⊗ key⟩, for each slot or summed over the positions of a row. There are three ways to the
same numbers (two inner products for each pair of positions; the query's sum as a matrix; the row's sum as a matrix, too), and the
cheapest is taken.

The whitened path puts the inverse of the curvature in between: −[x_qᵀ (A + αI)⁻¹ x_i] · [g_qᵀ (S + βI)⁻¹ e_i], with α and β a part ρ (the
damping) of the mean eigenvalue. Only queries are whitened; they then meet slots as in attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dualform.curvature.maps import LinearMap, linear_maps
from dualform.curvature.sums import DAMPING, Factors, damped
from dualform.layers.keys import Vectors
from dualform.layers.streams import Layer

MATRIX_BYTES = 128 << 20
"""How much memory the matrices of queries may take at a time."""


@dataclass(frozen=True)
class MapQuery:
    """What some examples ask of one linear map."""

    linear_map: LinearMap
    queries: Tensor
    """(examples, positions, groups, width); of one-hot keys (examples, positions)."""
    slopes: Tensor
    """∂target/∂output, (examples, positions, groups, outputs)."""


Question = Mapping[str, list[MapQuery]]
"""By layer: what is asked of each of its linear maps."""


def map_queries(layer: Layer, queries: Tensor, slopes: Tensor) -> list[MapQuery]:
    """Split what is asked of a layer. queries (examples, positions, d_in or 1), slopes (examples, positions, d_out)."""
    lead = queries.shape[:2]
    if layer.outputs:
        slopes = slopes[..., list(layer.outputs)]
    keys = Vectors(queries.flatten(0, 1))
    found = []
    for linear_map in linear_maps(layer):
        own_slopes = linear_map.error_side(keys, slopes.flatten(0, 1))
        if linear_map.is_one_hot:
            own_queries = queries.reshape(lead).long()
        else:
            own_queries = linear_map.key_side(keys)
            own_queries = own_queries.reshape(*lead, *own_queries.shape[1:])
        found.append(MapQuery(linear_map, own_queries, own_slopes.reshape(*lead, *own_slopes.shape[1:])))
    return found


class Products:
    """The inner products of some queries with slots, for one linear map.

    queries (examples, positions, groups, width + 1): the last column belongs to the constant; slopes (…, groups, outputs).
    """

    def __init__(self, queries: Tensor, slopes: Tensor, constant: float, lengths: Tensor | None = None):
        """lengths (examples,): |query · key| is at most this times the key's norm, whichever norm that is."""
        self._queries = queries
        self._slopes = slopes
        self._constant = constant
        self.lengths = lengths

    def of_slots(self, examples: slice, keys: Tensor, errors: Tensor) -> Tensor:
        """keys (n, groups, width), errors (n, groups, outputs) → (examples, n)."""
        count = examples.stop - examples.start
        _, positions, groups, _ = self._queries.shape
        n, _, width = keys.shape
        outputs = errors.shape[2]
        if not count or (groups == 1 and positions * (width + outputs) <= 2 * max(width, 1) * outputs):
            found = self.weights(examples, keys)
            found *= self.slopes_along(examples, errors)
            return found if positions == 1 else found.reshape(count, positions, n).sum(1)
        by_group = errors.transpose(0, 1)
        keys_by_group = keys.transpose(0, 1)
        found = keys.new_empty(count, n)
        for place in range(count):
            first = examples.start + place
            matrix = self._matrices(slice(first, first + 1))[0]
            of_keys = ((by_group @ matrix[..., :width]) * keys_by_group).sum((0, 2))
            of_constant = (by_group @ matrix[..., width:]).sum((0, 2))
            found[place] = of_keys + self._constant * of_constant
        return found

    def weights(self, examples: slice, keys: Tensor) -> Tensor:
        """query · (key, constant), if there are no groups: (examples × positions, n)."""
        queries = self._queries[examples].flatten(0, 2)
        width = keys.shape[2]
        found: Tensor = queries[:, :width] @ keys[:, 0].T
        return found.add_(queries[:, width:], alpha=self._constant) if self._constant else found

    def slopes_along(self, examples: slice, errors: Tensor) -> Tensor:
        """slope · error, if there are no groups: (examples × positions, n)."""
        return self._slopes[examples].flatten(0, 2) @ errors[:, 0].T

    @property
    def is_one_pair(self) -> bool:
        """Whether a query is one vector and one slope."""
        return self._queries.shape[1] == self._queries.shape[2] == 1

    def of_rows(self, examples: slice, keys: Tensor, errors: Tensor, positions: int) -> Tensor:
        """Return the same, summed over the positions of each row: (examples, n / positions)."""
        if positions == 1:
            return self.of_slots(examples, keys, errors)
        count = examples.stop - examples.start
        own_positions = self._queries.shape[1]
        n, groups, width = keys.shape
        outputs = errors.shape[2]
        rows = n // positions
        # Multiplications of each way
        matrix_size = groups * max(width, 1) * outputs
        by_matrix = matrix_size * (n + rows * count + own_positions * count)
        by_slot = n * count * min(groups * own_positions * (width + outputs), 2 * matrix_size)
        if by_slot <= by_matrix:
            return self.of_slots(examples, keys, errors).reshape(count, rows, positions).sum(2)
        return self._of_row_matrices(examples, keys, errors, positions)

    def _of_row_matrices(self, examples: slice, keys: Tensor, errors: Tensor, positions: int) -> Tensor:
        """Sum the slots of each row to a matrix, and multiply it with that of each query."""
        n, groups, width = keys.shape
        rows = n // positions
        by_row = errors.reshape(rows, positions, groups, -1).permute(0, 2, 3, 1)
        keys_by_row = keys.reshape(rows, positions, groups, width).transpose(1, 2)
        of_keys = (by_row @ keys_by_row).reshape(rows, -1)
        of_constant = by_row.sum(3).reshape(rows, -1)
        matrix_bytes = groups * max(width, 1) * errors.shape[2] * keys.element_size()
        size = max(1, MATRIX_BYTES // matrix_bytes)
        found = []
        for low in range(examples.start, examples.stop, size):
            matrices = self._matrices(slice(low, min(low + size, examples.stop)))
            along_keys = matrices[..., :width].reshape(len(matrices), -1) @ of_keys.T
            along_constant = matrices[..., width].reshape(len(matrices), -1) @ of_constant.T
            found.append(along_keys + self._constant * along_constant)
        return torch.cat(found)

    def _matrices(self, examples: slice) -> Tensor:
        """Σ over positions of slope ⊗ query, (examples, groups, outputs, width + 1)."""
        return self._all_matrices[examples] if self._all_matrices is not None else self._summed(examples)

    def _summed(self, examples: slice) -> Tensor:
        return self._slopes[examples].permute(0, 2, 3, 1) @ self._queries[examples].transpose(1, 2)

    @cached_property
    def _all_matrices(self) -> Tensor | None:
        """Those of all examples, if they are small enough to be kept."""
        examples, _, groups, width = self._queries.shape
        size = examples * groups * width * self._slopes.shape[3] * self._queries.element_size()
        return self._summed(slice(0, examples)) if size <= MATRIX_BYTES else None


class OneHotProducts:
    """The same for one-hot keys: only slots with a query's own number count.

    numbers (examples, positions); slopes (examples, positions, 1, outputs).
    """

    def __init__(self, numbers: Tensor, slopes: Tensor):
        self._by_example = [_summed_by_number(*one) for one in zip(numbers, slopes[:, :, 0], strict=True)]

    def of_slots(self, examples: slice, keys: Tensor, errors: Tensor) -> Tensor:
        """keys (n,), errors (n, 1, outputs) → (examples, n)."""
        found = errors.new_zeros(examples.stop - examples.start, len(keys))
        for scores, (numbers, slopes) in zip(found, self._by_example[examples], strict=True):
            slots = torch.nonzero(torch.isin(keys, numbers) & (keys >= 0))[:, 0]  # −1 is a key of zeros
            places = torch.searchsorted(numbers, keys[slots])
            scores[slots] = (slopes[places] * errors[slots, 0]).sum(1)
        return found

    def of_rows(self, examples: slice, keys: Tensor, errors: Tensor, positions: int) -> Tensor:
        """Return the same, summed over the positions of each row: (examples, n / positions)."""
        count = examples.stop - examples.start
        return self.of_slots(examples, keys, errors).reshape(count, -1, positions).sum(2)


def _summed_by_number(numbers: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct numbers, ascending, and the sum of the slopes of each. numbers (positions,), slopes (positions, outputs)."""
    distinct, places = torch.unique(numbers, return_inverse=True)
    return distinct, slopes.new_zeros(len(distinct), slopes.shape[1]).index_add_(0, places, slopes)


def plain_products(query: MapQuery) -> Products | OneHotProducts:
    """Return inner products of gradients as they are."""
    linear_map = query.linear_map
    if linear_map.is_one_hot:
        return OneHotProducts(query.queries, query.slopes)
    return Products(linear_map.with_constant(query.queries), query.slopes, linear_map.constant)


def whitened_products(query: MapQuery, factors: Factors, damping: float) -> Products | OneHotProducts:
    """Return the same with the inverse curvature between them; minus: what supports is positive."""
    linear_map = query.linear_map
    queries = query.queries
    dtype = query.slopes.dtype
    slopes = _solved(factors.errors, query.slopes.double(), damping) / -max(factors.positions, 1e-30)
    if linear_map.is_one_hot:
        inverse = 1 / (factors.keys + damping * factors.keys.mean())
        weights = torch.where(queries >= 0, inverse[queries.clamp(min=0)], 0)
        return OneHotProducts(queries, (slopes * weights[..., None, None]).to(dtype))
    extended = linear_map.with_constant(queries).double()[..., : factors.keys.shape[1]]
    solved = _solved(factors.keys, extended, damping)
    # At another damping than the usual one, norms are longer by this much at most
    longer = max(1.0, DAMPING / damping) ** 0.5
    lengths = (extended * solved).sum(-1).clamp(min=0).sqrt() * longer
    if not linear_map.constant:
        solved = torch.cat([solved, solved.new_zeros(*solved.shape[:-1], 1)], -1)
    return Products(solved.to(dtype), slopes.to(dtype), linear_map.constant, lengths.flatten(1).sum(1).to(dtype))


def _solved(curvature: Tensor, vectors: Tensor, damping: float) -> Tensor:
    """(curvature + damping · its mean eigenvalue)⁻¹ vectors; curvature (groups, d, d), vectors (…, groups, d)."""
    groups, width, _ = curvature.shape
    columns = vectors.reshape(-1, groups, width).permute(1, 2, 0)
    found = torch.cholesky_solve(columns, torch.linalg.cholesky(damped(curvature, damping)))
    return found.permute(2, 0, 1).reshape(vectors.shape)
