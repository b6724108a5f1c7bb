"""Tensors with a row for each group. They grow as groups appear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.store.format import Manifest

FOLDED = ("weight", "average")
"""What is folded for each group: its part of the parameter ("weight"), and its part of the optimizer's running average ("average")."""


@dataclass(frozen=True)
class Deltas:
    """The parts of a parameter, and of the optimizer's running average of it, that belong to each group."""

    weight: Tensor
    """(groups, *shape)"""
    average: Tensor
    """(groups, *shape)"""
    has_rest: bool
    """Whether there is one more row, the first, for what the gradients of a bias hold beyond the sum of their slots (rounding)."""

    def items(self) -> list[tuple[str, Tensor]]:
        """Return both, by the names in FOLDED."""
        return [("weight", self.weight), ("average", self.average)]


class GroupTensors:
    """Tensors by the names of Accumulated, which begin with the number of their grouping."""

    def __init__(self, groupings: int):
        self.counts = [0] * groupings
        """How many groups of each grouping have appeared."""
        self._grown: dict[str, _Grown] = {}

    def restore(self, name: str, tensor: Tensor) -> None:
        """Continue with a tensor from the store."""
        self._grown[name] = _Grown(tensor.clone())
        if name.endswith(".visits"):
            self.count(_grouping(name), len(tensor))

    def count(self, grouping: int, groups: int) -> None:
        """Note that there are at least this many groups."""
        self.counts[grouping] = max(self.counts[grouping], groups)

    def rows(self, name: str, shape: Sequence[int], dtype: torch.dtype, extra: int = 0) -> Tensor:
        """Return the tensor of this name, (groups + extra, *shape), to be changed in place; new rows are zero."""
        if name not in self._grown:
            empty = torch.zeros(0, *shape, dtype=dtype)
            self._grown[name] = _Grown(empty)
        groups = self.counts[_grouping(name)]
        return self._grown[name].rows(groups + extra)

    def deltas(self, grouping: int, number: int, manifest: Manifest) -> Deltas:
        """Return the parts of a parameter, given by its number, that belong to each group, to be changed in place."""
        parameter = manifest.parameters[number]
        dtype = torch.float64 if parameter.dtype == "float64" else torch.float32
        has_rest = manifest.is_vector(parameter.name)
        suffix = ".rest" if has_rest else ""
        prefix = f"{grouping}.p{number}"
        weight = self.rows(f"{prefix}.weight{suffix}", parameter.shape, dtype, extra=has_rest)
        average = self.rows(f"{prefix}.average{suffix}", parameter.shape, dtype, extra=has_rest)
        return Deltas(weight, average, has_rest)

    def tensors(self, groups: Sequence[int]) -> dict[str, Tensor]:
        """Return all tensors, not copied. groups: how many there are of each grouping."""
        tensors = {}
        for name, grown in self._grown.items():
            has_rest = name.endswith(".rest")
            tensors[name] = grown.rows(groups[_grouping(name)] + has_rest)
        return tensors


def _grouping(name: str) -> int:
    number, _, _ = name.partition(".")
    return int(number)


class _Grown:
    """A tensor to which rows of zeros can be added; it has spare capacity, so that this is cheap."""

    def __init__(self, data: Tensor):
        self._data = data
        self._used = len(data)

    def rows(self, count: int) -> Tensor:
        """Return the first `count` rows, new ones zero."""
        capacity, *shape = self._data.shape
        if count > capacity:
            # NumPy's zeros take no memory until they are written to
            dtype = self._data.numpy().dtype
            zeros = np.zeros((max(count, 2 * capacity), *shape), dtype)
            larger = torch.from_numpy(zeros)
            larger[: self._used] = self._data[: self._used]
            self._data = larger
        self._used = max(self._used, count)
        return self._data[:count]
