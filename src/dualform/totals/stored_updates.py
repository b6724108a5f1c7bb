"""The stored updates of a parameter, chunk by chunk, with their coefficients at the end of the run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import polars as pl

from dualform.recursions import KINDS, Walked
from dualform.store.reader import Store
from dualform.store.tables import factor_table, settings_of
from dualform.totals.group_tensors import FOLDED
from dualform.totals.stretch import StretchUpdates

UpdatesByChunk = dict[int, StretchUpdates]
"""By the number of the chunk; chunks in which the parameter was not updated are left out."""
Coefficients = dict[str, Walked]
"""For the weight and its average: see FOLDED."""


def updates_by_chunk(store: Store, parameter: str) -> UpdatesByChunk:
    """Return the updates of a parameter.

    The run is over, so coefficients that are numbers are those at its end. What a chunk wrote then need not be carried through the later
    chunks, and the running average, which forgets, needs few chunks but the last.
    """
    by_chunk = _as_stored(store, parameter)
    kinds = {updates.kind for updates in by_chunk.values()}
    if not kinds or any(KINDS[kind].elementwise for kind in kinds):
        return by_chunk
    at_end = _coefficients_at_the_end(by_chunk)
    dtype = np.float64 if store.manifest.dtype == "float64" else np.float32
    rounding = float(np.finfo(dtype).eps)
    for name in FOLDED:
        _drop_lost(name, at_end.values(), rounding)
    for chunk, updates in by_chunk.items():
        by_chunk[chunk] = replace(updates, at_end=at_end[chunk])
    return by_chunk


def _as_stored(store: Store, parameter: str) -> UpdatesByChunk:
    number = store.parameter(parameter)
    by_chunk = {}
    for chunk in range(len(store.manifest.chunks)):
        lines = store.updates_in(chunk).filter(pl.col("parameter") == number)
        if not lines.height:
            continue
        by_chunk[chunk] = StretchUpdates(
            kind=lines["optimizer"][0],
            steps=lines["step"].to_numpy().astype(np.int64),
            settings=settings_of(lines),
            factors=factor_table(lines["factors"]),
            gradients=store.gradients_in(chunk, parameter),
        )
    return by_chunk


def _coefficients_at_the_end(by_chunk: UpdatesByChunk) -> dict[int, Coefficients]:
    """Return the coefficients of each chunk's updates at the end of the run."""
    coefficients: dict[int, Coefficients] = {}
    later: Coefficients = {}
    for chunk in sorted(by_chunk, reverse=True):
        updates = by_chunk[chunk]
        later = {name: updates.walked(name, later.get(name)) for name in FOLDED}
        coefficients[chunk] = dict(later)
    return coefficients


def _drop_lost(name: str, at_end: Collection[Coefficients], rounding: float) -> None:
    """Set coefficients to zero that vanish in the rounding of the largest, even if many add up."""
    sizes = [float(np.abs(walked[name].c).max(initial=0)) for walked in at_end]
    smallest = rounding**2 * max(sizes)
    for walked in at_end:
        coefficients = walked[name].c
        is_lost = np.abs(coefficients) < smallest
        kept = np.where(is_lost, 0.0, coefficients)
        walked[name] = replace(walked[name], c=kept)
