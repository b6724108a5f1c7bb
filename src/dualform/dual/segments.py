"""Segments: training from one snapshot to the next, each replayed on its own and then strung together.

An update is linear in W and m, and so are all updates of a segment together. Its replay begins with the weights of its snapshot;
what the dual, which comes from the beginning of training, differs from these by goes through the segment's transfer:

    (W, m) → replayed (W, m) + transfer·(W − W of the snapshot, m − m of the snapshot)

So the dual is the same as in one walk from the beginning. Only the shared tensors come from the snapshots, and only if each
segment's replay ends with those from which the next one begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.dual.gradients import Keep, Updates, compute_dtype, kept_rows
from dualform.dual.replay import Moment, forward, moment
from dualform.recursions import KINDS, Factor, Linear
from dualform.store.reader import Store

FITTING = {"float64": 1e-11, "float32": 1e-5, "float16": 1e-3}
"""By type: how far, relatively, the end of a segment may be from the snapshot that the next one begins with."""


@dataclass
class Transfer:
    """Updates without their gradients: W ← a·W + b·m; m ← c·W + d·m. Matrices only where some update has made them so."""

    a: Factor = 1.0
    b: Factor = 0.0
    c: Factor = 0.0
    d: Factor = 1.0

    def on(self, linear: Linear) -> None:
        """Add one update."""
        self.a, self.c = linear.carry(self.a, self.c)
        self.b, self.d = linear.carry(self.b, self.d)

    def __call__(self, weight: Tensor, average: Tensor) -> tuple[Tensor, Tensor]:
        """What becomes of a weight and its average."""
        return weight * self.a + average * self.b, weight * self.c + average * self.d


@dataclass(frozen=True)
class Segment:
    """The updates from one snapshot to the next, replayed."""

    updates: Updates
    weight: Tensor
    average: Tensor
    transfer: Transfer
    fits: bool
    """Whether the next segment may begin with its own snapshot."""

    def after(self, store: Store, weight: Tensor, average: Tensor) -> tuple[Tensor, Tensor]:
        """The dual at the end of the segment, from the dual at its beginning."""
        begin = _snapshot(store, self.updates, self.updates.begin)
        moved = self.transfer(weight - begin.weight, average - begin.average)
        return self.weight + moved[0], self.average + moved[1]


def cut(store: Store, updates: Updates) -> list[Updates]:
    """Updates, segment by segment."""
    inside = [step for step in store.snapshot_steps() if updates.begin < step < updates.end]
    ends = [*inside, updates.end]
    return [updates.between(begin, end) for begin, end in zip([updates.begin, *inside], ends, strict=True)]


def replay(store: Store, updates: Updates, keep: Keep | None, *, first: bool, last: bool) -> Segment:
    """Replay one segment. first: no transfer is needed, since the dual begins there; last: nothing follows that it has to fit."""
    transfer = Transfer()
    now, masked = forward(store, updates, keep, None if first else transfer.on)
    described = store.manifest.parameters[store.parameter(updates.parameter)]
    allowed = max(FITTING[described.dtype], FITTING[store.manifest.dtype])
    fits = last or _fits(now, _snapshot(store, updates, updates.end), allowed)
    return Segment(updates, masked.weight, masked.average, transfer, fits)


def _snapshot(store: Store, updates: Updates, step: int) -> Moment:
    rows, dtype = kept_rows(store, updates.parameter), compute_dtype(store, updates.parameter)
    return moment(store, updates.parameter, step, KINDS[updates.kind], rows, dtype)


def _fits(now: Moment, then: Moment, allowed: float) -> bool:
    """Whether what the shared tensors of later steps depend on is the same, as far as the certificate can tell."""
    pairs = [(now.weight, then.weight), *((now.shared[name], then.shared[name]) for name in now.shared)]
    return all(_norm(one - other) <= allowed * _norm(other) for one, other in pairs)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
