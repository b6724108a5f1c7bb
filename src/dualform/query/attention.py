"""Attention: key · query for every slot, as in the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl
import torch
from torch import Tensor

from dualform.dual.totals import View, find
from dualform.errors import QuestionError
from dualform.layers.keys import Vectors, part
from dualform.layers.streams import Layer
from dualform.query.answers import Answer, Scores
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk


class LayerAttention(Answer):
    """The attention weights of one layer. Nothing is computed until it is asked for."""

    value = "weight"

    def __init__(
        self, store: Store, layer: Layer, end: int, queries: Tensor, dtype: torch.dtype, columns: Sequence[int] = ()
    ):
        """queries: (examples, positions, d_in). columns: where the part of the keys begins and ends, if not all counts."""
        examples, positions, _ = queries.shape
        super().__init__(store, layer, end, {"query": examples, "position": positions}, dtype)
        self.queries, self._columns = queries, tuple(columns)
        self._stored: tuple[slice, Tensor] | None = None
        self._flat = queries.reshape(-1, queries.shape[-1]).to("cpu", dtype)

    def __repr__(self) -> str:
        return f"LayerAttention({self.layer.name!r}, queries {tuple(self.queries.shape)}): top, total, weights"

    def weights(self, *, where: pl.Expr | str | None = None) -> Iterator[Scores]:
        """Every attention weight, chunk by chunk: (slots (m,), weights (examples, positions, m))."""
        return self._scores(where)

    def part(self, name: str) -> LayerAttention:
        """For recurrent layers: the weights of the "input" or of the "recurrent" part of the keys alone."""
        return LayerAttention(
            self._store, self.layer, self._end, self.queries, self._dtype, part_columns(self.layer, name)
        )

    def _tile(self, queries: slice, chunk: SlotChunk, low: int, high: int) -> Tensor:
        if chunk.key_numbers is None:
            return chunk.keys(self._dtype, low, high).dot(self._flat[queries], self._columns)
        return self._of_stored_keys(queries)[:, torch.from_numpy(chunk.key_numbers[low:high])]

    def _kept(self, columns: list[str], absolute: bool) -> tuple[View, Tensor] | None:
        view = find(self._store, columns, self._end, deltas=False)
        if view is None or (absolute and (view.has_negative_keys(self.layer) or bool((self._flat < 0).any()))):
            return None
        sums = view.key_sums(self.layer).double()
        if self.layer.form == "numbers" and self._flat.shape[1] == 1:
            return view, sums[:, self._flat.reshape(-1).long()].T
        return view, part(self._flat, self._columns).double() @ part(sums, self._columns).T

    def _query_blocks(self, width: int) -> Iterator[slice]:
        equal = self._store.has_equal_keys(self.layer.name)
        return super()._query_blocks(max(width, self._store.key_count(self.layer.name) if equal else 0))

    def _of_stored_keys(self, queries: slice) -> Tensor:
        """The weights of all stored keys, (queries, keys): equal keys are multiplied once, however often visited."""
        if self._stored is None or self._stored[0] != queries:
            keys = self._store.distinct_keys(self.layer.name, self._dtype)
            self._stored = (
                queries,
                torch.cat([Vectors(some).dot(self._flat[queries], self._columns) for _, some in keys], dim=1),
            )
        return self._stored[1]


def part_columns(layer: Layer, name: str) -> tuple[int, ...]:
    """Where a part of a recurrent layer's keys begins and ends."""
    if layer.kind != "recurrent" or name not in ("input", "recurrent", "both"):
        raise QuestionError(
            f'part({name!r}) of layer {layer.name!r}: recurrent layers have the parts "input", "recurrent" and "both".'
        )
    split = layer.bilinear()[0].keys[1]
    return {"input": (0, split), "recurrent": (split, layer.d_in), "both": ()}[name]
