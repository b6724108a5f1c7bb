"""Coefficient matrices, kept in files beside the store.

They are the same for every question, and finding them takes a gradient of every step, as many products as a question itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from dualform.dual.coefficients import Updates, content_of
from dualform.dual.gradients import compute_dtype, description
from dualform.dual.replay import Backward
from dualform.dual.rows import Rows
from dualform.store.cache_files import cache_name, check_cache, read_cache, write_cache
from dualform.store.reader import Store
from dualform.store.tensors import TensorFile

VERSION = 1
"""Of what is kept."""
SHARE = 0.25
"""They are kept if those of all parameters take at most this part of the store's size."""
FILE_BYTES = 64 << 20
"""How many bytes of coefficients are gathered in memory for one file."""

Places = range
"""Updates that follow each other, by their places."""


def coefficient_matrices(
    store: Store,
    updates: Updates,
    rows: Rows | None = None,
    *,
    wide: bool = False,
) -> Iterator[tuple[int, Tensor]]:
    """(place of the update, its coefficients), from the last to the first: read, or replayed and then kept. As Backward gives them."""
    if wide or rows is not None or not is_kept(store, updates):
        yield from Backward(store, updates, rows, wide=wide)
        return
    shape = tuple(description(store, updates.parameter).shape)
    stretches = _stretches(store, updates)
    files = [_read(store, updates, stretch, shape) for stretch in stretches]
    found = [file for file in files if file is not None]
    if len(found) < len(stretches):
        yield from _replayed(store, updates, stretches, shape)
        return
    for stretch, file in zip(stretches, found, strict=True):
        coefficients = file["coefficients"]
        for place in reversed(stretch):
            yield place, coefficients[place - stretch.start]


def is_kept(store: Store, updates: Updates) -> bool:
    """Whether coefficients are kept: those of the whole recording, if they are small beside it."""
    if updates.end != store.end_step or updates.begin:
        return False
    if compute_dtype(store, updates.parameter) == torch.float64:
        return False
    numbers = sum(int(np.prod(parameter.shape)) for parameter in store.manifest.parameters)
    return 4 * numbers * store.end_step <= SHARE * store.nbytes


def _stretches(store: Store, updates: Updates) -> list[Places]:
    """Cut the updates into those of each file, the last ones first."""
    numbers = int(np.prod(description(store, updates.parameter).shape))
    size = max(1, FILE_BYTES // (4 * max(numbers, 1)))
    count = len(updates.steps)
    return [range(low, min(low + size, count)) for low in reversed(range(0, count, size))]


def _name(store: Store, updates: Updates, stretch: Places) -> str:
    # All gradients of a run matter to all coefficients: later ones by what an optimizer makes of an earlier one, earlier ones by its state
    built_from = [VERSION, updates.parameter, content_of(updates).hex(), stretch.start, stretch.stop]
    return cache_name("coefficients", store.manifest, updates.begin, updates.end, built_from)


def _read(store: Store, updates: Updates, stretch: Places, shape: tuple[int, ...]) -> TensorFile | None:
    file = read_cache(store.files, _name(store, updates, stretch))
    if file is not None:
        check_cache(file, {"coefficients": (len(stretch), *shape)})
    return file


def _replayed(
    store: Store,
    updates: Updates,
    stretches: list[Places],
    shape: tuple[int, ...],
) -> Iterator[tuple[int, Tensor]]:
    """Replay, and write the file of each stretch when its first update is reached."""
    walk = iter(Backward(store, updates))
    for stretch in stretches:
        gathered = torch.empty(len(stretch), *shape)
        for place in reversed(stretch):
            reached, coefficient = next(walk)
            assert reached == place
            gathered[place - stretch.start] = coefficient
            yield place, coefficient
        if not gathered.isfinite().all():  # the question is asked again in float64
            yield from walk
            return
        write_cache(store.files, _name(store, updates, stretch), {"coefficients": [gathered.numpy()]})
        store.decoded(gathered.nbytes)
