"""The coefficients of one parameter over a stretch of training, where they are numbers (the SGD family)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

import numpy as np

from dualform.dual.gradients import Updates, updates_of
from dualform.recursions import KINDS, Floats, Walked, walk_back
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk

REMEMBERED = 64
"""So many walks."""
_WALKS: dict[tuple[int, bytes], Walked] = {}
_LOCK = Lock()


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
    """The coefficients of some updates. Walks are remembered: parameters of one optimizer have the same, question after question."""
    count = len(updates.steps)
    content = hashlib.blake2b(updates.kind.encode())
    for name, values in sorted(updates.settings.items()):
        content.update(name.encode() + values.tobytes())
    known = (count, content.digest())
    found = _WALKS.get(known)
    if found is None:
        found = walk_back(updates.kind, updates.settings, count) if count else Walked(1.0, 0.0, np.zeros(0))
        with _LOCK:
            _WALKS[known] = found
            while len(_WALKS) > REMEMBERED:
                del _WALKS[next(iter(_WALKS))]
    return Coefficients(updates, found)
