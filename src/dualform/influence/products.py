"""⟨Σ over a query's positions of slope ⊗ query, error ⊗ key⟩: what every method asks of slots, whatever it made of the query.

Per slot, or summed over the positions of a row. There are three ways to the same numbers (two inner products for each pair of
positions; the query's sum as a matrix; the row's sum as a matrix, too), and the cheapest is taken.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

MATRIX_BYTES = 128 << 20
"""How much memory the matrices of queries may take at a time."""


class Products:
    """The inner products of some queries with slots, for one linear map.

    queries (examples, positions, groups, width + 1): the last column belongs to the constant; slopes (…, groups, outputs).
    """

    def __init__(self, queries: Tensor, slopes: Tensor, constant: float, lengths: Tensor | None = None):
        """lengths (examples,): |query · key| is at most this times the key's norm, whichever norm that is."""
        self._queries, self._slopes, self._constant, self.lengths = queries, slopes, constant, lengths

    def of_slots(self, some: slice, keys: Tensor, errors: Tensor) -> Tensor:
        """keys (n, groups, width), errors (n, groups, outputs) → (examples, n)."""
        queries = self._queries[some]
        (examples, positions, groups, _), (n, _, width), outputs = queries.shape, keys.shape, errors.shape[2]
        if (groups == 1 and positions * (width + outputs) <= 2 * max(width, 1) * outputs) or not examples:
            weights = self.weights(some, keys)
            weights *= self.slopes_along(some, errors)
            return weights if positions == 1 else weights.reshape(examples, positions, n).sum(1)
        apart, taken = errors.transpose(0, 1), keys.transpose(0, 1)  # (groups, n, …)
        found = queries.new_empty(examples, n)
        for place in range(examples):
            matrix = self._matrices(slice(some.start + place, some.start + place + 1))[0]
            written = ((apart @ matrix[..., :width]) * taken).sum((0, 2))
            found[place] = written + self._constant * (apart @ matrix[..., width:]).sum((0, 2))
        return found

    def weights(self, some: slice, keys: Tensor) -> Tensor:
        """query · (key, constant), if there are no groups: (examples × positions, n)."""
        flat, width = self._queries[some].flatten(0, 2), keys.shape[2]
        found: Tensor = flat[:, :width] @ keys[:, 0].T
        return found.add_(flat[:, width:], alpha=self._constant) if self._constant else found

    def slopes_along(self, some: slice, errors: Tensor) -> Tensor:
        """slope · error, if there are no groups: (examples × positions, n)."""
        return self._slopes[some].flatten(0, 2) @ errors[:, 0].T

    @property
    def is_one_pair(self) -> bool:
        """Whether a query is one vector and one slope."""
        return self._queries.shape[1] == self._queries.shape[2] == 1

    def of_rows(self, some: slice, keys: Tensor, errors: Tensor, positions: int) -> Tensor:
        """The same, summed over the positions of each row: (examples, n / positions)."""
        examples, own = some.stop - some.start, self._queries.shape[1]
        (n, groups, width), outputs = keys.shape, errors.shape[2]
        rows, size = n // positions, groups * max(width, 1) * outputs
        by_matrix = size * (n + rows * examples + own * examples)
        by_slot = n * examples * min(groups * own * (width + outputs), 2 * size)
        if positions == 1:
            return self.of_slots(some, keys, errors)
        if by_slot <= by_matrix:
            return self.of_slots(some, keys, errors).reshape(examples, rows, positions).sum(2)
        apart = errors.reshape(rows, positions, groups, outputs).permute(0, 2, 3, 1)
        taken = keys.reshape(rows, positions, groups, width).transpose(1, 2)
        written, sums = (apart @ taken).reshape(rows, -1), apart.sum(3).reshape(rows, -1)
        step = max(1, MATRIX_BYTES // (size * keys.element_size()))
        found = []
        for low in range(some.start, some.stop, step):
            matrix = self._matrices(slice(low, min(low + step, some.stop)))
            of_keys = matrix[..., :width].reshape(len(matrix), -1) @ written.T
            found.append(of_keys + self._constant * (matrix[..., width].reshape(len(matrix), -1) @ sums.T))
        return torch.cat(found)

    def _matrices(self, some: slice) -> Tensor:
        """Σ over positions of slope ⊗ query, (examples, groups, outputs, width + 1)."""
        return self._whole[some] if self._whole is not None else self._summed(some)

    def _summed(self, some: slice) -> Tensor:
        return self._slopes[some].permute(0, 2, 3, 1) @ self._queries[some].transpose(1, 2)

    @cached_property
    def _whole(self) -> Tensor | None:
        examples, _, groups, width = self._queries.shape
        size = examples * groups * width * self._slopes.shape[3] * self._queries.element_size()
        return self._summed(slice(0, examples)) if size <= MATRIX_BYTES else None


class OneHotProducts:
    """The same for one-hot keys: only slots with a query's own number count.

    numbers (examples, positions); slopes (examples, positions, 1, outputs).
    """

    def __init__(self, numbers: Tensor, slopes: Tensor):
        positions = numbers.shape[1]
        order = numbers.reshape(-1).argsort(stable=True)
        self._numbers = numbers.reshape(-1)[order].numpy()
        self._slopes = slopes.flatten(0, 2)[order]
        self._example = order // max(positions, 1)

    def of_slots(self, some: slice, keys: Tensor, errors: Tensor) -> Tensor:
        """keys (n,), errors (n, 1, outputs) → (examples, n)."""
        found = errors.new_zeros(len(keys), some.stop - some.start)
        order = keys.argsort(stable=True)
        numbers = keys[order].numpy()
        shared = np.intersect1d(numbers, self._numbers)
        for number in shared[shared >= 0].tolist():  # −1 is a key of zeros
            low, high = np.searchsorted(numbers, [number, number + 1])
            first, last = np.searchsorted(self._numbers, [number, number + 1])
            examples = self._example[first:last]
            here = torch.nonzero((examples >= some.start) & (examples < some.stop))[:, 0]
            if len(here):
                mine = order[low:high]
                written = errors[mine, 0] @ self._slopes[first:last][here].T
                sums = written.new_zeros(len(mine), found.shape[1]).index_add_(1, examples[here] - some.start, written)
                found[mine] = sums
        return found.T

    def of_rows(self, some: slice, keys: Tensor, errors: Tensor, positions: int) -> Tensor:
        """The same, summed over the positions of each row: (examples, n / positions)."""
        return self.of_slots(some, keys, errors).reshape(some.stop - some.start, -1, positions).sum(2)
