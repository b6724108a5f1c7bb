"""Prompts put to kept totals with NumPy alone: PyTorch takes longer to import than the answer takes.

The same questions as `Recorded` answers from totals, with the same answers to rounding.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dualform.errors import DualformError
from dualform.paper.language import asked, beside, plain
from dualform.paper.language.asked import PARTS, WIDTH, Asked, Ints, Scores
from dualform.paper.language.shape import LAYER
from dualform.store.arrays import ArrayFile
from dualform.store.sealed import Sealed

STRETCH_BYTES = 4 << 20
"""So much of the key sums is multiplied at a time: while it is in the cache, its checksum is taken, too."""
Floats = np.ndarray[Any, np.dtype[Any]]


def find(folder: Path, where: str | None = None) -> Kept | None:
    """Totals that can be asked so; None: the question, or saying what is wrong with it, needs `Recorded`."""
    try:
        about, store = beside.read(folder), Sealed(folder)
        grouping = store.grouping([about.column], store.end_step, deltas=False)
        usual = about.layer == LAYER and not store.manifest.inexact and asked.of_positions(about.column, where)
        if grouping is None or not usual or store.end_step not in store.snapshot_steps():
            return None
        weights = _Weights(store)
    except DualformError:
        return None
    return Kept(about, store, grouping, weights) if weights.fit(about) else None


class Kept:
    """A language model's totals per training position, with its text."""

    def __init__(self, about: beside.Beside, store: Sealed, grouping: int, weights: _Weights):
        self.text, self._about = about.text, about
        self._store, self._grouping, self._weights = store, grouping, weights
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
    ) -> Asked:
        """As `Recorded.ask`."""
        asked.check(top, part)
        tokens = self.text.numbered(prompt)
        read = plain.read(self._about.shape, self._weights, tokens)
        here, _ = asked.conditions(self.text, self._about.column, (), where)
        by = self.scores(read.query, part)
        found, count = asked.passages(self.text, by.means() if mean else by, top, here, (), width)
        what = f"attention weight{PARTS[part]}, {'mean' if mean else 'sum'} over visits"
        following = asked.following(self.text, plain.softmax(read.logits))
        return Asked(prompt, what, self.text.vocabulary[tokens[-1]], following, count, found)

    @cached_property
    def _places(self) -> Ints:
        """(groups,): the position of each group."""
        return self._store.groups(self._grouping)[self._about.column].to_numpy()

    def scores(self, query: Floats, part: str = "both") -> Scores:
        """As `Recorded.scores`, for a query (d_in,): sums are read once, a stretch at a time."""
        split = self._about.shape.input
        here = {"both": slice(None), "input": slice(split), "recurrent": slice(split, None)}[part]
        number, layer = self._store.layer(self._about.layer)
        keys, visits = (f"{self._grouping}.{number}.{what}" for what in ("keys", "visits"))
        places = self._places
        totals, counts = np.zeros(len(places)), np.zeros(len(places), dtype=np.int64)
        if keys in self._totals:
            for low, sums in self._totals.stretches(keys, max(1, STRETCH_BYTES // (4 * layer.d_in))):
                totals[low : low + len(sums)] = plain.product(sums[:, here], query[here])
            known = self._totals[visits]
            counts[: len(known)] = known
        return asked.by_position(self.text, places, totals, counts)


class _Weights:
    """The weights at the end of the recording."""

    def __init__(self, store: Sealed):
        self._file = store.open_snapshot(ArrayFile, store.end_step)

    def __getitem__(self, name: str) -> Floats:
        return self._file[f"model.{name}"]

    def fit(self, about: beside.Beside) -> bool:
        """Whether they are those of a `LanguageModel` of these sizes."""
        names = {name.removeprefix("model.") for name in self._file if name.startswith("model.")}
        return {name: self._file.shape(f"model.{name}") for name in names} == plain.sizes(about.shape)
