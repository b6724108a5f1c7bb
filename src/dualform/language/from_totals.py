"""Answers to prompts from totals, with NumPy alone: PyTorch takes longer to import than the answer takes.

The same questions as `RecordedLanguageModel` answers from totals, with the same answers up to rounding.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import numpy as np

from dualform.errors import DualformError
from dualform.language import answers, numpy_model
from dualform.language.answers import PARTS, WIDTH, Ints, PromptAnswer, Scores
from dualform.language.description import Description, read_description
from dualform.language.shape import LAYER
from dualform.store.catalog import Catalog
from dualform.store.files import files_at
from dualform.store.tensors import ArrayFile

PIECE_BYTES = 4 << 20
"""How much of the key sums is multiplied at a time: its checksum is computed while it is in the cache."""
Floats = np.ndarray[Any, np.dtype[Any]]


def find_totals(path: str | os.PathLike[str], where: str | None = None) -> LanguageTotals | None:
    """Return the totals of a recording, or None if this question, or its error message, needs `RecordedLanguageModel`."""
    try:
        description = read_description(path)
        store = Catalog(files_at(path))
        grouping = store.grouping([description.column], store.end_step, deltas=False)
        if grouping is None or description.layer != LAYER or store.manifest.inexact:
            return None
        if not answers.uses_text_only(description.column, where) or store.end_step not in store.snapshot_steps():
            return None
        weights = _Weights(store)
    except DualformError:
        return None
    return LanguageTotals(description, store, grouping, weights) if weights.fit(description) else None


class LanguageTotals:
    """A language model's totals per training position, with its text."""

    def __init__(self, description: Description, store: Catalog, grouping: int, weights: _Weights):
        self.text = description.text
        self._description = description
        self._store = store
        self._grouping = grouping
        self._weights = weights
        self._totals = store.open_totals(ArrayFile)

    def ask(
        self,
        prompt: str,
        *,
        top: int = 10,
        where: str | None = None,
        part: str = "both",
        mean: bool = False,
        width: int = WIDTH,
    ) -> PromptAnswer:
        """As `RecordedLanguageModel.ask`."""
        answers.check_options(top, part)
        tokens = self.text.numbered(prompt)
        output = numpy_model.read(self._description.shape, self._weights, tokens)
        allowed, _ = answers.split_condition(self.text, self._description.column, (), where)
        by = self.scores(output.query, part)
        passages, count = answers.rank_passages(self.text, by.means() if mean else by, top, allowed, (), width)
        score = f"attention weight{PARTS[part]}, {'mean' if mean else 'sum'} over visits"
        following = answers.most_probable(self.text, numpy_model.softmax(output.logits))
        return PromptAnswer(prompt, score, self.text.vocabulary[tokens[-1]], following, count, passages)

    @cached_property
    def _positions(self) -> Ints:
        """(groups,): the training position of each group."""
        return self._store.groups(self._grouping)[self._description.column].to_numpy()

    def scores(self, query: Floats, part: str = "both") -> Scores:
        """As `RecordedLanguageModel.scores`, for a query (d_in,): the sums are read once, a piece at a time."""
        split = self._description.shape.input
        columns = {"both": slice(None), "input": slice(split), "recurrent": slice(split, None)}[part]
        number, layer = self._store.layer(self._description.layer)
        keys = f"{self._grouping}.{number}.keys"
        visits = f"{self._grouping}.{number}.visits"
        totals = np.zeros(len(self._positions))
        counts = np.zeros(len(self._positions), dtype=np.int64)
        if keys in self._totals:
            rows = max(1, PIECE_BYTES // (4 * layer.d_in))
            for low, sums in self._totals.stretches(keys, rows):
                totals[low : low + len(sums)] = numpy_model.product(sums[:, columns], query[columns])
            known = self._totals[visits]
            counts[: len(known)] = known
        return answers.scores_by_position(self.text, self._positions, totals, counts)


class _Weights:
    """The weights at the end of the recording."""

    def __init__(self, store: Catalog):
        self._file = store.open_snapshot(ArrayFile, store.end_step)

    def __getitem__(self, name: str) -> Floats:
        return self._file[f"model.{name}"]

    def fit(self, description: Description) -> bool:
        """Whether they are those of a `LanguageModel` of these sizes."""
        names = {name.removeprefix("model.") for name in self._file if name.startswith("model.")}
        shapes = {name: self._file.shape(f"model.{name}") for name in names}
        return shapes == numpy_model.sizes(description.shape)
