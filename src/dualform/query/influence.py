"""Influence: what would change in a target without some of the training data. Estimated; how well, docs/influence.md says.

The unit is the row, a sample in one backward pass: its scores add up over layers and segments, and over the visits of a sample
(`by="sample_id"`). Methods that are linear in slots also answer for each layer by itself, slot by slot: token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.dual.totals import View
from dualform.errors import MaskError, QuestionError, UnknownLayerError
from dualform.influence.pieces import Window, windows
from dualform.influence.scored import LinearScores, Scored
from dualform.layers.streams import Layer
from dualform.query.answers import Answer, Ranked, Scores, Sums, check
from dualform.query.foremost import can_be_bounded, foremost
from dualform.query.groups import Groups
from dualform.query.masks import Bools, condition_columns
from dualform.query.ranking import Way
from dualform.query.remembered import remembered
from dualform.query.written import has_silent, rows_written
from dualform.store.heap import Room
from dualform.store.reader import Store
from dualform.store.slots import PIECE_BYTES, SlotChunk


@dataclass(frozen=True)
class Rows:
    """The rows of a chunk in one segment, in the place of a chunk of slots."""

    number: int
    window: Window
    shared: None = None
    """No row serves all rows."""

    @property
    def first_slot(self) -> int:
        """The number of the first row."""
        return self.window.begin

    @property
    def slots(self) -> int:
        """How many rows."""
        return self.window.end - self.window.begin

    @property
    def row_range(self) -> tuple[int, int]:
        """The number of its first row, and of the one after its last."""
        return self.window.begin, self.window.end

    def rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """(rows,): their numbers."""
        return np.arange(self.window.begin, self.window.end)

    def pieces(self, width: int) -> Iterator[tuple[int, int]]:
        """Stretches of rows."""
        size = max(1, PIECE_BYTES // (8 * max(width, 1)))
        for low in range(0, self.window.end - self.window.begin, size):
            yield low, min(low + size, self.window.end - self.window.begin)


class RowInfluence(Answer):
    """The influence of rows, summed over some layers."""

    value = "influence"

    def __init__(
        self,
        store: Store,
        layers: Sequence[Layer],
        end: int,
        examples: int,
        scored: Scored,
        dtype: torch.dtype,
        *,
        silent: bool = False,
    ):
        super().__init__(store, layers[0], end, {"query": examples}, dtype, silent=silent)
        self._layers, self._scored = list(layers), scored

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[layer.name for layer in self._layers]}, {self._address.height} queries): top, total, scores"

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The steps that were looked at, (begin, end)."""
        return [(segment.begin, segment.end) for segment in self._scored.segments]

    @property
    def moments(self) -> list[int]:
        """After how many steps the queries were asked, for each segment."""
        return [segment.moment for segment in self._scored.segments]

    def scores(self, *, where: pl.Expr | str | None = None) -> Iterator[Scores]:
        """Every score, chunk by chunk: (rows (m,), scores (examples, m))."""
        return self._scores(where)

    def best(
        self, k: int, *, where: pl.Expr | str | None = None, absolute: bool = False, lowest: bool = False
    ) -> Ranked:
        """As top(k), but bare numbers."""
        way = check(k, absolute, lowest)
        if not isinstance(self._scored, LinearScores) or not can_be_bounded(self._scored, self._layers):
            return super().best(k, where=where, absolute=absolute, lowest=lowest)
        mask = self._mask(where)

        def rows(window: Window) -> Bools:
            return np.ones(window.end - window.begin, dtype=bool) if mask is None else mask(Rows(0, window))

        found = [
            foremost(self._scored, self._layers, queries, k, way, rows, self._dtype)
            for queries in self._query_blocks(k)
        ]
        return Ranked.join(found, self._dtype)

    def _chunks(self) -> Iterator[Rows]:
        for number, segment in enumerate(self._scored.segments):
            for window in windows(self._store, segment.first_row, segment.end_row, 1 << 40):
                yield Rows(number, window)

    def _tile(self, queries: slice, chunk: Any, low: int, high: int, scratch: Room) -> Tensor:
        place, first, _ = chunk.window
        window = Window(place, first + low, first + high)
        return self._scored.rows(chunk.number, self._layers, window, queries, self._dtype)

    def _kept(self, columns: list[str], absolute: bool) -> tuple[View, Tensor] | None:
        return None

    @property
    def _leaves_out_silent(self) -> bool:
        return not self._silent and any(has_silent(self._store, layer.name, self._end) for layer in self._layers)

    def _written(self, chunk: Any) -> Bools:
        """Which rows wrote something, in any of these layers."""
        every = rows_written(self._store, [layer.name for layer in self._layers], self._end)
        found: Bools = every[slice(*chunk.row_range)]
        return found

    def _mask(self, where: pl.Expr | str | None) -> Callable[[Any], Bools] | None:
        if where is not None and _positional(self._store, condition_columns(where, self._store, "where")):
            raise MaskError(
                "where: rows have no position. Ask one layer, influence[layer], for a condition on positions, or total(by=…)."
            )
        return super()._mask(where)

    def sums(self, by: str | Sequence[str], *, where: pl.Expr | str | None = None, absolute: bool = False) -> Sums:
        """As total(by), but bare numbers."""
        self._check_by(by)
        return super().sums(by, where=where, absolute=absolute)

    def _top_per(self, k: int, per: str | Sequence[str], where: pl.Expr | str | None, way: Way) -> pl.DataFrame:
        self._check_by(per)
        return super()._top_per(k, per, where, way)

    def _groups(self, by: str | Sequence[str]) -> Groups:
        store, end = self._store, self._end
        key = by if isinstance(by, str) else tuple(by)
        return remembered(store, ("groups of rows", key), lambda: Groups(store, None, by, end), end)

    def _check_by(self, by: str | Sequence[str]) -> None:
        if _positional(self._store, {by} if isinstance(by, str) else set(by)):
            raise QuestionError(
                f'by={by!r}: rows have no position. Positions can be told apart by total(…) and top(k, by=…) with method="whitened" or '
                f'"sketch", without absolute=True, and in one layer by influence[layer].'
            )

    def _described(self, frame: pl.DataFrame) -> pl.DataFrame:
        rows = self._store.rows.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
        return frame.rename({"slot": "row"}).join(rows, on="row", how="left", maintain_order="left")


