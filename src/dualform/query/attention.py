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
from dualform.query.answers import FEW_GROUPS, Answer, Ranked, Scores, check, ranked_by
from dualform.query.groups import Groups
from dualform.query.masks import Mask
from dualform.query.pruned import best_of, spread
from dualform.query.visits import Visits
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk

MANY = 64
"""From so many queries on, keys that are too short to matter are left out."""
QUERIES = 2048
"""So many are multiplied with a stretch of keys at a time."""


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

    def best(
        self, k: int, *, where: pl.Expr | str | None = None, absolute: bool = False, lowest: bool = False
    ) -> Ranked:
        """As top(k), but bare numbers: for many queries, where a frame with every slot's columns would be too much."""
        check(k, absolute, lowest)
        if len(self._flat) < MANY or self.layer.form != "vectors" or self._store.manifest.keep == "totals":
            return super().best(k, where=where, absolute=absolute, lowest=lowest)
        queries = part(self._flat, self._columns)
        if where is None and self._store.has_equal_keys(self.layer.name):
            visits = Visits(self._store, self.layer.name, self._end)
            keys = ((n, part(keys, self._columns)) for n, keys in visits.keys(self._dtype))
            found = best_of(queries, keys, k, lambda scores: ranked_by(scores, absolute, lowest))
            found = spread(found, visits.slots_of, k)
        else:
            found = best_of(queries, self._tiles(where), k, lambda scores: ranked_by(scores, absolute, lowest))
        return Ranked(found.numbers, found.values)

    def _scanned(self, groups: Groups, where: pl.Expr | str | None, absolute: bool) -> tuple[Tensor, Tensor, Tensor]:
        if where is not None or not self._store.has_equal_keys(self.layer.name) or len(groups) > FEW_GROUPS:
            return super()._scanned(groups, where, absolute)
        visits = Visits(self._store, self.layer.name, self._end)
        counts, first = visits.by_group(groups)
        queries = part(self._flat, self._columns)
        totals = torch.zeros(len(queries), len(groups), dtype=torch.float64)
        for numbers, keys in visits.keys(self._dtype):
            taken = part(keys, self._columns).T
            for low in range(0, len(queries), QUERIES):
                scores = queries[low : low + QUERIES] @ taken
                totals[low : low + QUERIES] += (scores.abs_() if absolute else scores) @ counts[numbers].to(
                    scores.dtype
                )
        return totals, counts.sum(0), first

    def _tiles(self, where: pl.Expr | str | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Slot numbers and keys, in their order."""
        mask = None if where is None else Mask(self._store, where, self._end)
        for chunk in self._store.chunks(self.layer.name, end_step=self._end):
            kept = None if mask is None else mask(chunk)
            for low, high in chunk.pieces(max(1, (self.layer.d_in + self.layer.d_out) // 4)):
                numbers = torch.arange(low, high)
                if kept is not None:
                    numbers = numbers[torch.from_numpy(kept[low:high])]
                    if not len(numbers):
                        continue
                keys = part(chunk.keys(self._dtype, low, high).vectors(), self._columns)
                yield numbers + chunk.first_slot, keys if kept is None else keys[numbers - low]

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
        if self.layer.form == "numbers" and self._flat.shape[1] == 1:
            return view, view.key_sums(self.layer).double()[:, self._flat.reshape(-1).long()].T
        return view, view.dots(self.layer, part(self._flat, self._columns), self._columns)

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
