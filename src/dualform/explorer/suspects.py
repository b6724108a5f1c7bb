"""Training examples whose label is perhaps wrong, as `dual.mislabelled()` ranks them."""

from __future__ import annotations

from threading import Lock
from typing import Any

from dualform.errors import NotRecordedError
from dualform.explorer.book import Book
from dualform.explorer.collection import Key
from dualform.explorer.forms import Suspect, Suspects
from dualform.explorer.subject import Subject

MOST = 5000
"""So many suspects are ranked."""


class Suspicion:
    """The ranking, computed once when it is first asked for."""

    def __init__(self, subject: Subject, book: Book):
        self._subject, self._book = subject, book
        self._lines: list[dict[str, Any]] | None = None
        self._places: dict[Key, int] = {}
        self._lock = Lock()

    @property
    def missing(self) -> str:
        """Why there is no ranking; empty if there is one."""
        if not self._subject.by or self._subject.label is None:
            return "The recording has no columns that name samples and labels."
        store = self._subject.dual.store
        if not store.manifest.keeps_gradients:
            return 'The recording keeps no error signals: record with keep="slots".'
        attending = [layer.name for layer in store.manifest.layers if layer.attends]
        if attending and store.is_summed(attending[-1]):
            return 'The recording keeps the gradients of whole rows, and no error signals at the output: record with keep="slots".'
        return ""

    def of(self, key: Key) -> tuple[float | None, int | None, int]:
        """A sample's score, its rank from 1 on, and among how many; nothing before the ranking was asked for."""
        if self._lines is None or key not in self._places:
            return None, None, 0
        place = self._places[key]
        return float(self._lines[place]["score"]), place + 1, self._book.samples.height

    def ranking(self) -> list[dict[str, Any]]:
        """All samples, the most suspicious first."""
        if self.missing:
            raise NotRecordedError(self.missing)
        with self._lock:
            if self._lines is None:
                lines = self._subject.dual.mislabelled(MOST, by=list(self._subject.by)).to_dicts()
                self._places = {tuple(line[c] for c in self._subject.by): place for place, line in enumerate(lines)}
                self._lines = lines
            return self._lines

    def suspects(self, *, offset: int, limit: int) -> Suspects:
        """Some of the ranking."""
        lines = self.ranking()
        found = []
        for place, line in enumerate(lines[offset : offset + limit]):
            key = tuple(line[column] for column in self._subject.by)
            label = self._book.label(self._book.find([str(part) for part in key]))
            found.append(
                Suspect(
                    rank=offset + place + 1,
                    key=list(key),
                    title=self._book.title(key),
                    shown=self._subject.show_training(key),
                    label=self._subject.label_of(key, label),
                    said=self._subject.label_of(key, None if line["said"] is None else int(line["said"])),
                    probability=line["probability"],
                    score=float(line["score"]),
                    visits=int(line["visits"]),
                )
            )
        return Suspects(of=len(lines), suspects=found)
