"""The updates of one parameter over a stretch of training, and their coefficients where these are numbers (the SGD family)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock

import numpy as np
import polars as pl
from cachetools import LRUCache, cached

from dualform import recursions
from dualform.arrays import Floats
from dualform.errors import NotRecordedError
from dualform.recursions import KINDS, Walked
from dualform.store.collection import refuse_collected
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk
from dualform.store.tables import factor_table, settings_of

WALKS = 64
"""How many walks are kept."""


@dataclass(frozen=True)
class Updates(recursions.Updates):
    """The updates of one parameter over a stretch of training."""

    parameter: str
    begin: int
    end: int

    def each(self) -> Iterator[dict[str, float]]:
        """The settings of every update."""
        return (self.at(place) for place in range(len(self.steps)))

    def between(self, begin: int, end: int) -> Updates:
        """Those of a shorter stretch."""
        here = slice(*np.searchsorted(self.steps, [begin, end]).tolist())
        settings = {name: values[here] for name, values in self.settings.items()}
        return Updates(self.kind, self.steps[here], settings, self.factors[here], self.parameter, begin, end)


def update_table(store: Store, parameter: str, begin: int, end: int) -> pl.DataFrame:
    """What was recorded of a parameter's updates from `begin` to `end` (in steps), a line each."""
    is_mine = pl.col("parameter") == store.parameter(parameter)
    return store.updates.filter(is_mine & pl.col("step").is_between(begin, end, closed="left"))


def updates_of(store: Store, parameter: str, *, begin: int = 0, end: int | None = None) -> Updates:
    """The updates of a parameter from `begin` to `end` (in steps; default: all that is sealed), by an optimizer that can be replayed."""
    refuse_collected(store, "this question")
    updates = recorded_updates(store, parameter, begin=begin, end=end)
    if updates.kind not in KINDS:
        raise NotRecordedError(
            f"{parameter!r} was trained by {updates.kind}, whose updates cannot be replayed, so its slots have no coefficients: there are "
            f"no values, contributions, masks or weights between snapshots. attend() and influence() need no coefficients."
        )
    return updates


def recorded_updates(store: Store, parameter: str, *, begin: int = 0, end: int | None = None) -> Updates:
    """The same, by any optimizer."""
    if store.manifest.keep == "totals":
        raise NotRecordedError(
            f"{store.location} keeps totals only, no slots: it answers totals, masks and contributions by the columns they "
            f'were kept for. Record with keep="slots" for the rest.'
        )
    if store.manifest.keep == "keys":
        raise NotRecordedError(
            f"{store.location} keeps keys only: it answers attention weights, not values, contributions, masks or the "
            f'certificate. Record with keep="slots" for those.'
        )
    end = store.end_step if end is None else end
    updates = update_table(store, parameter, begin, end)
    steps = updates["step"].to_numpy().astype(np.int64)
    kinds = updates["optimizer"].unique().to_list()
    if len(kinds) > 1:
        raise NotRecordedError(f"{parameter!r} was trained by several kinds of optimizers: {kinds}.")
    return Updates(
        kinds[0] if kinds else "sgd",
        steps,
        settings_of(updates),
        factor_table(updates["factors"]),
        parameter,
        begin,
        end,
    )


def not_replayed(store: Store, end: int) -> dict[str, str]:
    """The parameters whose optimizer cannot be replayed, with the name of that optimizer."""
    if store.manifest.keep in ("keys", "totals"):
        return {}
    found = store.updates.filter(pl.col("step") < end).select("parameter", "optimizer").unique()
    return {store.manifest.parameters[number].name: kind for number, kind in found.iter_rows() if kind not in KINDS}


@dataclass(frozen=True)
class Coefficients:
    """What became of each gradient of a parameter between two moments of training.

    W_end = a·W_begin + b·average_begin − Σ_s c_s Σ_backward factor·gradient.
    """

    updates: Updates
    walked: Walked

    @cached_property
    def _table(self) -> Floats:
        """(steps + 1, backward passes + 1): coefficient × factor; the last row and column are zero."""
        here = self.updates
        table = np.zeros((here.end - here.begin + 1, here.factors.shape[1] + 1))
        table[here.steps - here.begin, :-1] = self.walked.c[:, None] * here.factors
        return table

    def between(self, begin: int, end: int) -> Coefficients:
        """Those of the gradients of a shorter stretch, still up to the same moment."""
        own = self.updates
        here = slice(*np.searchsorted(own.steps, [begin, end]).tolist())
        return Coefficients(own.between(begin, end), replace(self.walked, c=self.walked.c[here]))

    def of_blocks(self, chunk: SlotChunk) -> Floats:
        """(blocks,): coefficient × factor of each block's slots; 0 for blocks outside the stretch."""
        here = self.updates
        step = np.clip(chunk.blocks[:, 0] - here.begin, -1, here.end - here.begin)
        backward = np.minimum(chunk.blocks[:, 1], here.factors.shape[1])
        found: Floats = self._table[step, backward]
        return found


def is_elementwise(updates: Updates) -> bool:
    """Whether the coefficients of a parameter are matrices."""
    return KINDS[updates.kind].elementwise


def walked(updates: Updates) -> Coefficients:
    """Return the coefficients of some updates. Parameters of one optimizer share a walk, question after question."""
    return Coefficients(updates, _walk(updates))


def content_of(updates: Updates) -> bytes:
    """Return a checksum of the settings of all updates: numbers that are coefficients depend on nothing else."""
    content = hashlib.blake2b(f"{updates.kind} {len(updates.steps)}".encode())
    for name, values in sorted(updates.settings.items()):
        content.update(name.encode() + values.tobytes())
    return content.digest()


@cached(LRUCache(WALKS), key=content_of, lock=Lock())
def _walk(updates: Updates) -> Walked:
    if not len(updates.steps):
        return Walked(1.0, 0.0, np.zeros(0))
    return updates.walked()
