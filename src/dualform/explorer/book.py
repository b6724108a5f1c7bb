"""The row table as arrays: which sample, which class and which stretch of steps each row and slot belongs to."""

from __future__ import annotations

from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from dualform.errors import QuestionError
from dualform.explorer.collection import Key
from dualform.explorer.forms import Value
from dualform.explorer.subject import Subject, plain
from dualform.store.format import NO_ROW

Ints = np.ndarray[Any, np.dtype[np.int64]]
STRETCHES = 60
"""The time axis has so many."""


class _Slots(NamedTuple):
    """The slots of a layer that take part in answers."""

    numbers: Ints
    rows: Ints
    shared_steps: Ints
    """The steps of those that serve all rows."""


class Book:
    """What is known about the rows."""

    def __init__(self, subject: Subject):
        self._subject = subject
        self._slots: dict[str, _Slots] = {}
        self._lock = Lock()

    @cached_property
    def rows(self) -> pl.DataFrame:
        """The columns that have one entry a row; empty if only totals were kept."""
        columns = self._subject.info["columns"]
        single = [name for name, told in columns.items() if told.endswith("row")]
        return self._subject.dual.rows.select(["step", *single])

    def rows_of(self, layer: str) -> Ints:
        """(n,): the row of each slot of a layer that takes part in answers; NO_ROW for slots that serve all rows."""
        return self._slots_of(layer).rows

    def slots_of(self, layer: str) -> Ints:
        """(n,): the numbers of these slots, ascending: those that wrote something."""
        return self._slots_of(layer).numbers

    def steps_of(self, layer: str) -> Ints:
        """(n,): their steps."""
        slots = self._slots_of(layer)
        steps = self.steps[slots.rows]
        steps[slots.rows == NO_ROW] = slots.shared_steps
        return steps

    def _slots_of(self, layer: str) -> _Slots:
        with self._lock:
            if layer not in self._slots:
                every = self._subject.dual.slots(layer)
                wrote = every.filter(~pl.col("silent"))
                self._slots[layer] = _Slots(
                    np.flatnonzero(~every["silent"].to_numpy()),
                    wrote["row"].fill_null(NO_ROW).to_numpy(),
                    wrote.filter(pl.col("row").is_null())["step"].to_numpy(),
                )
            return self._slots[layer]

    # Samples

    @cached_property
    def _numbered(self) -> tuple[pl.DataFrame, Ints]:
        by = list(self._subject.by)
        if not by:
            rows = self.rows.with_row_index("row").select(pl.col("row").cast(pl.Int64), pl.lit(1).alias("visits"))
            return rows, np.arange(self.rows.height)
        label = [] if self._subject.label is None or self._subject.label in by else [self._subject.label]
        table = self.rows.group_by(by, maintain_order=True).agg(
            pl.len().alias("visits"), *(pl.col(c).first() for c in label)
        )
        numbered = table.select(by).with_row_index(" number")
        codes = self.rows.select(by).join(numbered, on=by, how="left", maintain_order="left", nulls_equal=True)
        return table, codes[" number"].to_numpy().astype(np.int64)

    @property
    def samples(self) -> pl.DataFrame:
        """One line a sample, in the order of first visits: its key, its label, its visits."""
        return self._numbered[0]

    @property
    def sample_of(self) -> Ints:
        """(rows,): the number of each row's sample."""
        return self._numbered[1]

    @property
    def key_columns(self) -> list[str]:
        """What names a sample."""
        return list(self._subject.by) or ["row"]

    def key(self, number: int) -> Key:
        """The key of a sample."""
        return tuple(plain(self.samples[number, column]) for column in self.key_columns)

    def label(self, number: int) -> Value:
        """The class of a sample at its first visit."""
        label = self._subject.label
        return None if label is None or label not in self.samples.columns else plain(self.samples[number, label])

    def find(self, given: list[str]) -> int:
        """The number of the sample whose key was given as text."""
        columns = self.key_columns
        if len(given) != len(columns):
            raise QuestionError(f"a training example is named by {' and '.join(columns)}; got {len(given)} values.")
        wanted = [pl.col(column).cast(pl.String) == text for column, text in zip(columns, given, strict=True)]
        found = self.samples.with_row_index(" number").filter(*wanted)
        if not found.height:
            raise QuestionError(
                f"there is no training example with {', '.join(f'{c} = {t}' for c, t in zip(columns, given, strict=True))}."
            )
        return int(found[" number"][0])

    def title(self, key: Key) -> str:
        """How a training example is called."""
        return " ".join(str(part) for part in key)

    # Classes and time

    @cached_property
    def classes(self) -> list[Value]:
        """The values of the label column, sorted."""
        label = self._subject.label
        return [] if label is None else [plain(value) for value in self.rows[label].unique().sort().to_list()]

    @cached_property
    def class_of(self) -> Ints:
        """(rows,): the place of each row's label among the classes."""
        label = self._subject.label
        if label is None:
            return np.zeros(self.rows.height, np.int64)
        values = self.rows[label].unique().sort().to_frame().with_row_index(" number")
        joined = self.rows.select(label).join(values, on=label, how="left", maintain_order="left", nulls_equal=True)
        return joined[" number"].to_numpy().astype(np.int64)

    @cached_property
    def steps(self) -> Ints:
        """(rows,): the step of each row."""
        return self.rows["step"].to_numpy()

    @cached_property
    def edges(self) -> Ints:
        """Where the stretches of the time axis begin, and where the last one ends."""
        end = max(1, self._subject.dual.end_step)
        return np.unique(np.linspace(0, end, min(STRETCHES, end) + 1).round().astype(np.int64))
