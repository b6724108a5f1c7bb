"""Contributions: what each slot adds to a number that the model computes.

A slot adds value · (key · query) to its layer's output (+ the bias's part). Its contribution to a target is the inner
product of that with ∂target/∂output at the query: exact where the target is an output of the layer (the last layer's
logits), first order in hidden layers, with the remainder shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import polars as pl
import torch
from torch import Tensor

from dualform.dual.coefficients import Coefficients, coefficients
from dualform.dual.totals import View, find
from dualform.dual.weights import initial_part, rebuilt_bias
from dualform.query.answers import Answer, Scores
from dualform.store.format import Layer
from dualform.store.reader import SlotChunk, Store


class LayerContributions(Answer):
    """The contributions of one layer's slots to a target, summed over the query's positions."""

    value = "contribution"

    def __init__(
        self,
        store: Store,
        layer: Layer,
        end: int,
        queries: Tensor,
        gradients: Tensor,
        target: Tensor,
        dtype: torch.dtype,
    ):
        """queries (examples, positions, d_in); gradients (examples, positions, d_out); target (examples,)."""
        super().__init__(store, layer, end, {"query": queries.shape[0]}, dtype)
        self._terms = max(1, queries.shape[1])  # the positions are summed last
        self._queries, self._gradients = queries.to("cpu", dtype), gradients.to("cpu", dtype)
        self._target = target.to("cpu", torch.float64)

    def __repr__(self) -> str:
        return f"LayerContributions({self.layer.name!r}, {len(self._target)} queries): top, total, contributions, parts"

    def contributions(self, *, where: pl.Expr | str | None = None) -> Iterator[Scores]:
        """Every contribution, chunk by chunk: (slots (m,), contributions (examples, m))."""
        return self._scores(where)

    def parts(self) -> pl.DataFrame:
        """For each query: initial part + slots + remainder = target.

        The remainder is rounding where the target is an output of this layer; in hidden layers it is what the first
        order leaves out (what later layers add by themselves).
        """
        view = find(self._store, (), self._end, deltas=True, subset=True)
        if view is not None:
            initial = self._initial_from(view)
            kept = self._kept(view.groups.columns, absolute=False)
            assert kept is not None
            return self._parts(initial, kept[1].sum(1))
        self._needs_scan("parts")
        initial = self._initial()
        slots = sum((scores.double().sum(1) for _, scores in self.contributions()), torch.zeros_like(self._target))
        return self._parts(initial, slots)

    def _parts(self, initial: Tensor, slots: Tensor) -> pl.DataFrame:
        return pl.DataFrame(
            {
                "query": range(len(self._target)),
                "initial": initial.numpy(),
                "slots": slots.numpy(),
                "remainder": (self._target - initial - slots).numpy(),
                "target": self._target.numpy(),
            },
            schema={
                "query": pl.Int64,
                **dict.fromkeys(("initial", "slots", "remainder", "target"), pl.Float64),
            },
        )

    @cached_property
    def _coefficients(self) -> tuple[Coefficients, Coefficients | None]:
        weight = coefficients(self._store, self.layer.weight, end=self._end)
        bias = None if self.layer.bias is None else coefficients(self._store, self.layer.bias, end=self._end)
        return weight, bias

    def _initial_from(self, view: View) -> Tensor:
        """The same from totals."""
        outputs = self._queries.double() @ view.initial(self.layer.weight).T
        if self.layer.bias is not None:
            outputs += view.initial(self.layer.bias)
        return (outputs * self._gradients.double()).sum((1, 2))

    def _initial(self) -> Tensor:
        """⟨gradient, initial weight · query + initial bias⟩, (examples,) float64."""
        of_weight, of_bias = self._coefficients
        weight = initial_part(self._store, self.layer.weight, of_weight)
        outputs = self._queries.double() @ weight.T
        if of_bias is not None:
            # What bias gradients hold beyond the sum of their slots is rounding: it stays with the initial part.
            outputs += rebuilt_bias(self._store, self.layer, begin=0, end=self._end, keep=lambda chunk: chunk.place < 0)
        return (outputs * self._gradients.double()).sum((1, 2))

    def _kept(self, columns: list[str], absolute: bool) -> tuple[View, Tensor] | None:
        view = None if absolute else find(self._store, columns, self._end, deltas=True)
        if view is None:
            return None
        totals = torch.zeros(len(self._target), view.groups.height, dtype=torch.float64)
        bias = None if self.layer.bias is None else view.deltas(self.layer.bias).to(self._dtype)
        for group, delta in enumerate(view.deltas(self.layer.weight).to(self._dtype)):
            outputs = self._queries @ delta.T
            if bias is not None:
                outputs += bias[group]
            totals[:, group] = (outputs * self._gradients).sum((1, 2))
        return view, totals

    def _tile(self, queries: slice, chunk: SlotChunk, low: int, high: int) -> Tensor:
        of_weight, of_bias = self._coefficients
        scale = torch.from_numpy(-chunk.per_slot(of_weight.of_blocks(chunk))[low:high]).to(self._dtype)
        keys, errors = chunk.keys(self._dtype, low, high), chunk.errors(self._dtype, low, high)
        weights = (self._queries[queries] @ keys.T).mul_(scale)  # (examples, positions, slots)
        if of_bias is not None:
            weights += torch.from_numpy(-chunk.per_slot(of_bias.of_blocks(chunk))[low:high]).to(self._dtype)
        return (weights * (self._gradients[queries] @ errors.T)).sum(1)
