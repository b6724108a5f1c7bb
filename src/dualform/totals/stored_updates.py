"""The updates of a parameter as they are stored, chunk by chunk, with what becomes of them by the end of the run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import polars as pl

from dualform.recursions import KINDS, Walked
from dualform.store.reader import Store
from dualform.store.tables import factor_table, settings_of
from dualform.totals.group_tensors import OF
from dualform.totals.stretch import StretchUpdates

UpdatesByChunk = dict[int, StretchUpdates]
"""By the number of the chunk; chunks in which the parameter was not updated are left out."""
Coefficients = dict[str, Walked]
"""By what is kept of a group: see OF."""


def updates_by_chunk(store: Store, parameter: str) -> UpdatesByChunk:
    """Return the updates of a parameter.

    The run is over, so coefficients that are numbers are taken at its end: what one chunk wrote need not be carried through the
    later ones, and the running average holds little of all but the last.
    """
    by_chunk = _as_stored(store, parameter)
    kinds = {updates.kind for updates in by_chunk.values()}
    if not kinds or any(KINDS[kind].elementwise for kind in kinds):
        return by_chunk
    reaching = _coefficients_at_the_end(by_chunk)
    dtype = np.float64 if store.manifest.dtype == "float64" else np.float32
    rounding = float(np.finfo(dtype).eps)
    for of in OF:
        _drop_lost(of, reaching.values(), rounding)
    for chunk, updates in by_chunk.items():
        by_chunk[chunk] = replace(updates, reaching=reaching[chunk])
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
        later = {of: updates.walked(of, later.get(of)) for of in OF}
        coefficients[chunk] = dict(later)
    return coefficients


def _drop_lost(of: str, reaching: Collection[Coefficients], rounding: float) -> None:
    """Set coefficients to zero that are lost in the rounding of the largest, even if there are many."""
    sizes = [float(np.abs(walked[of].c).max(initial=0)) for walked in reaching]
    smallest = rounding**2 * max(sizes)
    for walked in reaching:
        coefficients = walked[of].c
        is_lost = np.abs(coefficients) < smallest
        kept = np.where(is_lost, 0.0, coefficients)
        walked[of] = replace(walked[of], c=kept)
