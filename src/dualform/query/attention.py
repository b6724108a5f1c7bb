"""Attention: key · query for every slot, as in the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.dual.totals import View, find
from dualform.errors import QuestionError
from dualform.layers.keys import Vectors, part
from dualform.layers.streams import Layer
from dualform.query.answers import FEW_GROUPS, SMALL, Answer, Ranked, Scores
from dualform.query.bounds import Products, seen
from dualform.query.groups import Groups
from dualform.query.pruned import Bounds, Wanted, best_of, spread
from dualform.query.ranking import Best, Way, ranked_by
from dualform.query.remembered import remembered
from dualform.query.sketch import MOST
from dualform.query.visits import Visits, keys_of, visits_of
from dualform.store.heap import Room
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk

QUERIES = 2048
"""So many are multiplied with a stretch of keys at a time."""


class LayerAttention(Answer):
    """The attention weights of one layer. Nothing is computed until it is asked for. Threads may share it."""

    value = "weight"
    _bounded = True

    def __init__(
        self,
        store: Store,
        layer: Layer,
        end: int,
        queries: Tensor,
        dtype: torch.dtype,
        columns: Sequence[int] = (),
        *,
        silent: bool = False,
    ):
        """queries: (examples, positions, d_in). columns: where the part of the keys begins and ends, if not all counts."""
        examples, positions, _ = queries.shape
        super().__init__(store, layer, end, {"query": examples, "position": positions}, dtype, silent=silent)
        self.queries, self._columns = queries, tuple(columns)
        self._stored: tuple[slice, Tensor] | None = None
        self._mapped = layer.form != "vectors" or store.manifest.dtype == str(dtype).removeprefix("torch.")
        self._flat = queries.reshape(-1, queries.shape[-1]).to("cpu", dtype)

    def __repr__(self) -> str:
        return f"LayerAttention({self.layer.name!r}, queries {tuple(self.queries.shape)}): top, total, weights"

    def weights(self, *, where: pl.Expr | str | None = None) -> Iterator[Scores]:
        """Every attention weight, chunk by chunk: (slots (m,), weights (examples, positions, m))."""
        return self._scores(where)

    def _pruned(self, k: int, way: Way, where: pl.Expr | str | None, groups: Groups | None) -> list[Best] | None:
        store, name = self._store, self.layer.name
        if where is not None or not store.has_equal_keys(name) or (groups is not None and len(groups) > FEW_GROUPS):
            return super()._pruned(k, way, where, groups)
        visits, by = self._visits(), () if groups is None else tuple(groups.by)
        key = ("shared keys", name, by, self._leaves_out_silent)
        shared = remembered(store, key, lambda: visits.shared(groups), self._end)
        bounds = self._products(shared.keys, way) if max(1, SMALL) <= len(shared.keys) <= MOST else None
        wanted = Wanted(k, way, shared.members)
        return None if bounds is None else best_of(bounds, len(self._flat), wanted, self._dtype)

    def _multiplied(self, k: int, way: Way, where: pl.Expr | str | None) -> Ranked:
        equal = where is None and self._store.has_equal_keys(self.layer.name)
        visits = self._visits() if equal else None
        if visits is None or not visits.in_order:  # else ties among keys are not those among slots
            return super()._multiplied(k, way, where)
        [slots] = spread([self._best_keys(visits, k, way)], visits.slots_of, k)
        return Ranked(slots.numbers, slots.values)

    def _best_keys(self, visits: Visits, k: int, way: Way) -> Best:
        """The best keys of each query: all are multiplied."""
        queries, pieces = part(self._flat, self._columns), []
        for block in self._query_blocks(k):
            best = Best(block.stop - block.start, k, self._dtype)
            for numbers, keys in visits.keys(self._dtype):
                scores = queries[block] @ part(keys, self._columns).T
                best.add(ranked_by(scores, way), numbers, scores)
            pieces.append(best)
        return Best.join(pieces, k, self._dtype)

    def _bounds(self, slots: Tensor, way: Way) -> Bounds | None:
        if self.layer.form != "vectors":
            return None
        return self._products(keys_of(self._store, self.layer.name, self._end, slots), way)

    def _products(self, keys: Tensor, way: Way) -> Products | None:
        if self._columns:
            return None
        return Products(seen(self._store, self.layer, "key", self._flat, keys), way)

    def _scanned(self, groups: Groups, where: pl.Expr | str | None, absolute: bool) -> tuple[Tensor, Tensor, Tensor]:
        if where is not None or not self._store.has_equal_keys(self.layer.name) or len(groups) > FEW_GROUPS:
            return super()._scanned(groups, where, absolute)
        visits = self._visits()
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

    def _visits(self) -> Visits:
        return visits_of(self._store, self.layer.name, self._end, silent=not self._leaves_out_silent)

    def part(self, name: str) -> LayerAttention:
        """For recurrent layers: the weights of the "input" or of the "recurrent" part of the keys alone."""
        columns = part_columns(self.layer, name)
        return LayerAttention(
            self._store, self.layer, self._end, self.queries, self._dtype, columns, silent=self._silent
        )

    def _tile(self, queries: slice, chunk: SlotChunk, low: int, high: int, scratch: Room) -> Tensor:
        if chunk.key_numbers is not None:
            return self._of_stored_keys(queries)[:, torch.from_numpy(chunk.key_numbers[low:high])]
        if self._mapped:
            keys = chunk.keys(self._dtype, low, high)
        else:  # keys must be decoded, and fresh memory would take longer than that
            keys = Vectors(chunk.some_keys(np.arange(low, high), scratch))
        return keys.dot(self._flat[queries], self._columns)

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
        known = self._stored  # read once: another thread may replace it at any time
        if known is not None and known[0] == queries:
            return known[1]
        keys = self._store.distinct_keys(self.layer.name, self._dtype)
        found = torch.cat([Vectors(some).dot(self._flat[queries], self._columns) for _, some in keys], dim=1)
        self._stored = (queries, found)
        return found


def part_columns(layer: Layer, name: str) -> tuple[int, ...]:
    """Where a part of a recurrent layer's keys begins and ends."""
    if layer.kind != "recurrent" or name not in ("input", "recurrent", "both"):
        raise QuestionError(
            f'part({name!r}) of layer {layer.name!r}: recurrent layers have the parts "input", "recurrent" and "both".'
        )
    split = layer.bilinear()[0].keys[1]
    return {"input": (0, split), "recurrent": (split, layer.d_in), "both": ()}[name]
