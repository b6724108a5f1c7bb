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
from dualform.layers.layer import Layer
from dualform.query.influence.rows import slices
from dualform.query.sending import uncached

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
    shape = queries.shape[:2]
    if layer.outputs:
        slopes = slopes[..., list(layer.outputs)]
    keys = Vectors(queries.flatten(0, 1))
    flat_slopes = slopes.flatten(0, 1)
    found = []
    for linear_map in linear_maps(layer):
        own_slopes = torch.unflatten(linear_map.error_side(keys, flat_slopes), 0, shape)
        if linear_map.is_one_hot:
            own_queries = queries.reshape(shape).long()
        else:
            own_queries = torch.unflatten(linear_map.key_side(keys), 0, shape)
        found.append(MapQuery(linear_map, own_queries, own_slopes))
    return found


class Products:
    """The inner products of some queries with slots, for one linear map.

    queries (examples, positions, groups, width + 1): the last column belongs to the constant; slopes (…, groups, outputs).
    """

    def __init__(
        self,
        queries: Tensor,
        slopes: Tensor,
        constant: float,
        lengths: Tensor | None = None,
    ):
        """lengths (examples,): |query · key| is at most this times the key's norm, whichever norm that is."""
        self._queries = queries
        self._slopes = slopes
        self._constant = constant
        self.lengths = lengths

    def __getstate__(self) -> dict[str, object]:
        return uncached(self)

    @property
    def is_one_pair(self) -> bool:
        """Whether a query is one vector and one slope."""
        _, positions, groups, _ = self._queries.shape
        return positions == groups == 1

    def of_slots(self, examples: slice, keys: Tensor, errors: Tensor) -> Tensor:
        """keys (n, groups, width), errors (n, groups, outputs) → (examples, n)."""
        _, positions, groups, _ = self._queries.shape
        width = keys.shape[2]
        outputs = errors.shape[2]
        # Multiplications for each slot
        by_pairs = positions * (width + outputs)
        by_matrix = 2 * max(width, 1) * outputs
        if groups == 1 and by_pairs <= by_matrix:
            return self._by_pairs(examples, keys, errors)
        return self._by_query_matrix(examples, keys, errors)

    def of_rows(
        self,
        examples: slice,
        keys: Tensor,
        errors: Tensor,
        positions: int,
    ) -> Tensor:
        """Return the same, summed over the positions of each row: (examples, n / positions)."""
        if positions == 1:
            return self.of_slots(examples, keys, errors)
        count = examples.stop - examples.start
        own_positions = self._queries.shape[1]
        n, groups, width = keys.shape
        outputs = errors.shape[2]
        # Multiplications of each way
        matrix_size = groups * max(width, 1) * outputs
        pairs_size = groups * own_positions * (width + outputs)
        by_slot = n * count * min(pairs_size, 2 * matrix_size)
        by_row_matrix = matrix_size * (n + n // positions * count + own_positions * count)
        if by_slot <= by_row_matrix:
            return _sum_positions(self.of_slots(examples, keys, errors), positions)
        return self._by_row_matrix(examples, keys, errors, positions)

    # Two inner products for each pair of positions

    def _by_pairs(self, examples: slice, keys: Tensor, errors: Tensor) -> Tensor:
        products = self.weights(examples, keys)
        products *= self.slopes_along(examples, errors)
        positions = self._queries.shape[1]
        if positions == 1:
            return products
        return torch.unflatten(products, 0, (-1, positions)).sum(1)

    def weights(self, examples: slice, keys: Tensor) -> Tensor:
        """query · (key, constant), if there are no groups: (examples × positions, n)."""
        width = keys.shape[2]
        queries = self._queries[examples].flatten(0, 2)
        weights: Tensor = queries[:, :width] @ keys[:, 0].T
        if self._constant:
            weights.add_(queries[:, width:], alpha=self._constant)
        return weights

    def slopes_along(self, examples: slice, errors: Tensor) -> Tensor:
        """slope · error, if there are no groups: (examples × positions, n)."""
        return self._slopes[examples].flatten(0, 2) @ errors[:, 0].T

    # The query's sum over positions as a matrix

    def _by_query_matrix(self, examples: slice, keys: Tensor, errors: Tensor) -> Tensor:
        width = keys.shape[2]
        keys_by_group = keys.transpose(0, 1)
        errors_by_group = errors.transpose(0, 1)
        products = keys.new_empty(examples.stop - examples.start, len(keys))
        for own, example in zip(products, slices(examples.start, examples.stop, 1), strict=True):
            [matrix] = self._matrices(example)
            along_keys = (errors_by_group @ matrix[..., :width]) * keys_by_group
            along_constant = errors_by_group @ matrix[..., width:]
            own[:] = along_keys.sum((0, 2)) + self._constant * along_constant.sum((0, 2))
        return products

    # The sums of both the query and the row as matrices

    def _by_row_matrix(
        self,
        examples: slice,
        keys: Tensor,
        errors: Tensor,
        positions: int,
    ) -> Tensor:
        n, groups, width = keys.shape
        outputs = errors.shape[2]
        rows = n // positions
        errors_by_row = errors.reshape(rows, positions, groups, outputs).permute(0, 2, 3, 1)
        keys_by_row = keys.reshape(rows, positions, groups, width).transpose(1, 2)
        return self.of_gradients(examples, errors_by_row @ keys_by_row, errors_by_row.sum(3))

    def of_gradients(self, examples: slice, weights: Tensor, constants: Tensor) -> Tensor:
        """Return the inner products with gradients of rows: weights (rows, groups, outputs, width), constants (rows, groups, outputs)."""
        rows, groups, outputs, width = weights.shape
        of_keys = weights.reshape(rows, -1)
        of_constant = constants.reshape(rows, -1)
        matrix_bytes = groups * max(width, 1) * outputs * weights.element_size()
        products = []
        size = max(1, MATRIX_BYTES // matrix_bytes)
        for some in slices(examples.start, examples.stop, size):
            matrices = self._matrices(some)
            along_keys = matrices[..., :width].flatten(1) @ of_keys.T
            along_constant = matrices[..., width].flatten(1) @ of_constant.T
            products.append(along_keys + self._constant * along_constant)
        return torch.cat(products)

    def _matrices(self, examples: slice) -> Tensor:
        """Return Σ over positions of slope ⊗ query, (examples, groups, outputs, width + 1)."""
        if self._all_matrices is not None:
            return self._all_matrices[examples]
        return self._sum_matrices(examples)

    @cached_property
    def _all_matrices(self) -> Tensor | None:
        """Those of all examples, if they are small enough to be kept."""
        examples, _, groups, width = self._queries.shape
        outputs = self._slopes.shape[3]
        nbytes = examples * groups * width * outputs * self._queries.element_size()
        return self._sum_matrices(slice(0, examples)) if nbytes <= MATRIX_BYTES else None

    def _sum_matrices(self, examples: slice) -> Tensor:
        slopes = self._slopes[examples].permute(0, 2, 3, 1)
        queries = self._queries[examples].transpose(1, 2)
        return slopes @ queries


class OneHotProducts:
    """The same for one-hot keys: only slots with a query's own number count.

    numbers (examples, positions); slopes (examples, positions, 1, outputs).
    """

    def __init__(self, numbers: Tensor, slopes: Tensor):
        self._by_example = [_sum_by_number(*one) for one in zip(numbers, slopes[:, :, 0], strict=True)]

    def of_slots(self, examples: slice, keys: Tensor, errors: Tensor) -> Tensor:
        """keys (n,), errors (n, 1, outputs) → (examples, n)."""
        products = errors.new_zeros(examples.stop - examples.start, len(keys))
        for own, (numbers, slopes) in zip(products, self._by_example[examples], strict=True):
            is_same = torch.isin(keys, numbers) & (keys >= 0)  # −1 is a key of zeros
            slots = torch.nonzero(is_same)[:, 0]
            places = torch.searchsorted(numbers, keys[slots])
            own[slots] = (slopes[places] * errors[slots, 0]).sum(1)
        return products

    def of_rows(
        self,
        examples: slice,
        keys: Tensor,
        errors: Tensor,
        positions: int,
    ) -> Tensor:
        """Return the same, summed over the positions of each row: (examples, n / positions)."""
        return _sum_positions(self.of_slots(examples, keys, errors), positions)

    def of_gradients(self, examples: slice, weights: Tensor, constants: Tensor) -> Tensor:
        """One-hot keys are never summed to a matrix."""
        raise AssertionError("the gradients of rows of one-hot keys")


def _sum_by_number(numbers: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct numbers, ascending, and the sum of the slopes of each. numbers (positions,), slopes (positions, outputs)."""
    distinct, places = torch.unique(numbers, return_inverse=True)
    sums = slopes.new_zeros(len(distinct), slopes.shape[1])
    return distinct, sums.index_add_(0, places, slopes)


def _sum_positions(products: Tensor, positions: int) -> Tensor:
    """(examples, n) → (examples, n / positions)."""
    examples, n = products.shape
    return products.reshape(examples, n // positions, positions).sum(2)


def plain_products(query: MapQuery) -> Products | OneHotProducts:
    """Return inner products of gradients as they are."""
    linear_map = query.linear_map
    if linear_map.is_one_hot:
        return OneHotProducts(query.queries, query.slopes)
    queries = linear_map.with_constant(query.queries)
    return Products(queries, query.slopes, linear_map.constant)


def whitened_products(query: MapQuery, factors: Factors, damping: float) -> Products | OneHotProducts:
    """Return the same with the inverse curvature between them; minus: what supports is positive."""
    dtype = query.slopes.dtype
    linear_map = query.linear_map
    positions = max(factors.positions, 1e-30)  # 0 in a segment without slots
    slopes = _solve(factors.errors, query.slopes.double(), damping) / -positions
    if linear_map.is_one_hot:
        inverse = 1 / (factors.keys + damping * factors.keys.mean())
        numbers = query.queries
        weights = torch.where(numbers >= 0, inverse[numbers.clamp(min=0)], 0)
        return OneHotProducts(numbers, (slopes * weights[..., None, None]).to(dtype))
    queries = linear_map.with_constant(query.queries).double()
    if not linear_map.constant:
        queries = queries[..., :-1]
    solved = _solve(factors.keys, queries, damping)
    lengths = (queries * solved).sum(-1).clamp(min=0).sqrt()
    # At another damping than the usual one, norms are longer by this much at most
    lengths *= max(1.0, DAMPING / damping) ** 0.5
    if not linear_map.constant:
        solved = torch.nn.functional.pad(solved, (0, 1))
    # One bound for all positions and groups of a query
    summed_lengths = lengths.flatten(1).sum(1)
    return Products(
        solved.to(dtype),
        slopes.to(dtype),
        linear_map.constant,
        summed_lengths.to(dtype),
    )


def _solve(curvature: Tensor, vectors: Tensor, damping: float) -> Tensor:
    """(curvature + damping · its mean eigenvalue)⁻¹ vectors; curvature (groups, d, d), vectors (…, groups, d)."""
    groups, width, _ = curvature.shape
    columns = vectors.reshape(-1, groups, width).permute(1, 2, 0)
    triangle = torch.linalg.cholesky(damped(curvature, damping))
    solved = torch.cholesky_solve(columns, triangle)
    return solved.permute(2, 0, 1).reshape(vectors.shape)
