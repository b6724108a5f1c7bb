"""Where an answer comes from: the scores of all slots of a layer, and what is told of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
import torch

from dualform.errors import QuestionError
from dualform.explorer.book import Book
from dualform.explorer.forms import Curve, Kind, Parts, Prepared, Source, Sources, Timeline, Total, View
from dualform.explorer.inputs import Inputs, can_be_joined, joined
from dualform.explorer.keeping import Kept
from dualform.explorer.predicting import Predictions
from dualform.explorer.subject import Subject
from dualform.progress import Progress
from dualform.store.format import NO_ROW, SHARED

Floats = np.ndarray[Any, np.dtype[Any]]
KEPT_BYTES = 192 << 20
"""Scores of so many bytes are kept, so that another look at the same answer needs no scan."""
TOGETHER = 16
"""So many that wait for the same layer are answered by one scan."""
BEST = 500
"""The curves show so many slots of each class, as the paper's figures."""
MOST_CLASSES = 50
"""Curves are drawn for so many classes at most."""
SENTENCES: dict[Kind, tuple[str, str]] = {
    "attention": (
        "Attention",
        "Attention weight = key · query: how much the layer looks at a training example, as in the paper. It does not say what "
        "is read there.",
    ),
    "contribution": (
        "Contribution",
        "Contribution = attention weight × value, towards the chosen output: what each training example adds to it or takes "
        "from it.",
    ),
    "influence": (
        "Influence",
        "Influence: what would change in the chosen answer if something had not been in the training data; positive: it supports "
        "the answer. An estimate from whitened gradients over all epochs: its order and signs count, not its units.",
    ),
}
EXACT = "In this layer initial part + classes = the model's output, exact to rounding."
FIRST_ORDER = "In a hidden layer this is first order; the remainder is what that leaves out."


