"""The views that were asked for, computed one after the other; what a run does not answer is told, not raised."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from dualform.errors import NotRecordedError, QuestionError
from dualform.evaluate.study import Study
from dualform.evaluate.views import VIEWS, View, peers
from dualform.progress import Progress
from dualform.query.dual import Dual

PEERS_CURE = "pip install 'dualform[peers]'"


class Scored(NamedTuple):
    """One view's scores (examples, samples), or why there are none."""

    view: str
    scores: Tensor | None
    seconds: float
    why: str | None


def chosen(views: Sequence[str] | None, study: Study) -> dict[str, View]:
    """Views by their names; None: all, and the peers that are installed if the study has samples to show them."""
    others = peers()
    if views is None:
        if study.samples is None:
            return VIEWS
        return VIEWS | {name: peer.view for name, peer in others.items() if peer.installed}

    unknown = [name for name in views if name not in VIEWS and name not in others]
    if unknown or not views:
        known = ", ".join(map(repr, [*VIEWS, *others]))
        cure = "" if others else f" Peers (kronfluence, Captum, TRAK) come with {PEERS_CURE}."
        raise QuestionError(f"views={list(views)!r}: expected some of {known}.{cure}")
    missing = sorted({others[name].package for name in views if name in others and not others[name].installed})
    if missing:
        raise QuestionError(f"views={list(views)!r} need {', '.join(missing)}: {PEERS_CURE}.")
    return {name: VIEWS[name] if name in VIEWS else others[name].view for name in views}


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
