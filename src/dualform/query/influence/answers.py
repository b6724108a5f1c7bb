"""Influence: what would change in a target without some of the training data. Estimated; how well, docs/influence.md says.

The unit is the row, a sample in one backward pass: its scores add up over layers and segments, and over the visits of a sample
(`by="sample_id"`). Methods that are linear in slots also answer for each layer by itself, slot by slot: token by token.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import polars as pl
import torch
from cachetools import LRUCache
from torch import Tensor

from dualform.arrays import Bools
from dualform.errors import QuestionError, UnknownLayerError
from dualform.layers.layer import Layer
from dualform.query.answer import Answer, Sums
from dualform.query.by_layer import added
from dualform.query.conditions import Where, condition_columns
from dualform.query.executors import HERE, Runner
from dualform.query.groups import Groups
from dualform.query.influence.index import RowIndex, RowWindow, row_index
from dualform.query.influence.scores import LinearScores, RowScores, Scores
from dualform.query.influence.segments import Window
from dualform.query.scorer import Scorer
from dualform.query.slots import has_silent, rows_kept, rows_written
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk

KNOWN_BYTES = 64 << 20
"""How many bytes of scores are kept for an answer."""


class KnownScores:
    """The scores of some windows of rows, up to a number of bytes. Threads may share it."""

    def __init__(self) -> None:
        self._scores: LRUCache[Hashable, Tensor] = LRUCache(KNOWN_BYTES, lambda scores: scores.nbytes)
        self._lock = Lock()

    def get(self, key: Hashable) -> Tensor | None:
        """Return known scores; None: they are not known."""
        with self._lock:
            return self._scores.get(key)

    def put(self, key: Hashable, scores: Tensor) -> None:
        """Keep scores, if they are small enough."""
        if scores.nbytes <= KNOWN_BYTES:
            with self._lock:
                self._scores[key] = scores


class RowInfluenceScorer(Scorer):
    """Scores rows by their influence, summed over some layers. A row stands in the place of a slot."""

    value = "influence"
    has_positions = False

    def __init__(
        self,
        store: Store,
        layers: Sequence[Layer],
        end: int,
        queries: int,
        scores: Scores,
        dtype: torch.dtype,
    ):
        super().__init__(store, layers[0], end, queries, dtype)
        self.layers = list(layers)
        self.scores = scores

    @cached_property
    def _known(self) -> KnownScores:
        """Scores, which are small beside what they are computed from: the same answer by another column needs no others."""
        return KnownScores()

    def score(
        self,
        queries: slice,
        run: RowWindow,
        low: int,
        high: int,
    ) -> Tensor:
        """Return the scores of the rows low to high of a window, (queries, rows)."""
        place, first_row, _ = run.window
        window = Window(place, first_row + low, first_row + high)
        key = (run.segment, window, queries.start, queries.stop)
        known = self._known.get(key)
        if known is None:
            known = self.scores.of_rows(run.segment, self.layers, window, queries)
            self._known.put(key, known)
        return known.clone()  # whoever iterates over scores() may change what they get

    @property
    def is_computed(self) -> bool:
        """Whether the scores were all computed when the question was asked."""
        return isinstance(self.scores, RowScores)

    @property
    def numbers_per_slot(self) -> int:
        """How many numbers are read of a row, if it has one slot in each layer."""
        return sum(layer.d_in + layer.d_out for layer in self.layers)

    @property
    def what(self) -> str:
        """What is scored."""
        return "rows"

    @property
    def end_slot(self) -> int:
        """The number after that of the last row."""
        return max(segment.end_row for segment in self.scores.segments)

    def part(self, runs: Sequence[RowWindow]) -> RowInfluenceScorer:
        """Return a scorer with the queries of the runs' segments alone."""
        if isinstance(self.scores, RowScores):
            return self
        chunks = self.store.manifest.chunks
        steps = [chunks[run.window.place].first_step for run in runs]
        scorer = copy.copy(self)
        scorer.__dict__.pop("_known", None)
        scorer.scores = self.scores.part({run.segment for run in runs}, self.layers, steps)
        return scorer

    def runs(self) -> Iterator[RowWindow]:
        """Return the rows of each segment, chunk by chunk."""
        for number, segment in enumerate(self.scores.segments):
            for window in segment.windows(self.store, segment.rows):
                yield RowWindow(number, window)

    def in_scope(self, run: RowWindow) -> Bools | None:
        """Return which rows are of steps whose slots were kept (every=), (rows,); None: all. Nothing is known of the others."""
        if self.store.manifest.every == 1:
            return None
        here: Bools = rows_kept(self.store)[slice(*run.row_range)]
        return here

    def wrote(self, run: RowWindow) -> Bools:
        """Return which rows wrote something in any of the layers, (rows,)."""
        names = [layer.name for layer in self.layers]
        written = rows_written(self.store, names, self.end)
        here: Bools = written[slice(*run.row_range)]
        return here

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
        numbers = pl.DataFrame({"row": slots})
        return numbers.hstack(self.store.rows[slots].get_columns())

    def index(self) -> RowIndex | None:
        """Return an index of the rows, if their scores can be bounded."""
        if not isinstance(self.scores, LinearScores):
            return None
        return row_index(self.scores, self.layers, self.queries)


