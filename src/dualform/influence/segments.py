"""Segments: the stretches of training that influence looks at one by one, by default epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dualform.errors import QuestionError
from dualform.store.reader import Store

MOST = 15
"""How many epochs are used by default, spread over the run."""
SAMPLE = "sample_id"
"""The column that names samples, unless told otherwise."""


@dataclass(frozen=True)
class Segment:
    """Steps begin ≤ step < end; their rows, by number."""

    begin: int
    end: int
    first_row: int
    end_row: int
    moment: int
    """The step whose weights the queries are taken from."""


def segments(
    store: Store, end: int, given: int | Sequence[tuple[int, int]] = MOST, sample: str | None = None
) -> list[Segment]:
    """The segments of a run up to step `end`.

    given: at most this many epochs, spread over the run, first and last included; or the segments themselves, (begin, end) in steps.
    An epoch is as many steps as it takes to see each sample once, on average: rows / distinct entries of the column `sample`.
    """
    steps = store.rows["step"].to_numpy()
    steps = steps[steps < end]
    if not len(steps):
        raise QuestionError(f"there are no rows before step {end}: nothing has an influence yet.")
    pairs = _told(given, end) if not isinstance(given, int) else _epochs(store, end, given, sample)
    rows = [np.searchsorted(steps, pair) for pair in pairs]
    return [
        Segment(begin, stop, int(first), int(last), _moment(begin, stop, store.snapshot_steps()))
        for (begin, stop), (first, last) in zip(pairs, rows, strict=True)
        if last > first
    ]


def _moment(begin: int, end: int, snapshots: Sequence[int]) -> int:
    """The middle; or a snapshot in the middle half, if there is one: its weights need not be rebuilt."""
    middle = (begin + end) // 2
    near = [step for step in snapshots if 4 * abs(step - middle) <= end - begin]
    return min(near, key=lambda step: abs(step - middle), default=middle)


def _told(given: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    pairs = [(int(begin), int(stop)) for begin, stop in given]
    edges = [edge for pair in pairs for edge in pair]
    if (
        not pairs
        or any(begin >= stop for begin, stop in pairs)
        or edges != sorted(edges)
        or not 0 <= edges[0] <= edges[-1] <= end
    ):
        raise QuestionError(
            f"segments={given!r}: expected (begin, end) pairs of steps from 0 to {end}, one after the other, none empty."
        )
    return pairs


def _epochs(store: Store, end: int, most: int, sample: str | None) -> list[tuple[int, int]]:
    if isinstance(most, bool) or most < 1:
        raise QuestionError(f"segments={most!r}: expected at least 1, or (begin, end) pairs of steps.")
    named = [c.name for c in store.manifest.columns if c.per == "row"]
    if sample is not None and sample not in named:
        raise QuestionError(
            f"sample={sample!r}: there is no such column per row. Columns: {', '.join(named) or 'none'}."
        )
    sample = sample or (SAMPLE if SAMPLE in named else None)
    rows = store.rows.filter(pl.col("step") < end)
    count = most if sample is None else max(1, round(rows.height / max(1, rows[sample].n_unique())))
    count = min(count, end)
    edges = np.linspace(0, end, count + 1).round().astype(int).tolist()
    taken = np.linspace(0, count - 1, min(most, count)).round().astype(int).tolist() if most > 1 else [count // 2]
    return [(edges[n], edges[n + 1]) for n in taken]
