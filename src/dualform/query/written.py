"""Which slots wrote something: the others (padding, ignored labels) take no part in answers, unless a question asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dualform.query.cache import cached
from dualform.store.format import NO_ROW
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk

Bools = np.ndarray[Any, np.dtype[np.bool_]]


def has_silent(store: Store, layer: str, end: int) -> bool:
    """Whether any slot of a layer, up to step `end`, is silent. Chunks are looked at once for an open store."""

    def find() -> bool:
        return any(chunk.silent is not None for chunk in store.addresses(layer, end_step=end))

    return cached(store, ("has silent slots", layer), find, end)


def written(chunk: SlotChunk) -> Bools:
    """Return which slots of a chunk wrote something, (slots,)."""
    return np.ones(chunk.slots, np.bool_) if chunk.silent is None else ~chunk.silent


def rows_written(store: Store, layers: Sequence[str], end: int) -> Bools:
    """Return which rows wrote something in any of these layers, (rows,)."""

    def find() -> Bools:
        found = np.zeros(sum(chunk.rows for chunk in store.manifest.chunks), np.bool_)
        for layer in layers:
            for chunk in store.addresses(layer, end_step=end):
                rows = chunk.rows()[written(chunk)]
                found[rows[rows != NO_ROW]] = True
        return found

    return cached(store, ("rows that wrote something", *layers), find, end)
