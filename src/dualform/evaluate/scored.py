"""The views that were asked for, computed one after the other; what a run does not answer is told, not raised."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from dualform.errors import NotRecordedError, QuestionError
from dualform.evaluate.peers import PEERS, installed
from dualform.evaluate.retrain import Progress
from dualform.evaluate.study import Study
from dualform.evaluate.views import VIEWS, View
from dualform.query.opened import Dual


class Scored(NamedTuple):
    """One view's scores (examples, samples), or why there are none."""

    view: str
    scores: Tensor | None
    seconds: float
    why: str | None


def chosen(views: Sequence[str] | None, study: Study) -> dict[str, View]:
    """Views by their names; None: all, and the peers that are installed if the study has samples to show them."""
    known = VIEWS | PEERS
    if views is None:
        return VIEWS | ({name: PEERS[name] for name in installed()} if study.samples is not None else {})
    unknown = [name for name in views if name not in known]
    if unknown or not views:
        raise QuestionError(f"views={list(views)!r}: expected some of {', '.join(map(repr, known))}.")
    return {name: known[name] for name in views}


def scored(views: dict[str, View], dual: Dual, study: Study, progress: Progress | None = None) -> Iterator[Scored]:
    """Each view in turn."""
    for name, view in views.items():
        before = time.perf_counter()
        found, why = None, None
        try:
            found = view(dual, study, progress)
        except NotRecordedError as error:
            why = str(error)
        yield Scored(name, found, time.perf_counter() - before, why)