class SlotInfluenceScorer(Scorer):
    """Scores the slots of one layer by their influence."""

    value = "influence"

    def __init__(
        self,
        rows: RowInfluenceScorer,
        layer: Layer,
        scores: LinearScores,
        *,
        only_rows: bool = False,
    ):
        """rows: scores the rows by the same queries. only_rows: slots that serve all rows take no part."""
        super().__init__(rows.store, layer, rows.end, rows.queries, rows.dtype)
        self._scores = scores
        self._only_rows = only_rows

    def part(self, runs: Sequence[SlotChunk]) -> SlotInfluenceScorer:
        """Return a scorer with the queries of the segments that the runs are in."""
        begin = runs[0].chunk.first_step
        end = runs[-1].chunk.end_step
        segments = enumerate(self._scores.segments)
        numbers = {number for number, segment in segments if segment.begin < end and segment.end > begin}
        steps = [run.chunk.first_step for run in runs]
        scorer = copy.copy(self)
        scorer.__dict__.pop("_known", None)
        scorer._scores = self._scores.part(numbers, [self.layer], steps)
        return scorer

    def in_scope(self, run: SlotChunk) -> Bools:
        """Return which slots are in a segment, (slots,)."""
        steps = run.blocks[:, 0]
        inside = np.zeros(len(steps), np.bool_)
        for segment in self._scores.segments:
            inside |= (steps >= segment.begin) & (steps < segment.end)
        if self._only_rows and run.shared is not None:
            inside &= ~run.shared
        return run.per_slot(inside)

    def score(
        self,
        queries: slice,
        run: SlotChunk,
        low: int,
        high: int,
    ) -> Tensor:
        """Return the scores of the slots low to high of a chunk, (queries, slots); 0 outside of all segments."""
        scores = torch.zeros(queries.stop - queries.start, high - low, dtype=self.dtype)
        steps = run.blocks[:, 0]
        starts = np.append(run.starts, run.slots)
        for number, segment in enumerate(self._scores.segments):
            blocks = np.searchsorted(steps, [segment.begin, segment.end])
            first, last = starts[blocks].tolist()
            begin = max(first, low)
            end = min(last, high)
            if begin < end:
                here = slice(begin - low, end - low)
                scores[:, here] = self._scores.of_slots(number, run, begin, end, queries)
        return scores


class _InfluenceAnswer(Answer):
    """Has one axis: the queries."""

    def __init__(self, scorer: Scorer, *, silent: bool = False, executor: Runner = HERE):
        super().__init__(scorer, {"query": scorer.queries}, silent=silent, executor=executor)


class LayerInfluence(_InfluenceAnswer):
    """The influence of one layer's slots."""

    def __repr__(self) -> str:
        return f"LayerInfluence({self.layer.name!r}, {self._scorer.queries} queries): top, total, scores"


class RowInfluence(_InfluenceAnswer):
    """The influence of rows, summed over some layers."""

    _scorer: RowInfluenceScorer

    def __repr__(self) -> str:
        names = [layer.name for layer in self._scorer.layers]
        return f"{type(self).__name__}({names}, {self._scorer.queries} queries): top, total, scores"

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The steps that were looked at, (begin, end)."""
        return [(segment.begin, segment.end) for segment in self._scorer.scores.segments]

    @property
    def moments(self) -> list[int]:
        """After how many steps the queries were asked, for each segment."""
        return [segment.moment for segment in self._scorer.scores.segments]


class Influence(RowInfluence, Mapping[str, Answer]):
    """The influence of rows, summed over all layers; `[layer]` is that of one layer."""

    def __getitem__(self, layer: str) -> RowInfluence | LayerInfluence:
        rows = self._scorer
        known = {asked.name: asked for asked in rows.layers}
        if layer not in known:
            rows.store.layer(layer)
            raise UnknownLayerError(f"layer {layer!r} was left out, or not called for these inputs.")
        if isinstance(rows.scores, LinearScores):
            return self._of_slots(known[layer], rows.scores)
        scorer = RowInfluenceScorer(rows.store, [known[layer]], rows.end, rows.queries, rows.scores, rows.dtype)
        return RowInfluence(scorer, silent=self._silent, executor=self._executor)

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self._scorer.layers)

    def __len__(self) -> int:
        return len(self._scorer.layers)

    def _of_slots(self, layer: Layer, scores: LinearScores, *, only_rows: bool = False) -> LayerInfluence:
        scorer = SlotInfluenceScorer(self._scorer, layer, scores, only_rows=only_rows)
        return LayerInfluence(scorer, silent=self._silent, executor=self._executor)

    def sums(self, by: str | Sequence[str], *, where: Where | None = None, absolute: bool = False) -> Sums:
        """Return the same as total(by) as plain numbers, over all layers.

        If `by` or `where` uses a column with a value for each position, the slots of each layer are scored instead of rows.
        """
        store = self._scorer.store
        scores = self._scorer.scores
        columns = {by} if isinstance(by, str) else set(by)
        if where is not None:
            columns |= condition_columns(where, store, "where")
        if absolute or not _is_positional(store, columns) or not isinstance(scores, LinearScores):
            return super().sums(by, where=where, absolute=absolute)
        answers = [self._of_slots(layer, scores, only_rows=True) for layer in self._scorer.layers]
        return added([answer.sums(by, where=where) for answer in answers], independent=False)


def _is_positional(store: Store, columns: set[str]) -> bool:
    per_position = {column.name for column in store.manifest.columns if column.per == "position"}
    return not columns.isdisjoint({"position", *per_position})
