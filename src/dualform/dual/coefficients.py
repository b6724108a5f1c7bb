"""The coefficients of one parameter over a stretch of training, where they are numbers (the SGD family)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

import numpy as np
from cachetools import LRUCache, cached

from dualform.dual.gradients import Updates, updates_of
from dualform.recursions import KINDS, Floats, Walked, walk_back
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk

WALKS = 64
"""How many walks are kept."""


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


def coefficients(store: Store, parameter: str, *, begin: int = 0, end: int | None = None) -> Coefficients:
    """The coefficients of a parameter from `begin` to `end` (in steps; default: all that is sealed)."""
    return walked(updates_of(store, parameter, begin=begin, end=end))


def walked(updates: Updates) -> Coefficients:
    """Return the coefficients of some updates. Parameters of one optimizer share a walk, question after question."""
    return Coefficients(updates, _walk(updates))


def _content(updates: Updates) -> bytes:
    """Return a checksum of all that a walk depends on."""
    content = hashlib.blake2b(f"{updates.kind} {len(updates.steps)}".encode())
    for name, values in sorted(updates.settings.items()):
        content.update(name.encode() + values.tobytes())
    return content.digest()


@cached(LRUCache(WALKS), key=_content, lock=Lock())
def _walk(updates: Updates) -> Walked:
    count = len(updates.steps)
    if not count:
        return Walked(1.0, 0.0, np.zeros(0))
    return walk_back(updates.kind, updates.settings, count)
