"""Influence: what would change in a target without some of the training data. Estimated; how well, docs/influence.md says.

The unit is the row, a sample in one backward pass: its scores add up over layers and segments, and over the visits of a sample
(`by="sample_id"`). Methods that are linear in slots also answer for each layer by itself, slot by slot: token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.errors import QuestionError, UnknownLayerError
from dualform.layers.streams import Layer
from dualform.query.answer import Answer, Sums
from dualform.query.by_layer import added
from dualform.query.conditions import Where, condition_columns
from dualform.query.groups import Groups
from dualform.query.influence.index import RowIndex, RowWindow, can_be_bounded
from dualform.query.influence.scores import LinearScores, Scored
from dualform.query.influence.segments import Window, windows
from dualform.query.scan import Bools
from dualform.query.scorer import Scorer
from dualform.query.slots import has_silent, rows_written
from dualform.store.memory import Scratch
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk


class RowInfluenceScorer(Scorer):
    """Scores rows by their influence, summed over some layers. A row stands in the place of a slot."""

    value = "influence"
    has_positions = False

    def __init__(
        self, store: Store, layers: Sequence[Layer], end: int, queries: int, scored: Scored, dtype: torch.dtype
    ):
        super().__init__(store, layers[0], end, queries, dtype)
        self.layers = list(layers)
        self.scored = scored

    def score(self, queries: slice, run: RowWindow, low: int, high: int, scratch: Scratch) -> Tensor:
        """Return the scores of the rows low to high of a window, (queries, rows)."""
        place, first, _ = run.window
        window = Window(place, first + low, first + high)
        return self.scored.rows(run.segment, self.layers, window, queries, self.dtype)

    def runs(self) -> Iterator[RowWindow]:
        """Return the rows of each segment, chunk by chunk."""
        for number, segment in enumerate(self.scored.segments):
            for window in windows(self.store, segment.first_row, segment.end_row, 1 << 40):
                yield RowWindow(number, window)

    def wrote(self, run: RowWindow) -> Bools:
        """Return which rows wrote something in any of the layers, (rows,)."""
        every = rows_written(self.store, [layer.name for layer in self.layers], self.end)
        found: Bools = every[slice(*run.row_range)]
        return found

    def has_silent(self) -> bool:
        """Return whether any slot of these layers wrote nothing."""
        return any(has_silent(self.store, layer.name, self.end) for layer in self.layers)

    def groups(self, by: str | Sequence[str]) -> Groups:
        """Return the groups that some columns make of the rows."""
        columns = (by,) if isinstance(by, str) else tuple(by)
        if _is_positional(self.store, set(columns)):
            raise QuestionError(
                f'by={by!r}: rows have no position. Positions can be told apart by total(…) and top(k, by=…) with method="whitened" or '
                f'"sketch", without absolute=True, and in one layer by influence[layer].'
            )
        key = ("groups of rows", *columns)
        return self.store.cached(key, lambda: Groups(self.store, None, by, self.end), self.end)

    def describe(self, slots: np.ndarray[Any, np.dtype[np.int64]]) -> pl.DataFrame:
        """Return the rows with these numbers."""
        return pl.DataFrame({"row": slots}).hstack(self.store.rows[slots].get_columns())

    def index(self) -> RowIndex | None:
        """Return an index of the rows, if their scores can be bounded."""
        if not isinstance(self.scored, LinearScores) or not can_be_bounded(self.scored, self.layers):
            return None
        return RowIndex(self.scored, self.layers, self.queries, self.dtype)


class SlotInfluenceScorer(Scorer):
    """Scores the slots of one layer by their influence."""

    value = "influence"

    def __init__(
        self,
        store: Store,
        layer: Layer,
        end: int,
        queries: int,
        scored: LinearScores,
        dtype: torch.dtype,
        *,
        only_rows: bool = False,
    ):
        """only_rows: slots that serve all rows take no part."""
        super().__init__(store, layer, end, queries, dtype)
        self._scored = scored
        self._only_rows = only_rows

    def in_scope(self, run: SlotChunk) -> Bools:
        """Return which slots are in a segment, (slots,)."""
        steps = run.blocks[:, 0]
        inside = np.zeros(len(steps), np.bool_)
        for segment in self._scored.segments:
            inside |= (steps >= segment.begin) & (steps < segment.end)
        if self._only_rows and run.shared is not None:
            inside &= ~run.shared
        return run.per_slot(inside)

    def score(self, queries: slice, run: SlotChunk, low: int, high: int, scratch: Scratch) -> Tensor:
        """Return the scores of the slots low to high of a chunk, (queries, slots); 0 outside of all segments."""
        scores = torch.zeros(queries.stop - queries.start, high - low, dtype=self.dtype)
        steps = run.blocks[:, 0]
        starts = np.append(run.starts, run.slots)
        for number, segment in enumerate(self._scored.segments):
            first, last = starts[np.searchsorted(steps, [segment.begin, segment.end])].tolist()
            begin = max(first, low)
            end = min(last, high)
            if begin < end:
                found = self._scored.slots(number, run, begin, end, queries, self.dtype)
                scores[:, begin - low : end - low] = found
        return scores


class RowInfluence(Answer):
    """The influence of rows, summed over some layers."""

    _scorer: RowInfluenceScorer

    def __init__(self, scorer: RowInfluenceScorer, *, silent: bool = False, executor: Executor | None = None):
        super().__init__(scorer, {"query": scorer.queries}, silent=silent, executor=executor)

    def __repr__(self) -> str:
        names = [layer.name for layer in self._scorer.layers]
        return f"{type(self).__name__}({names}, {self._scorer.queries} queries): top, total, scores"

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The steps that were looked at, (begin, end)."""
        return [(segment.begin, segment.end) for segment in self._scorer.scored.segments]

    @property
    def moments(self) -> list[int]:
        """After how many steps the queries were asked, for each segment."""
        return [segment.moment for segment in self._scorer.scored.segments]


