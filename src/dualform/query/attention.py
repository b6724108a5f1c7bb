"""Attention: key · query for every slot, as in the paper."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl
import torch
from torch import Tensor

from dualform.query.answers import Answer, Scores
from dualform.store.format import Layer
from dualform.store.reader import SlotChunk, Store


class LayerAttention(Answer):
    """The attention weights of one layer. Nothing is computed until it is asked for."""

    value = "weight"

    def __init__(self, store: Store, layer: Layer, end: int, queries: Tensor, dtype: torch.dtype):
        """queries: (examples, positions, d_in)."""
        examples, positions, _ = queries.shape
        super().__init__(store, layer, end, {"query": examples, "position": positions}, dtype)
        self.queries = queries
        self._flat = queries.reshape(-1, queries.shape[-1]).to("cpu", dtype)

    def __repr__(self) -> str:
        return f"LayerAttention({self.layer.name!r}, queries {tuple(self.queries.shape)}): top, total, weights"

    def weights(self, *, where: pl.Expr | str | None = None) -> Iterator[Scores]:
        """Every attention weight, chunk by chunk: (slots (m,), weights (examples, positions, m))."""
        return self._scores(where)

    def _tile(self, queries: slice, chunk: SlotChunk, low: int, high: int) -> Tensor:
        return self._flat[queries] @ chunk.keys(self._dtype, low, high).T
