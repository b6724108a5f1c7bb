"""Stored totals: sums of keys and deltas of weights by group, which answer questions without a scan."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property

import polars as pl
import torch
from torch import Tensor

from dualform.layers.keys import select_columns
from dualform.layers.layer import Layer
from dualform.recursions import KINDS
from dualform.store.reader import Store

STRETCH_BYTES = 4 << 20
"""How much of the key sums is read at a time, so that the checksum and the product both find it in the processor's cache."""
FLOAT64_NUMBERS = 1 << 24
"""Key sums of up to this many numbers are multiplied in float64."""


class GroupTotals:
    """The totals of one grouping."""

    def __init__(self, store: Store, grouping: int):
        self._store = store
        self._grouping = grouping
        self._file = store.totals()

    @cached_property
    def groups(self) -> pl.DataFrame:
        """The groups, in the order of their first appearance."""
        return self._store.groups(self._grouping)

    def visits(self, layer: Layer) -> Tensor:
        """Return how many slots of a layer each group has, (groups,)."""
        name = f"{self._grouping}.{self._number(layer)}.visits"
        return self._padded(self._file[name] if name in self._file else torch.zeros(0, dtype=torch.int64))

    def key_sums(self, layer: Layer) -> Tensor:
        """Return the sum of each group's keys, (groups, d_in)."""
        name = f"{self._grouping}.{self._number(layer)}.keys"
        return self._padded(self._file[name] if name in self._file else torch.zeros(0, layer.d_in))

    def dots(self, layer: Layer, queries: Tensor, columns: Sequence[int] = ()) -> Tensor:
        """Return each group's sum of key · query over some columns of both, (queries, groups) float64. queries: (n, d).

        Sums are read once, a stretch at a time. Small ones are multiplied in float64, large ones in the type of the queries.
        """
        name = f"{self._grouping}.{self._number(layer)}.keys"
        products = torch.zeros(len(queries), self.groups.height, dtype=torch.float64)
        if name not in self._file:
            return products
        dtype = torch.float64 if layer.d_in * self.groups.height <= FLOAT64_NUMBERS else queries.dtype
        queries = queries.to(dtype)
        for low, stretch in self._file.stretches(name, max(1, STRETCH_BYTES // (4 * layer.d_in))):
            sums = select_columns(stretch, columns).to(dtype)
            products[:, low : low + len(sums)] = queries @ sums.T
        return products

    def has_negative_keys(self, layer: Layer) -> bool:
        """Whether any key of a layer has a negative element. If none has, |key · query| of a group adds up for queries without negative elements."""
        name = f"negative.{self._number(layer)}"
        return name not in self._file or bool(self._file[name].any())

    def deltas(self, parameter: str) -> Tensor:
        """Return each group's part of a parameter, (groups, *shape)."""
        found, rest = self._deltas(parameter)
        return self._padded(found[1:] if rest else found)

    def initial(self, parameter: str) -> Tensor:
        """Return a copy of the initial part, float64; for a bias, with what its gradients hold beyond the sum of their slots."""
        number = self._store.parameter(parameter)
        total = self._initial(parameter, number)
        deltas, has_rest = self._deltas(parameter)
        if has_rest:
            total += deltas[0]
        return total

    def _initial(self, parameter: str, number: int) -> Tensor:
        if f"initial.{number}.weight" in self._file:  # coefficients are matrices: the initial part itself is kept
            return self._file[f"initial.{number}.weight"].to(torch.float64, copy=True)
        snapshot = self._store.snapshot(0)
        total = snapshot[f"model.{parameter}"].to(torch.float64, copy=True)
        if f"initial.{number}" not in self._file:
            return total
        of_weight, of_average = self._file[f"initial.{number}"][0, :2].tolist()
        total *= of_weight
        average = f"state.{parameter}.{KINDS['sgd'].average}"
        if average in snapshot:
            total += snapshot[average].double() * of_average
        return total

    def rounding_of_gradients(self, parameter: str) -> float:
        """Return how far rounding of gradients to 16 bits (autocast) may have moved a parameter, as a Frobenius norm."""
        number = self._store.parameter(parameter)
        if f"rounded.{number}" in self._file:
            return math.sqrt(max(0.0, float(self._file[f"rounded.{number}"][0, 0])))
        if f"rounded.{number}.weight" in self._file:
            moved = self._file[f"rounded.{number}.weight"].double() - self._file[f"now.{number}.weight"].double()
            return float(moved.norm())
        return 0.0

    def _number(self, layer: Layer) -> int:
        return self._store.layer(layer.name)[0]

    def _deltas(self, parameter: str) -> tuple[Tensor, bool]:
        """Return the deltas of groups, and whether a row with the rest comes before them."""
        number = self._store.parameter(parameter)
        name = f"{self._grouping}.p{number}.weight"
        if name in self._file:
            return self._file[name], False
        if f"{name}.rest" in self._file:
            return self._file[f"{name}.rest"], True
        shape = self._store.manifest.parameters[number].shape
        return torch.zeros(0, *shape), False

    def _padded(self, rows: Tensor) -> Tensor:
        """Add rows of zeros for groups that appeared after the layer's last slot."""
        missing = self.groups.height - len(rows)
        return rows if missing <= 0 else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def find_totals(
    store: Store,
    columns: Collection[str],
    end: int,
    *,
    deltas: bool,
    subset: bool = False,
) -> GroupTotals | None:
    """Return the totals for exactly these columns (with subset: for these and others) at exactly this step; None if there are none."""
    number = store.grouping(columns, end, deltas=deltas, subset=subset)
    return None if number is None else GroupTotals(store, number)
