"""What a question computes for each pair of a query and a slot, a tile at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.arrays import Bools
from dualform.dual.totals import GroupTotals
from dualform.errors import MaskError
from dualform.layers.layer import Layer
from dualform.query.conditions import Condition
from dualform.query.groups import Groups
from dualform.query.scan import Piece
from dualform.query.search.index import Index
from dualform.query.sending import uncached
from dualform.query.slots import describe, has_silent, written
from dualform.store.reader import Store


class Scorer(ABC):
    """Scores one layer's slots for some queries. Threads may share it.

    A new kind of score needs `value` and `score`; the rest is about the slots of a layer, and about shortcuts.
    """

    value: str
    """The name of a score in tables."""
    has_positions = True
    """Whether the positions of a row can be told apart."""

    def __init__(self, store: Store, layer: Layer, end: int, queries: int, dtype: torch.dtype):
        """end: only slots of the steps before. queries: how many there are."""
        self.store = store
        self.layer = layer
        self.end = end
        self.queries = queries
        self.dtype = dtype

    @abstractmethod
    def score(self, queries: slice, run: Any, low: int, high: int) -> Tensor:
        """Return the scores of some queries for the slots low to high of a run, (queries, slots)."""

    @property
    def numbers_per_score(self) -> int:
        """How many numbers are held at a time for each score of a tile."""
        return 1

    @property
    def numbers_per_query(self) -> int:
        """How many numbers are held for each query during a scan."""
        return 0

    # Tasks, which may be sent to other processes

    sent: tuple[str, ...] = ()
    """Cached properties that tasks need, and that take more than their own pieces to compute."""
    not_sent: tuple[str, ...] = ()
    """Attributes that are None in other processes."""

    @property
    def is_computed(self) -> bool:
        """Whether the scores are known already, so that tasks would be sent what they return."""
        return False

    @property
    def is_divisible(self) -> bool:
        """Whether pieces can be scored apart from each other without more work."""
        return True

    def part(self, runs: Sequence[Any]) -> Scorer:
        """Return a scorer that holds no more than these runs need."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        for name in self.sent:
            getattr(self, name)
        return uncached(self, self.sent) | dict.fromkeys(self.not_sent)

    @property
    def numbers_per_slot(self) -> int:
        """How many numbers are read of a slot."""
        return self.layer.d_in + self.layer.d_out

    @property
    def what(self) -> str:
        """What is scored, for those who are told of the progress."""
        return self.layer.name

    @property
    def end_slot(self) -> int:
        """The number after that of the last slot."""
        return self.store.slots(self.layer.name)

    # What is scanned

    def runs(self) -> Iterator[Any]:
        """Return what is scanned, in the order of slot numbers."""
        return self.store.chunks(self.layer.name, end_step=self.end)

    def in_scope(self, run: Any) -> Bools | None:
        """Return which slots of a run have a score at all, (slots,); None: all."""
        return None

    def wrote(self, run: Any) -> Bools:
        """Return which slots of a run wrote something, (slots,)."""
        return written(run)

    def has_silent(self) -> bool:
        """Return whether any slot wrote nothing."""
        return has_silent(self.store, self.layer.name, self.end)

    def groups(self, by: str | Sequence[str]) -> Groups:
        """Return the groups that some columns make of the slots."""
        key = by if isinstance(by, str) else tuple(by)
        name = self.layer.name
        return self.store.cached(("groups", name, key), lambda: Groups(self.store, name, by, self.end), self.end)

    def describe(self, slots: np.ndarray[Any, np.dtype[np.int64]]) -> pl.DataFrame:
        """Return where slots come from, a line each: their number first, then step, row and the user's columns."""
        return describe(self.store, self.layer.name, slots, self.end)

    def index(self) -> Index | None:
        """Return what can find the best slots without computing all scores; None: nothing can."""
        return None

    def stored_totals(self, columns: list[str], absolute: bool) -> tuple[GroupTotals, Tensor] | None:
        """Return totals by these columns, (queries, groups) float64, from sums kept in the store; None: they need a scan."""
        return None


class Selection:
    """Which slots take part in an answer: those that match a condition, and, unless silent ones are asked for, wrote something."""

    def __init__(self, scorer: Scorer, condition: Condition | None, silent: bool):
        if condition is not None and condition.is_positional and not scorer.has_positions:
            raise MaskError(
                "where: rows have no position. Ask one layer, influence[layer], for a condition on positions, or total(by=…)."
            )
        self._scorer = scorer
        self._condition = condition
        self._drops_silent = not silent and scorer.has_silent()

    @property
    def is_positional(self) -> bool:
        """Whether the positions of a row may differ in it by more than by whether they wrote something."""
        return self._condition is not None and self._condition.is_positional

    @property
    def key(self) -> tuple[bool] | None:
        """Names the selection in a cache; None: it has a condition of its own, and is not worth keeping."""
        return (self._drops_silent,) if self._condition is None else None

    def __call__(self, run: Any) -> Bools | None:
        """Return which slots of a run take part, (slots,); None: all."""
        parts = [self._scorer.in_scope(run)]
        if self._drops_silent:
            parts.append(self._scorer.wrote(run))
        if self._condition is not None:
            parts.append(self._condition(run))
        masks = [mask for mask in parts if mask is not None]
        return np.logical_and.reduce(masks) if masks else None

    def pieces(self) -> Iterator[Piece]:
        """Return all runs in which any slot takes part."""
        for run in self._scorer.runs():
            selected = self(run)
            if selected is None or selected.any():
                yield Piece(run, selected)
