"""Attention: key · query for every slot, as in the paper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualform.dual.totals import GroupTotals, find_totals
from dualform.errors import QuestionError
from dualform.layers.keys import select_columns
from dualform.layers.layer import Layer
from dualform.query.answer import Answer
from dualform.query.executors import HERE, Runner
from dualform.query.ranking import Order
from dualform.query.scorer import Scorer
from dualform.query.search.bounds import AttentionBounds, Products, StoredVectors, key_numbers
from dualform.query.search.index import SlotIndex
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk


class AttentionScorer(Scorer):
    """Scores slots by key · query."""

    value = "weight"
    not_sent = ("_by_key",)

    def __init__(
        self, store: Store, layer: Layer, end: int, queries: Tensor, dtype: torch.dtype, columns: Sequence[int] = ()
    ):
        """queries: (n, d_in). columns: begin and end of the part of the keys that counts; default: all."""
        super().__init__(store, layer, end, len(queries), dtype)
        self._queries = queries.to("cpu", dtype)
        self._columns = tuple(columns)
        self._by_key: tuple[slice, Tensor] | None = None

    @property
    def numbers_per_query(self) -> int:
        """The weights of all stored keys are held, where slots share them."""
        name = self.layer.name
        return self.store.key_count(name) if self.store.has_equal_keys(name) else 0

    def score(self, queries: slice, run: SlotChunk, low: int, high: int) -> Tensor:
        """Return the attention weights of the slots low to high of a chunk, (queries, slots)."""
        if run.key_numbers is not None:
            numbers = torch.from_numpy(run.key_numbers[low:high])
            return self._weights_by_key(queries).index_select(0, numbers).T
        return run.keys(self.dtype, low, high).dot(self._queries[queries], self._columns)

    def _weights_by_key(self, queries: slice) -> Tensor:
        """Return the weights of all stored keys, (keys, queries): a key is multiplied once, however many slots share it."""
        known = self._by_key  # read once: another thread may replace it at any time
        if known is not None and known[0] == queries:
            return known[1]
        name = self.layer.name
        own = select_columns(self._queries[queries], self._columns)
        # A slot's weights are one run of memory
        found = own.new_empty(self.store.key_count(name), len(own))
        for first, keys in self.store.passing(name, "key", self.dtype):
            end = first + len(keys)
            torch.mm(select_columns(keys, self._columns), own.T, out=found[first:end])
        self._by_key = (queries, found)
        return found

    def index(self) -> SlotIndex | None:
        """Return an index of the keys, if they are vectors and count as a whole."""
        if self.layer.form != "vectors" or self._columns:
            return None
        name = self.layer.name
        keys_of = self._key_numbers if self.store.has_equal_keys(name) else None
        return SlotIndex(self.store, name, self.end, self.queries, self.dtype, self._bounds, keys_of)

    def _key_numbers(self, slots: Tensor) -> Tensor:
        return key_numbers(self.store, self.layer.name, self.end, slots)

    def _bounds(self, slots: Tensor, order: Order) -> AttentionBounds:
        keys = StoredVectors(self.store, self.layer, "key", self.dtype)
        products = Products(self._queries, keys, self._key_numbers(slots))
        return AttentionBounds(products, order)

    def stored_totals(self, columns: list[str], absolute: bool) -> tuple[GroupTotals, Tensor] | None:
        """Return totals from the sums of each group's keys. For absolute values, no key and no query may be negative."""
        view = find_totals(self.store, columns, self.end, deltas=False)
        if view is None:
            return None
        if absolute and (view.has_negative_keys(self.layer) or bool((self._queries < 0).any())):
            return None
        if self.layer.form == "numbers" and self._queries.shape[1] == 1:
            sums = view.key_sums(self.layer).double()
            numbers = self._queries.reshape(-1).long()
            return view, sums[:, numbers].T
        own = select_columns(self._queries, self._columns)
        return view, view.dots(self.layer, own, self._columns)


class LayerAttention(Answer):
    """The attention weights of one layer. Nothing is computed until it is asked for. Threads may share it."""

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
        executor: Runner = HERE,
    ):
        """queries: (examples, positions, d_in). columns: begin and end of the part of the keys that counts; default: all."""
        examples, positions, width = queries.shape
        scorer = AttentionScorer(store, layer, end, queries.reshape(-1, width), dtype, columns)
        super().__init__(scorer, {"query": examples, "position": positions}, silent=silent, executor=executor)
        self.queries = queries

    def __repr__(self) -> str:
        return f"LayerAttention({self.layer.name!r}, queries {tuple(self.queries.shape)}): top, total, scores"

    def part(self, name: str) -> LayerAttention:
        """Return the weights of the "input" or of the "recurrent" part of a recurrent layer's keys alone."""
        columns = part_columns(self.layer, name)
        scorer = self._scorer
        return LayerAttention(
            scorer.store,
            self.layer,
            scorer.end,
            self.queries,
            scorer.dtype,
            columns,
            silent=self._silent,
            executor=self._executor,
        )


def part_columns(layer: Layer, name: str) -> tuple[int, ...]:
    """Return where a part of a recurrent layer's keys begins and ends."""
    if layer.kind != "recurrent" or name not in ("input", "recurrent", "both"):
        raise QuestionError(
            f'part({name!r}) of layer {layer.name!r}: recurrent layers have the parts "input", "recurrent" and "both".'
        )
    split = layer.bilinear()[0].keys[1]
    return {"input": (0, split), "recurrent": (split, layer.d_in), "both": ()}[name]