class Scoring:
    """Scores of all slots for one input; kept for a while."""

    def __init__(self, subject: Subject, book: Book, predictions: Predictions):
        self._subject, self._book, self._predictions = subject, book, predictions
        self._kept: Kept[Floats] = Kept(KEPT_BYTES, lambda scores: scores.nbytes)
        self._lock, self._scanning = Lock(), dict[str, Lock]()
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._parts: Kept[Parts] = Kept(1 << 20, lambda _: 64)

    @property
    def views(self) -> list[View]:
        """What this run can be asked for, and why not where it cannot."""
        keep = self._subject.info["keep"]
        sums = any(kept["kind"] in ("deltas", "both") for kept in self._subject.info["totals"])
        no_errors = (
            "this run keeps keys only, no error signals" if keep == "keys" or (keep == "totals" and not sums) else ""
        )
        no_slots = "" if keep in ("slots", "rows") else f"it is estimated from slots, and this run keeps {keep} only"
        collected = self._subject.collected
        no_training = f"it needs a recording of the training, and this run was {collected}" if collected else ""
        missing = {"attention": self._why_no_attention, "contribution": no_training or no_errors, "influence": no_slots}
        return [
            View(kind=kind, name=name, sentence=sentence, missing=missing[kind])
            for kind, (name, sentence) in SENTENCES.items()
        ]

    @property
    def _why_no_attention(self) -> str:
        """Why no layer has attention weights; empty if one has."""
        store = self._subject.dual.store
        attending = [layer.name for layer in store.manifest.layers if layer.attends]
        if not attending or not all(map(store.is_summed, attending)):
            return ""
        return "this run keeps the gradients of whole rows, and no keys of single positions"

    def scores(self, address: str, layer: str, kind: Kind, target: int) -> Floats:
        """(n,): one score for each slot that takes part, as in Book.rows_of()."""
        key = (address, layer, kind, None if kind == "attention" else target)
        return self._kept.get(key, lambda: self._scanned(address, layer, kind, target))

    def _scanned(self, address: str, layer: str, kind: Kind, target: int) -> Floats:
        if kind == "attention":
            return self._attention(address, layer)
        if kind == "influence":
            raise QuestionError("influence takes a while: ask for it as a job first.")
        answer = self._subject.dual.contributions(self._predictions.inputs(address), target=target)[layer]
        found = [contributions[0] for _, contributions in answer.scores()]
        return (torch.cat(found) if found else torch.zeros(0)).float().numpy()

    @contextmanager
    def announced(self, address: str, layer: str, kind: Kind) -> Iterator[None]:
        """While somebody waits for an answer: whoever scans the layer first finds those of the others on the way."""
        if kind != "attention":
            yield
            return
        with self._lock:
            self._waiting[layer, address] += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting[layer, address] -= 1
                if not self._waiting[layer, address]:
                    del self._waiting[layer, address]

    def _attention(self, address: str, layer: str) -> Floats:
        """(n,), summed over the query's positions. One scan answers up to TOGETHER that wait."""
        with self._lock:
            scanning = self._scanning.setdefault(layer, Lock())
        with scanning:
            known = self._kept.peek((address, layer, "attention", None))
            if known is not None:  # found by another's scan meanwhile
                return known
            asked = self._together(address, layer)
            answer = self._subject.dual.attend(joined(list(asked.values())))[layer]
            found = [weights.sum(1) for _, weights in answer.scores()]
            scores: Floats = (torch.cat(found, 1) if found else torch.zeros(len(asked), 0)).float().numpy()
            for place, one in enumerate(asked):
                if one != address:
                    self._kept.put((one, layer, "attention", None), np.array(scores[place]))
            return np.array(scores[0])

    def _together(self, address: str, layer: str) -> dict[str, Inputs]:
        """Inputs by address: the one that is asked for, and others that wait for the same layer."""
        asked = {address: self._predictions.inputs(address)}
        with self._lock:
            waiting = [other for name, other in self._waiting if name == layer and other != address]
        for other in waiting:
            if len(asked) == TOGETHER or (other, layer, "attention", None) in self._kept:
                continue
            try:
                inputs = self._predictions.inputs(other)
            except QuestionError:
                continue  # they will be told
            if can_be_joined(inputs, asked[address]):
                asked[other] = inputs
        return asked

    def estimate(self, asked: Sequence[tuple[str, int]], progress: Progress | None = None) -> list[Prepared]:
        """Estimate the influence of everything on some outputs of some inputs, (input, output); long work, after which
        sources() tells of them, if they were no more than can_estimate."""
        dual, by = self._subject.dual, self._subject.by
        influence = dual.influence(
            joined([self._predictions.inputs(address) for address, _ in asked]),
            target=[target for _, target in asked],
            sample=by[-1] if by else None,
            progress=progress,
        )
        for layer in influence:
            scores = np.zeros((len(asked), dual.store.slots(layer)), np.float32)
            for slots, found in influence[layer].scores():
                if progress is not None:
                    progress(f"influence in layer {layer}", int(slots[-1]) if len(slots) else 0, scores.shape[1])
                scores[:, slots.numpy()] = found.float().numpy()
            for (address, target), own in zip(asked, scores, strict=True):
                self._kept.put((address, layer, "influence", target), own[self._book.slots_of(layer)])
        return [Prepared(input=address, target=target, layers=list(influence)) for address, target in asked]

    @property
    def can_estimate(self) -> int:
        """So many scores by influence are kept at a time, with room for others."""
        slots: int = sum(layer["slots"] for layer in self._subject.info["layers"])
        return max(1, KEPT_BYTES // (2 * 4 * max(1, slots)))

    def split(self, address: str, layer: str, target: int) -> Parts:
        """Initial part, slots and remainder of an output."""

        def compute() -> Parts:
            inputs = self._predictions.inputs(address)
            answer = self._subject.dual.contributions(inputs, target=target)[layer]
            line = answer.parts().row(0, named=True)
            column = answer.initial_column
            numbers = {name: line[name] for name in ("slots", "remainder", "target")}
            return Parts(initial=line[column], name="initial part" if column == "initial" else column, **numbers)

        return self._parts.get((address, layer, target), compute)

    def sources(
        self, address: str, layer: str, kind: Kind, *, target: int | None, k: int, absolute: bool, last: bool
    ) -> Sources:
        """Everything that is shown of a layer."""
        if target is None:
            target = int(self._predictions.logits(address).argmax())
        keep = self._subject.info["keep"]
        sentence = SENTENCES[kind][1]
        exact = kind == "attention" or (kind == "contribution" and last)
        if kind == "contribution":
            sentence += " " + (EXACT if last else FIRST_ORDER)
        parts = self.split(address, layer, target) if kind == "contribution" else None
        if keep == "totals":
            return Sources(
                layer=layer, kind=kind, target=target, sentence=sentence, exact=exact, highest=[], lowest=[],
                totals=self._kept_totals(address, layer, kind, target), grouped_by=self._subject.label or "",
                parts=parts, ranks=[], curves=[], time=None,
            )  # fmt: skip
        scores = self.scores(address, layer, kind, target)
        rows = self._book.rows_of(layer)
        sizes = np.abs(scores) if absolute and kind == "attention" else scores
        time = self._time(sizes, self._book.steps_of(layer))
        shared = sizes[rows == NO_ROW]
        sizes, rows = sizes[rows != NO_ROW], rows[rows != NO_ROW]
        by_sample = np.bincount(self._book.sample_of[rows], sizes, minlength=self._book.samples.height)
        ranks, curves = self._curves(sizes, rows)
        return Sources(
            layer=layer,
            kind=kind,
            target=target,
            sentence=sentence,
            exact=exact,
            highest=self._best(by_sample, sizes, rows, k),
            lowest=self._best(-by_sample, -sizes, rows, k, sign=-1) if kind != "attention" else [],
            totals=self._totals(sizes, rows, shared),
            grouped_by=self._subject.label or "",
            parts=parts,
            ranks=ranks,
            curves=curves,
            time=time,
        )

    def _best(self, by_sample: Floats, scores: Floats, rows: Any, k: int, sign: int = 1) -> list[Source]:
        samples = self._book.sample_of[rows]
        there = np.flatnonzero(np.bincount(samples))  # an example whose slots wrote nothing is no source
        if not len(there):
            return []
        some = there[np.argpartition(-by_sample[there], min(k, len(there)) - 1)[:k]]
        some = some[np.lexsort((some, -by_sample[some]))]
        found = []
        for number in some.tolist():
            slots = np.flatnonzero(samples == number)
            strongest = slots[np.argmax(scores[slots])]
            key, label = self._book.key(number), self._book.label(number)
            found.append(
                Source(
                    key=list(key),
                    title=self._book.title(key),
                    shown=self._subject.show_training(key),
                    label=self._subject.label_of(key, label),
                    weight=sign * float(by_sample[number]),
                    step=int(self._book.steps[rows[strongest]]),
                    visits=int(self._book.samples[number, "visits"]),
                )
            )
        return found

    def _totals(self, scores: Floats, rows: Any, shared: Floats) -> list[Total]:
        """What each class adds up to. shared: the scores of slots that serve all rows."""
        if self._subject.label is None:
            return []
        sums = np.bincount(self._book.class_of[rows], scores, minlength=len(self._book.classes))
        found = [self._total(value, place, sums[place]) for place, value in enumerate(self._book.classes)]
        return _with_shared(found, shared)

    def _total(self, value: Any, place: int, total: float) -> Total:
        named = self._subject.named(value, place)
        return Total(value=named.value, name=named.name, colour=named.colour, total=float(total))

    def _kept_totals(self, address: str, layer: str, kind: Kind, target: int) -> list[Total]:
        """From totals alone, without slots."""
        if self._subject.label is None:
            return []
        inputs, dual = self._predictions.inputs(address), self._subject.dual
        answer = dual.attend(inputs)[layer] if kind == "attention" else dual.contributions(inputs, target=target)[layer]
        frame = answer.total(self._subject.label).group_by(self._subject.label).sum().sort(self._subject.label)
        of_rows = frame.drop_nulls(self._subject.label)
        lines = zip(of_rows[self._subject.label].to_list(), of_rows["total"].to_list(), strict=True)
        found = [self._total(value, place, total) for place, (value, total) in enumerate(lines)]
        return _with_shared(found, frame.filter(frame[self._subject.label].is_null())["total"].to_numpy())

    def _curves(self, scores: Floats, rows: Any) -> tuple[list[int], list[Curve]]:
        classes = self._book.class_of[rows]
        ranks = np.unique(np.geomspace(1, BEST, 70).round().astype(int))
        curves = []
        for place, value in enumerate(self._book.classes[:MOST_CLASSES]):
            mine = scores[classes == place]
            if not len(mine):
                continue
            best = -np.sort(np.partition(-mine, min(BEST, len(mine)) - 1)[:BEST])
            named = self._subject.named(value, place)
            shown = best[ranks[ranks <= len(best)] - 1]
            curves.append(Curve(name=named.name, colour=named.colour, values=_rounded(shown)))
        return ranks.tolist(), curves

    def _time(self, scores: Floats, steps: Any) -> Timeline:
        edges = self._book.edges
        place = np.clip(np.searchsorted(edges, steps, side="right") - 1, 0, len(edges) - 2)
        positive, negative = (
            np.bincount(place, np.where(sign * scores > 0, scores, 0), minlength=len(edges) - 1) for sign in (1, -1)
        )
        return Timeline(
            steps=((edges[:-1] + edges[1:] - 1) / 2).tolist(),
            positive=_rounded(positive),
            negative=_rounded(negative),
            cumulative=_rounded(np.cumsum(positive + negative)),
        )


def _with_shared(totals: list[Total], shared: Floats) -> list[Total]:
    """The totals of classes, and that of the slots that serve all rows, if there are any: they belong to no class."""
    if not len(shared):
        return totals
    return [*totals, Total(value=None, name=SHARED, colour=len(totals), total=float(shared.sum()))]


def _rounded(values: Any) -> list[float]:
    """Five digits are more than a picture shows."""
    return [float(f"{value:.5g}") for value in np.asarray(values).tolist()]
