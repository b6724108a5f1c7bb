"""Editing memory: the model without some of its slots, beside the model as it is."""

from __future__ import annotations

import math
import time

import numpy as np
import polars as pl
from torch import nn

from dualform.errors import MaskError, QuestionError
from dualform.explorer.book import Book
from dualform.explorer.forms import Accuracy, Change, ClassAccuracy, Grouped
from dualform.explorer.keeping import Kept
from dualform.explorer.predicting import Predictions
from dualform.explorer.subject import Subject, distinct
from dualform.progress import Progress
from dualform.query.conditions import read_condition

SENTENCE = (
    "This edits memory: everything else stays as it was recorded. It does not predict what retraining without these examples "
    "would give."
)
MODELS = 256 << 20
"""Edited models of so many bytes are kept."""
FEW = 40
"""A column with at most so many values can be switched value by value."""
SMALL = 2e10
"""Up to so many multiplications, an edit is done at once."""
TESTED = 1000
"""So many test examples, evenly spread, are answered again after an edit."""

NEEDS_TRAINING = "it takes out of the weights what training wrote into them"


class Edits:
    """Models without some of their memory; kept for a while."""

    def __init__(self, subject: Subject, book: Book, predictions: Predictions):
        self._subject, self._book, self._predictions = subject, book, predictions
        self._models: Kept[nn.Module] = Kept(MODELS, _nbytes)

    @property
    def missing(self) -> str:
        """Empty, or why memory cannot be edited."""
        collected = self._subject.collected
        return f"{NEEDS_TRAINING}, and this run was {collected}" if collected else ""

    @property
    def groups(self) -> list[Grouped]:
        """Columns with few values, which can be switched off."""
        if self.missing:
            return []
        columns = self._subject.info["columns"]
        found = []
        for name, told in columns.items():
            if not told.endswith("row") or name in self._subject.by[-1:] or name not in self._book.rows.columns:
                continue
            values = distinct(self._book.rows, name) if self._book.rows[name].n_unique() <= FEW else []
            if len(values) > 1:
                is_label = name == self._subject.label
                named = [
                    self._subject.named(value, place)
                    if is_label
                    else self._subject.named(value, place).model_copy(update={"name": str(value), "colour": place})
                    for place, value in enumerate(values)
                ]
                found.append(Grouped(column=name, values=named, fast=self.is_fast_for({name})))
        return found

    def is_fast_for(self, columns: set[str]) -> bool:
        """Whether group deltas of these columns were kept."""
        return any(
            columns <= set(kept["by"])
            and kept["kind"] in ("deltas", "both")
            and kept["step"] == self._subject.dual.end_step
            for kept in self._subject.info["totals"]
        )

    def columns(self, drop: str) -> set[str]:
        """What a condition speaks of; an error in words if it is none."""
        condition = _read(drop)
        used = set(condition.meta.root_names())
        known = ["step", "position", *self._subject.info["columns"]]
        unknown = sorted(used - set(known))
        if unknown:
            raise MaskError(f"there is no column {unknown[0]!r}. Columns: {', '.join(known)}.")
        return used

    def is_quick(self, drop: str) -> bool:
        """Whether an edit is done while one waits."""
        self.columns(drop)
        if drop in self._models:
            return True
        dual = self._subject.dual
        sizes = {parameter.name: math.prod(parameter.shape) for parameter in dual.store.manifest.parameters}
        return sum(slots * sizes[name] for name, slots in dual.mask_reads(drop=drop).items()) <= SMALL

    def model(self, drop: str, progress: Progress | None = None) -> nn.Module:
        """The model without the slots that a condition names."""
        self.columns(drop)

        def compute() -> nn.Module:
            return self._subject.dual.masked(drop=drop, progress=progress).eval()

        return self._models.get(drop, compute)

    def change(self, address: str, drop: str, progress: Progress | None = None) -> Change:
        """A prediction before and after an edit."""
        began = time.perf_counter()
        fast = self.is_fast_for(self.columns(drop))
        after = self._predictions.prediction(address, self.model(drop, progress))
        return Change(
            drop=drop,
            fast=fast,
            dropped_rows=self.dropped(drop),
            rows=self._subject.info["rows"],
            before=self._predictions.prediction(address),
            after=after,
            seconds=time.perf_counter() - began,
            sentence=SENTENCE,
        )

    def dropped(self, drop: str) -> int:
        """How many rows a condition names; 0 where it speaks of positions, or no rows were kept."""
        condition = _read(drop)
        if not set(condition.meta.root_names()) <= set(self._book.rows.columns):
            return 0
        try:
            found = self._book.rows.select(condition.alias("mask"))["mask"]
        except pl.exceptions.PolarsError as error:
            raise MaskError(f"{drop!r} cannot be evaluated over the rows: {error}.") from None
        if found.dtype != pl.Boolean:
            raise MaskError(f"{drop!r} gives {found.dtype}, expected true or false for each row.")
        return int(found.sum() or 0) * (self._book.rows.height if len(found) == 1 else 1)

    def accuracy(self, drop: str) -> Accuracy:
        """Right answers before and after, for test examples evenly spread over the test set."""
        labels = self._predictions.labels
        if not labels:
            raise QuestionError("there are no test examples.")
        labelled = np.flatnonzero([expected is not None for expected in self._predictions.expected])
        if not len(labelled):
            raise QuestionError("the test examples have no labels, so no answer is right or wrong.")
        spread = np.linspace(0, len(labelled) - 1, min(TESTED, len(labelled))).round().astype(int)
        places = labelled[np.unique(spread)]
        expected = np.array([self._predictions.expected[place] for place in places])
        right_before = self._predictions.answers[0][places] == expected
        right_after = self._predictions.answers_at(self.model(drop), places.tolist()) == expected
        tested = [labels[place] for place in places]
        classes = []
        for place, value in enumerate(sorted(set(tested), key=lambda v: (str(type(v)), v))):
            mine = np.array([label == value for label in tested])
            one = self._subject.named(value, place)
            classes.append(
                ClassAccuracy(
                    value=one.value,
                    name=one.name,
                    colour=one.colour,
                    examples=int(mine.sum()),
                    before=float(right_before[mine].mean()),
                    after=float(right_after[mine].mean()),
                )
            )
        return Accuracy(
            examples=len(places),
            of=len(labelled),
            before=float(right_before.mean()),
            after=float(right_after.mean()),
            classes=classes,
        )


def _read(drop: str) -> pl.Expr:
    return read_condition(drop, "drop")


def _nbytes(model: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in model.state_dict().values())
