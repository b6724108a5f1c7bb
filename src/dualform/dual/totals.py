"""Reading totals: what a group of slots receives, and what it wrote, without a scan."""

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
"""So much of the key sums is multiplied at a time: while it is in the cache, its checksum is taken, too."""
SMALL = 1 << 24
"""Key sums of up to this many numbers are multiplied in float64."""


class View:
    """The totals of one grouping."""

    def __init__(self, store: Store, grouping: int):
        self._store = store
        self._grouping = grouping
        self._file = store.totals()

    @cached_property
    def groups(self) -> pl.DataFrame:
        """The groups, in the order in which they first appeared."""
        return self._store.groups(self._grouping)

    def visits(self, layer: Layer) -> Tensor:
        """(groups,): how many slots of a layer each group has."""
        name = f"{self._grouping}.{self._number(layer)}.visits"
        return self._padded(self._file[name] if name in self._file else torch.zeros(0, dtype=torch.int64))

    def key_sums(self, layer: Layer) -> Tensor:
        """(groups, d_in): the sum of each group's keys."""
        name = f"{self._grouping}.{self._number(layer)}.keys"
        return self._padded(self._file[name] if name in self._file else torch.zeros(0, layer.d_in))

    def dots(self, layer: Layer, queries: Tensor, columns: Sequence[int] = ()) -> Tensor:
        """(queries, groups) float64: each group's sum of keys · query, over some columns of both. queries: (n, d).

        Sums are read once, a stretch at a time. Large ones are multiplied in their own type, small ones in float64.
        """
        name = f"{self._grouping}.{self._number(layer)}.keys"
        found = torch.zeros(len(queries), self.groups.height, dtype=torch.float64)
        if name not in self._file:
            return found
        kind = torch.float64 if layer.d_in * self.groups.height <= SMALL else queries.dtype
        asking = queries.to(kind)
        for low, stretch in self._file.stretches(name, max(1, STRETCH_BYTES // (4 * layer.d_in))):
            sums = select_columns(stretch, columns).to(kind)
            found[:, low : low + len(sums)] = asking @ sums.T
        return found

    def has_negative_keys(self, layer: Layer) -> bool:
        """Whether any key of a layer has a negative element: else sums of sizes are sums, for such queries too."""
        name = f"negative.{self._number(layer)}"
        return name not in self._file or bool(self._file[name].any())

    def deltas(self, parameter: str) -> Tensor:
        """(groups, *shape): each group's part of a parameter."""
        found, rest = self._deltas(parameter)
        return self._padded(found[1:] if rest else found)

    def initial(self, parameter: str) -> Tensor:
        """The initial part, a new tensor in float64; of a bias, with what its gradients hold beyond the sum of their slots."""
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
        """How far rounding of gradients to 16 bits (autocast) may have moved a parameter; a Frobenius norm."""
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
        number = self._store.parameter(parameter)
        for name, rest in (
            (f"{self._grouping}.p{number}.weight", False),
            (f"{self._grouping}.p{number}.weight.rest", True),
        ):
            if name in self._file:
                return self._file[name], rest
        shape = self._store.manifest.parameters[number].shape
        return torch.zeros(0, *shape), False

    def _padded(self, rows: Tensor) -> Tensor:
        """Groups that a layer has not seen have nothing."""
        missing = self.groups.height - len(rows)
        return rows if missing <= 0 else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def find(
    store: Store,
    columns: Collection[str],
    end: int,
    *,
    deltas: bool,
    subset: bool = False,
) -> View | None:
    """Totals for just these columns (or, with subset, for more), of just this moment; None if there are none."""
    number = store.grouping(columns, end, deltas=deltas, subset=subset)
    return None if number is None else View(store, number)
