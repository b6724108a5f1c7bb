"""Answers by the name of their layer, and sums over layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np
import polars as pl
import torch

from dualform.errors import NotRecordedError, UnknownLayerError
from dualform.query.answer import Answer, Sums
from dualform.query.conditions import Where
from dualform.query.contributions import LayerContributions
from dualform.store.reader import Store

A = TypeVar("A", bound=Answer)
NOTHING: Mapping[str, str] = MappingProxyType({})


class ByLayer(Mapping[str, A], Generic[A]):
    """Answers by the name of their layer."""

    def __init__(self, store: Store, answers: dict[str, A], missing: Mapping[str, str] = NOTHING):
        """missing: layers that have no answer, and why."""
        self._store = store
        self._answers = answers
        self._missing = missing

    def __getitem__(self, layer: str) -> A:
        if layer in self._missing:
            raise NotRecordedError(self._missing[layer])
        if layer not in self._answers:
            self._store.layer(layer)
            raise UnknownLayerError(f"layer {layer!r} was not called for these inputs.")
        return self._answers[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._answers)

    def __len__(self) -> int:
        return len(self._answers)

    def __repr__(self) -> str:
        return "\n".join(repr(answer) for answer in self._answers.values())


class Contributions(ByLayer[LayerContributions]):
    """Contributions by layer; `top` and `total` sum them over all layers, those that share a weight included.

    The sum is what each group wrote to all weights, along ∂target/∂weights: first order in hidden layers.
    """

    def top(
        self,
        k: int = 10,
        *,
        by: str | Sequence[str],
        where: Where | None = None,
        lowest: bool = False,
    ) -> pl.DataFrame:
        """Return the k groups of `by` with the highest contributions for each query; lowest: the lowest instead."""
        return self._summed.top(k, by=by, where=where, lowest=lowest)

    def total(self, by: str | Sequence[str], *, where: Where | None = None) -> pl.DataFrame:
        """Return the contribution of each group of slots, for each query."""
        return self._summed.total(by, where=where)

    def sums(self, by: str | Sequence[str], *, where: Where | None = None) -> Sums:
        """Return the same as total(by) as plain numbers."""
        return self._summed.sums(by, where=where)

    @cached_property
    def _summed(self) -> _SummedContributions:
        answers = list(self._answers.values())
        # Totals of a weight are of all layers that share it
        if self._store.manifest.keep != "totals":
            for answer in self._answers.values():
                answers += answer.tied.values()
        return _SummedContributions(answers)


class _SummedContributions(Answer):
    """Totals by group, added up over layers."""

    def __init__(self, answers: Sequence[LayerContributions]):
        scorer = answers[0]._scorer
        super().__init__(scorer, {"query": scorer.queries})
        self._answers = answers

    def sums(
        self,
        by: str | Sequence[str],
        *,
        where: Where | None = None,
        absolute: bool = False,
    ) -> Sums:
        """Return the sums of all layers."""
        by_layer = [answer.sums(by, where=where, absolute=absolute) for answer in self._answers]
        return added(by_layer)


def added(parts: Sequence[Sums], *, independent: bool = True) -> Sums:
    """Add totals by the same columns in several layers: groups are those of any of them.

    independent: whether the errors of different layers are: those of random projections are, those of steps left out are not.
    """
    columns = parts[0].values.columns
    groups = pl.concat([part.values for part in parts]).unique(maintain_order=True)
    numbered = groups.with_row_index(" place")
    totals = torch.zeros(len(parts[0].totals), groups.height, dtype=torch.float64)
    power = 2 if independent else 1
    errors = torch.zeros_like(totals)
    visits = torch.zeros(groups.height, dtype=torch.int64)
    for part in parts:
        joined = part.values.join(numbered, on=columns, how="left", maintain_order="left", nulls_equal=True)
        places = torch.from_numpy(joined[" place"].to_numpy().astype(np.int64))
        totals[:, places] += part.totals
        if part.errors is not None:
            errors[:, places] += part.errors**power
        visits[places] = torch.maximum(visits[places], part.visits)
    # Slots that serve all rows have left an empty group behind
    all_null = pl.all_horizontal(pl.all().is_null())
    is_shared = groups.select(all_null).to_series().to_numpy()
    is_empty = (visits == 0).numpy()
    kept = np.flatnonzero(~(is_shared & is_empty))
    groups = groups[kept]
    is_exact = all(part.errors is None for part in parts)
    kept_errors = None if is_exact else errors[:, kept] ** (1 / power)
    return Sums(groups, totals[:, kept], visits[kept], groups, kept_errors)
