"""The algebra of masks: a parameter with only some of its slots, from slots or from the deltas of groups.

A mask may read either the slots that are kept or those that are left out. Between two snapshots it reads whichever are fewer.

That works where coefficients are numbers: all slots of the steps b to e together wrote I(e) − I(b), where I(s) is what the weights and
the buffer of step s have become by the end. So a stretch that is kept or left out as a whole needs no slots at all, and a
parameter without a single sample is the trained one less what that sample wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Bools, Ints
from dualform.dual.coefficients import Updates, is_elementwise, updates_of, walked
from dualform.dual.gradients import Keep
from dualform.dual.threads import run_in_order
from dualform.dual.totals import GroupTotals
from dualform.dual.weights import add_slots, initial_part, rebuilt
from dualform.errors import QuestionError
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk


@dataclass(frozen=True)
class Plan:
    """Which slots of a parameter a mask reads, in each stretch between two snapshots."""

    store: Store
    updates: Updates
    keep: Keep

    @cached_property
    def edges(self) -> list[int]:
        """The steps at which stretches begin, and the step at which the last one ends."""
        inside = [step for step in self.store.snapshot_steps() if 0 < step < self.updates.end]
        return [0, *inside, self.updates.end]

    @cached_property
    def counts(self) -> tuple[Ints, Ints]:
        """(stretches,): how many slots are kept, and how many are left out."""
        kept = np.zeros(len(self.edges) - 1, np.int64)
        total = np.zeros(len(self.edges) - 1, np.int64)
        for layer in self.store.users(self.updates.parameter):
            for chunk in self.store.addresses(layer.name, end_step=self.updates.end):
                places = self._stretch(chunk)
                is_kept = self.keep(chunk).astype(np.int64)
                # One more slot, since a block without slots may begin at the end
                kept_here = np.add.reduceat(np.append(is_kept, 0), chunk.starts)
                np.add.at(kept, places, np.where(chunk.counts > 0, kept_here, 0))
                np.add.at(total, places, chunk.counts)
        return kept, total - kept

    @cached_property
    def reads_kept(self) -> Bools:
        """(stretches,): whether the slots that are kept are read; else those that are left out."""
        kept, left = self.counts
        return kept < left

    @property
    def slots(self) -> int:
        """How many slots are read."""
        return int(np.minimum(*self.counts).sum())

    def read_slots(self, *, kept: bool) -> Keep | None:
        """Return which slots are read of those kept, or of those left out; None: none are."""
        if not self.counts[0 if kept else 1][self.reads_kept == kept].any():
            return None

        def taken(chunk: SlotChunk) -> Bools:
            here = chunk.per_slot(self.reads_kept[self._stretch(chunk)] == kept)
            if here.any():
                here &= self.keep(chunk) == kept
            return here

        return taken

    def part_from(self, step: int, trained: Tensor) -> Tensor:
        """Return I(step), float64. trained: the parameter at the end."""
        end = self.updates.end
        if step == end:
            return trained.double()
        return initial_part(self.store, self.updates.parameter, walked(self.updates.between(step, end)))

    def rebuilt_stretches(self) -> Iterator[tuple[int, int]]:
        """Return the stretches (begin, end) in which the slots that are kept are read, joined where one follows another."""
        reads_kept = np.concatenate([[False], self.reads_kept, [False]])
        changes = np.flatnonzero(reads_kept[1:] != reads_kept[:-1])
        for first, last in changes.reshape(-1, 2).tolist():
            yield self.edges[first], self.edges[last]

    def _stretch(self, chunk: SlotChunk) -> Ints:
        """(blocks,): the stretch of each block."""
        return np.searchsorted(self.edges, chunk.blocks[:, 0], side="right") - 1


def is_marked(store: Store, parameter: str, end: int) -> bool:
    """Whether a part of a parameter's movement is in no slot."""
    marks = [store.manifest.inexact.get(layer.name) for layer in store.users(parameter)]
    return any(mark is not None and mark.step < end for mark in marks)


def is_replayed(store: Store, parameter: str) -> bool:
    """Whether a mask replays all of training, since coefficients are matrices. It then needs no trained parameter."""
    return is_elementwise(updates_of(store, parameter))


def plan(store: Store, parameter: str, *, end: int, keep: Keep) -> Plan | None:
    """Return what a mask reads; None if it replays all of training, because coefficients are matrices or slots do not explain everything."""
    if is_marked(store, parameter, end):
        return None
    updates = updates_of(store, parameter, end=end)
    return None if is_elementwise(updates) else Plan(store, updates, keep)


def masked(
    store: Store,
    parameter: str,
    trained: Tensor,
    *,
    end: int,
    keep: Keep,
) -> Tensor:
    """Return the initial part plus what the selected slots wrote, float64. trained: the parameter at `end`."""
    mask_plan = plan(store, parameter, end=end, keep=keep)
    if mask_plan is None:
        return rebuilt(store, parameter, begin=0, end=end, keep=keep)
    total = trained.to(torch.float64, copy=True)
    coefficients = walked(mask_plan.updates)
    for begin, stop in mask_plan.rebuilt_stretches():
        total += mask_plan.part_from(begin, trained) - mask_plan.part_from(stop, trained)
    kept = mask_plan.read_slots(kept=True)
    left = mask_plan.read_slots(kept=False)
    if kept is not None:
        add_slots(store, parameter, coefficients, total, None, kept)
    if left is not None:
        gone = torch.zeros_like(total)
        add_slots(store, parameter, coefficients, gone, None, left)
        total -= gone
    return total


def masked_by_groups(
    view: GroupTotals, parameter: str, kept: Bools | None = None, trained: Tensor | None = None
) -> Tensor:
    """Return the initial part plus what the selected groups wrote, float64. kept: (groups,); None: all groups.

    trained: the trained parameter. If given, and fewer groups are left out than kept, their parts are subtracted from it.
    """
    deltas = view.deltas(parameter)
    if kept is None:
        kept = np.ones(len(deltas), np.bool_)
    # One group at a time, since many groups take many times the memory of the parameter
    if trained is not None and 2 * kept.sum() > len(kept):
        total = trained.to(torch.float64, copy=True)
        for group in np.flatnonzero(~kept).tolist():
            total -= deltas[group]
        return total
    total = view.initial(parameter)
    for group in np.flatnonzero(kept).tolist():
        total += deltas[group]
    return total


def rebuild_each(
    store: Store,
    parameters: Iterable[str],
    *,
    end: int,
    keep: Keep | None = None,
    trained: Mapping[str, Tensor] | None = None,
    workers: int = 1,
) -> Iterator[Tensor]:
    """Rebuild each parameter from the beginning of training, in the order given.

    With a mask, a parameter that is also in `trained` is edited instead: see `masked`.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise QuestionError(f"workers={workers!r}: expected a whole number from 1 on.")
    trained = trained or {}

    def rebuild(name: str) -> Tensor:
        if keep is not None and name in trained:
            return masked(store, name, trained[name], end=end, keep=keep)
        return rebuilt(store, name, begin=0, end=end, keep=keep)

    tasks = [partial(rebuild, name) for name in parameters]
    if workers == 1:
        for task in tasks:
            yield task()
        return
    with closing(run_in_order(tasks, workers)) as results:
        yield from results
