"""A training example's view: what it wrote over time, and which test examples read it."""

from __future__ import annotations

from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.errors import NotRecordedError
from dualform.explorer.book import Book
from dualform.explorer.forms import Named, Reader, SampleForm, Visit
from dualform.explorer.predicting import BATCH, Predictions
from dualform.explorer.subject import Subject, plain
from dualform.explorer.suspects import Suspicion

QUERY_BYTES = 128 << 20
"""Queries of so many bytes are kept; with longer queries, fewer test examples are looked at."""
MOST_SLOTS = 400
"""So many visits of a training example are read."""
FEW_OUTPUTS = 20
"""A value of at most so many numbers is shown as it is."""


class Reading:
    """Who reads a training example."""

    def __init__(self, subject: Subject, book: Book, predictions: Predictions, suspicion: Suspicion):
        self._subject, self._book, self._predictions, self._suspicion = subject, book, predictions, suspicion
        self._queries: dict[str, Tensor] = {}
        self._lock = Lock()

    def _queries_of(self, layer: str) -> Tensor:
        """(tests, d_in): the queries of the test examples, summed over their positions."""
        if self._subject.dual.store.is_summed(layer):
            return torch.zeros(0, 0)
        with self._lock:
            if not self._queries:
                width = sum(one["d_in"] for one in self._subject.info["layers"])
                end = min(len(self._predictions.test), QUERY_BYTES // (4 * max(width, 1)))
                found: dict[str, list[Tensor]] = {}
                for part, places in self._predictions.test.batches(BATCH, end):
                    for name, answer in self._subject.dual.attend(part.batch(list(places))).items():
                        found.setdefault(name, []).append(_summed(answer.queries.detach(), answer.layer.d_in))
                self._queries = {name: torch.cat(some) for name, some in found.items()}
            return self._queries.get(layer, torch.zeros(0, 0))

    def sample(self, given: list[str], layer: str, *, k: int) -> SampleForm:
        """Everything that is shown of a training example."""
        number = self._book.find(given)
        key, label = self._book.key(number), self._book.label(number)
        rows = np.flatnonzero(self._book.sample_of == number)
        places = np.flatnonzero(np.isin(self._book.rows_of(layer), rows))[:MOST_SLOTS]
        problem, keys, values = "", None, None
        try:
            keys, values = self._subject.dual.layer(layer).take(self._book.slots_of(layer)[places].tolist())
        except NotRecordedError as error:
            problem = str(error)
        suspicion, rank, suspected = self._suspicion.of(key)
        first = self._book.rows.row(int(rows[0]), named=True)
        return SampleForm(
            key=list(key),
            title=self._book.title(key),
            shown=self._subject.show_training(key),
            label=self._subject.label_of(key, label),
            columns={name: plain(value) for name, value in first.items() if name != "step"},
            layer=layer,
            visits=[] if keys is None or values is None else self._visits(places, layer, keys, values),
            units=self._units(layer, values),
            problem=problem,
            readers=[] if keys is None or values is None else self._readers(layer, keys, values, k),
            read_among=len(self._queries_of(layer)),
            suspicion=suspicion,
            suspicion_rank=rank,
            suspected=suspected,
        )

    def _units(self, layer: str, values: Tensor | None) -> list[Named]:
        """The model's outputs, if this layer makes them and they are few."""
        if values is None or layer != self._predictions.last_layer or values.shape[1] > FEW_OUTPUTS:
            return []
        return [self._subject.named(unit) for unit in range(values.shape[1])]

    def _visits(self, places: Any, layer: str, keys: Tensor, values: Tensor) -> list[Visit]:
        """places: among the slots that take part."""
        steps = self._book.steps[self._book.rows_of(layer)[places]]
        few = bool(self._units(layer, values))
        return [
            Visit(
                step=int(step),
                key=float(key.norm()),
                value=float(value.norm()),
                values=[float(f"{x:.4g}") for x in value.tolist()] if few else [],
            )
            for step, key, value in zip(steps.tolist(), keys, values, strict=True)
        ]

    def _readers(self, layer: str, keys: Tensor, values: Tensor, k: int) -> list[Reader]:
        queries = self._queries_of(layer)
        if not len(queries):
            return []
        weights = queries.to(keys.dtype) @ keys.T
        totals = weights.sum(1).double().numpy()
        best = np.lexsort((np.arange(len(totals)), -np.abs(totals)))[:k]
        is_last = bool(self._units(layer, values))
        found = []
        for number in best.tolist():
            example = self._predictions.example(number)
            answer = example.answer.value if example.answer is not None else None
            adds = float(weights[number] @ values[:, int(answer)]) if is_last and isinstance(answer, int) else None
            found.append(Reader(example=example, weight=float(totals[number]), contribution=adds))
        return found


def _summed(queries: Tensor, d_in: int) -> Tensor:
    """(tests, positions, d_in) → (tests, d_in); of one-hot queries, which are given by the place of their one, how many each has."""
    if queries.is_floating_point():
        return queries.sum(1)
    places = queries.reshape(len(queries), -1).long()
    counts = torch.zeros(len(queries), d_in + 1)
    return counts.scatter_add_(1, places.where(places >= 0, d_in), torch.ones(places.shape))[:, :d_in]