class LayerInfluence(Answer):
    """The influence of one layer's slots."""

    value = "influence"

    def __init__(
        self,
        store: Store,
        layer: Layer,
        end: int,
        examples: int,
        scored: LinearScores,
        dtype: torch.dtype,
        *,
        silent: bool = False,
        only_rows: bool = False,
    ):
        """only_rows: slots that serve all rows take no part."""
        super().__init__(store, layer, end, {"query": examples}, dtype, silent=silent)
        self._scored, self._only_rows = scored, only_rows

    def __repr__(self) -> str:
        return f"LayerInfluence({self.layer.name!r}, {self._address.height} queries): top, total, scores"

    def scores(self, *, where: pl.Expr | str | None = None) -> Iterator[Scores]:
        """Every score, chunk by chunk: (slots (m,), scores (examples, m))."""
        return self._scores(where)

    def _mask(self, where: pl.Expr | str | None) -> Callable[[Any], Bools] | None:
        asked = super()._mask(where)
        return lambda chunk: self._inside(chunk) if asked is None else self._inside(chunk) & asked(chunk)

    def _inside(self, chunk: SlotChunk) -> Bools:
        """Which slots are in a segment."""
        steps = chunk.blocks[:, 0]
        inside = reduce(np.logical_or, [(steps >= s.begin) & (steps < s.end) for s in self._scored.segments])
        if self._only_rows and chunk.shared is not None:
            inside = inside & ~chunk.shared
        return chunk.per_slot(inside)

    def _tile(self, queries: slice, chunk: SlotChunk, low: int, high: int, scratch: Room) -> Tensor:
        found = torch.zeros(queries.stop - queries.start, high - low, dtype=self._dtype)
        steps = chunk.blocks[:, 0]
        ends = np.append(chunk.starts, chunk.slots)
        for number, segment in enumerate(self._scored.segments):
            first, last = ends[np.searchsorted(steps, [segment.begin, segment.end])].tolist()
            begin, end = max(first, low), min(last, high)
            if begin < end:
                found[:, begin - low : end - low] = self._scored.slots(number, chunk, begin, end, queries, self._dtype)
        return found

    def _kept(self, columns: list[str], absolute: bool) -> tuple[View, Tensor] | None:
        return None


class Influence(RowInfluence, Mapping[str, Answer]):
    """The influence of rows, summed over all layers; `[layer]` is that of one layer."""

    def __getitem__(self, layer: str) -> RowInfluence | LayerInfluence:
        found = {one.name: one for one in self._layers}
        if layer not in found:
            self._store.layer(layer)
            raise UnknownLayerError(f"layer {layer!r} was left out, or not called for these inputs.")
        common = self._end, self._address.height
        if isinstance(self._scored, LinearScores):
            return LayerInfluence(self._store, found[layer], *common, self._scored, self._dtype, silent=self._silent)
        return RowInfluence(self._store, [found[layer]], *common, self._scored, self._dtype, silent=self._silent)

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def sums(self, by: str | Sequence[str], *, where: pl.Expr | str | None = None, absolute: bool = False) -> Sums:
        """As total(by), but bare numbers, over all layers."""
        columns = [by] if isinstance(by, str) else list(by)
        asked = set(columns) | (set() if where is None else condition_columns(where, self._store, "where"))
        if absolute or not _positional(self._store, asked) or not isinstance(self._scored, LinearScores):
            return super().sums(by, where=where, absolute=absolute)
        common = self._end, self._address.height, self._scored, self._dtype
        answers = [
            LayerInfluence(self._store, layer, *common, silent=self._silent, only_rows=True) for layer in self._layers
        ]
        return _added([answer.sums(by, where=where) for answer in answers])


def _positional(store: Store, columns: set[str]) -> bool:
    return bool(columns & ({"position"} | {c.name for c in store.manifest.columns if c.per == "position"}))


def _added(parts: Sequence[Sums]) -> Sums:
    """Totals by the same columns in several layers: groups are those of any of them."""
    names = parts[0].values.columns
    values = pl.concat([part.values for part in parts]).unique(maintain_order=True).with_row_index(" place")
    totals = torch.zeros(len(parts[0].totals), values.height, dtype=torch.float64)
    visits = torch.zeros(values.height, dtype=torch.int64)
    for part in parts:
        found = part.values.join(values, on=names, how="left", maintain_order="left", nulls_equal=True)[" place"]
        places = torch.from_numpy(found.to_numpy().astype(np.int64))
        totals[:, places] += part.totals
        visits[places] = torch.maximum(visits[places], part.visits)
    values = values.drop(" place")
    # Slots that serve all rows have left an empty group behind
    empty = values.select(pl.all_horizontal(pl.all().is_null())).to_series().to_numpy() & (visits == 0).numpy()
    kept = np.flatnonzero(~empty)
    values = values[kept]
    return Sums(values, totals[:, kept], visits[kept], values)
