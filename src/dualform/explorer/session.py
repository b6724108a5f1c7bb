"""One run being explored: every question the page asks, answered as plain data over the public API."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

import dualform
from dualform.errors import QuestionError, UnknownLayerError
from dualform.explorer.book import Book
from dualform.explorer.edits import Edits
from dualform.explorer.forms import (
    Colours,
    Count,
    Counted,
    LayerInfo,
    Line,
    Logged,
    RunForm,
    Series,
    TextAbility,
    Verified,
)
from dualform.explorer.predicting import Predictions
from dualform.explorer.reading import Reading
from dualform.explorer.sources import Scoring
from dualform.explorer.subject import Subject, plain
from dualform.explorer.suspects import Suspicion
from dualform.explorer.texts import Texts
from dualform.figures.colours import CLASSES, SERIES
from dualform.progress import Progress
from dualform.query.contributions import gates_of
from dualform.version import __version__

POINTS = 400
"""So many points of a logged series are sent."""
GROUPS = 50
"""So many groups of a column are counted one by one."""


class Session:
    """A run, ready to be asked."""

    def __init__(self, subject: Subject):
        self._take(subject)

    def _take(self, subject: Subject) -> None:
        self.subject = subject
        self.book = Book(subject)
        self.predictions = Predictions(subject)
        self.scoring = Scoring(subject, self.book, self.predictions)
        self.edits = Edits(subject, self.book, self.predictions)
        self.suspicion = Suspicion(subject, self.book)
        self.text = None if subject.language is None else Texts(subject, subject.language)
        self.reading = Reading(subject, self.book, self.predictions, self.suspicion)

    def warm(self) -> None:
        """Compute what the first view needs, so that the first click does not wait for it."""
        self.run()
        for layer in self.subject.dual.layers:
            if self.subject.info["keep"] != "totals":
                self.book.rows_of(layer)

    def layer(self, name: str) -> dict[str, Any]:
        """A recorded layer."""
        for layer in self.subject.info["layers"]:
            if layer["name"] == name and name in self.subject.dual.layers:
                return dict(layer)
        raise UnknownLayerError(f"there is no layer {name!r}. Layers: {', '.join(self.subject.dual.layers)}.")

    def is_last(self, name: str) -> bool:
        """Whether a layer's output is the model's."""
        return name == self.predictions.last_layer

    def run(self) -> RunForm:
        """The run, and what can be asked."""
        info, subject = self.subject.info, self.subject
        manifest = {layer.name: layer for layer in subject.dual.store.manifest.layers}
        classifies = bool(len(subject.test)) and subject.language is None
        units = self.predictions.logits("test:0").shape[0] if classifies else 0
        return RunForm(
            title=subject.title,
            version=__version__,
            steps=info["steps"],
            rows=info["rows"],
            bytes=info["bytes"],
            keep=info["keep"],
            dtype=info["dtype"],
            ended=str(info["ended"]),
            columns=info["columns"],
            layers=[
                LayerInfo(
                    name=layer["name"],
                    kind=layer["kind"],
                    d_in=layer["d_in"],
                    d_out=layer["d_out"],
                    slots=layer["slots"],
                    attends=manifest[layer["name"]].attends,
                    last=self.is_last(layer["name"]),
                    gates=list(gates_of(manifest[layer["name"]])),
                )
                for layer in info["layers"]
                if layer["name"] in subject.dual.layers
            ],
            left_out=info["left_out"],
            inexact={name: f"from step {mark['step']} on: {mark['why']}" for name, mark in info["inexact"].items()},
            totals=[" + ".join(kept["by"]) for kept in info["totals"]],
            label=subject.label or "",
            by=list(subject.by),
            units=[subject.named(unit) for unit in range(min(units, 200))],
            groups=self.edits.groups,
            tests=len(subject.test),
            samples=self.book.samples.height,
            parts=[part.name for part in subject.test.parts if part.name],
            accuracy=self.predictions.accuracy if classifies else None,
            views=self.scoring.views,
            draws=subject.draw is not None,
            suspects=self.suspicion.missing,
            edits=self.edits.missing,
            collected=subject.collected,
            text=None
            if subject.language is None
            else TextAbility(prompt=subject.language.prompt, longest=subject.language.longest),
            colours=Colours(classes=list(CLASSES), series=list(SERIES)),
            inputs=self.predictions.kind,  # type: ignore[arg-type]
        )

    def log(self) -> Logged:
        """What log() was given, each series in at most POINTS points."""
        frame = self.subject.dual.log
        series = []
        for name in frame.columns:
            if name == "step" or not frame[name].dtype.is_numeric():
                continue
            some = frame.select("step", name).drop_nulls()
            edges = np.unique(np.linspace(0, some.height, min(POINTS, some.height) + 1).round().astype(int))
            steps, values = some["step"].to_numpy(), some[name].to_numpy()
            pieces = list(itertools.pairwise(edges))
            series.append(
                Series(
                    name=name,
                    steps=[float(steps[low:high].mean()) for low, high in pieces],
                    values=[_finite(float(values[low:high].mean())) for low, high in pieces],
                )
            )
        return Logged(series=series)

    def rows(self, column: str) -> Counted:
        """Rows by a column."""
        if column not in self.book.rows.columns or column == "step":
            known = [name for name in self.book.rows.columns if name != "step"]
            raise QuestionError(f"there is no column {column!r} with one entry a row. Columns: {', '.join(known)}.")
        counts = self.book.rows[column].value_counts(sort=True)
        some = counts.head(GROUPS).sort(column)
        found = []
        for place, (value, count) in enumerate(some.iter_rows()):
            named = self.subject.named(plain(value), place)
            is_label = column == self.subject.label
            name, colour = (named.name, named.colour) if is_label else (str(value), place)
            found.append(Count(value=named.value, name=name, colour=colour, rows=count))
        return Counted(column=column, groups=counts.height, counts=found)

    def verify(self, progress: Progress | None = None) -> Verified:
        """The certificate, with the gap in plain words."""
        certificate = self.subject.dual.verify(progress=progress)
        lines = [
            Line(
                parameter=line["parameter"],
                gap=_finite(line["gap"]),
                floor=_finite(line["floor"]),
                movement=_finite(line["movement"]),
                verdict=line["verdict"],
                words=in_words(line["gap"], line["verdict"], line["reason"]),
            )
            for line in certificate.frame.to_dicts()
        ]
        return Verified(
            passed=certificate.passed,
            step=certificate.step,
            compared_with=certificate.compared_with,
            lines=lines,
        )

    def build_totals(self, by: list[str], progress: Progress | None = None) -> RunForm:
        """Build totals, so that questions and edits by these columns need no scan; gives the run as it is then."""
        dualform.build_totals(self.subject.dual.store.location, by, progress=progress)
        self._take(self.subject.again())
        return self.run()


def in_words(gap: float, verdict: str, reason: str) -> str:
    """What a gap means."""
    if verdict != "pass":
        return reason
    if not math.isfinite(gap) or gap <= 0:
        return reason
    return f"the dual form and the trained weights agree to one part in {_about(1 / gap)} of what training changed"


def _about(number: float) -> str:
    digits = math.floor(math.log10(number))
    rounded = round(number, -digits)
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if rounded >= size:
            return f"{rounded / size:,.0f} {word}"
    return f"{rounded:,.0f}"


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