class LayerInfluence(Answer):
    """The influence of one layer's slots."""

    def __init__(self, scorer: SlotInfluenceScorer, *, silent: bool = False, executor: Executor | None = None):
        super().__init__(scorer, {"query": scorer.queries}, silent=silent, executor=executor)

    def __repr__(self) -> str:
        return f"LayerInfluence({self.layer.name!r}, {self._scorer.queries} queries): top, total, scores"


class Influence(RowInfluence, Mapping[str, Answer]):
    """The influence of rows, summed over all layers; `[layer]` is that of one layer."""

    def __getitem__(self, layer: str) -> RowInfluence | LayerInfluence:
        scorer = self._scorer
        known = {one.name: one for one in scorer.layers}
        if layer not in known:
            scorer.store.layer(layer)
            raise UnknownLayerError(f"layer {layer!r} was left out, or not called for these inputs.")
        if isinstance(scorer.scored, LinearScores):
            return self._of_slots(known[layer], scorer.scored)
        one = RowInfluenceScorer(scorer.store, [known[layer]], scorer.end, scorer.queries, scorer.scored, scorer.dtype)
        return RowInfluence(one, silent=self._silent, executor=self._executor)

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self._scorer.layers)

    def __len__(self) -> int:
        return len(self._scorer.layers)

    def _of_slots(self, layer: Layer, scored: LinearScores, *, only_rows: bool = False) -> LayerInfluence:
        own = self._scorer
        scorer = SlotInfluenceScorer(own.store, layer, own.end, own.queries, scored, own.dtype, only_rows=only_rows)
        return LayerInfluence(scorer, silent=self._silent, executor=self._executor)

    def sums(self, by: str | Sequence[str], *, where: Where | None = None, absolute: bool = False) -> Sums:
        """Return the same as total(by) as plain numbers, over all layers.

        If `by` or `where` uses a column with a value for each position, the slots of each layer are scored instead of rows.
        """
        scorer = self._scorer
        columns = {by} if isinstance(by, str) else set(by)
        if where is not None:
            columns |= condition_columns(where, scorer.store, "where")
        if absolute or not _is_positional(scorer.store, columns) or not isinstance(scorer.scored, LinearScores):
            return super().sums(by, where=where, absolute=absolute)
        answers = [self._of_slots(layer, scorer.scored, only_rows=True) for layer in scorer.layers]
        return added([answer.sums(by, where=where) for answer in answers])


def _is_positional(store: Store, columns: set[str]) -> bool:
    per_position = {c.name for c in store.manifest.columns if c.per == "position"}
    return "position" in columns or bool(columns & per_position)
