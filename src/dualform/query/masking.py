"""Masks: the weights that a network would have with only some of its slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dualform.arrays import Bools
from dualform.dual.gradients import Keep
from dualform.dual.masked import is_marked, is_replayed, masked_by_groups, plan, rebuild_each
from dualform.dual.totals import GroupTotals, find_totals
from dualform.errors import NotRecordedError, QuestionError
from dualform.progress import Progress, report
from dualform.query.conditions import Condition, Where, condition_columns, matching_groups, rows_before
from dualform.query.network import Network, check_all_outputs
from dualform.store.reader import Store

READS = ("fewest", "kept")


@dataclass(frozen=True)
class Mask:
    """Which slots of a recording, up to step `end`, take part."""

    store: Store
    end: int
    condition: Where
    drops: bool
    """Whether slots that match are left out; else they are the only ones that take part."""

    @property
    def _argument(self) -> str:
        return "drop" if self.drops else "only"

    def groups(self) -> tuple[GroupTotals, Bools] | None:
        """Return stored deltas of groups that answer it, and which groups take part; None: slots are needed."""
        columns = condition_columns(self.condition, self.store, self._argument)
        view = find_totals(self.store, columns, self.end, deltas=True, subset=True)
        if view is None:
            return None
        rows = None
        if self.store.manifest.keep != "totals":
            rows = rows_before(self.store, self.end)
        matches = matching_groups(self.condition, view.groups, rows, self._argument)
        if matches is None:
            return None
        return view, ~matches if self.drops else matches

    def slots(self) -> Keep:
        """Return what tells which slots of a chunk take part."""
        if self.store.manifest.keep == "totals":
            raise NotRecordedError(
                f"{self.store.location} keeps totals only; this mask needs group deltas for its columns, or slots. Record with "
                f'totals= for them, or with keep="slots".'
            )
        condition = Condition(self.store, self.condition, self.end, name=self._argument)
        return (lambda chunk: ~condition(chunk)) if self.drops else condition


def make_mask(store: Store, end: int, only: Where | None, drop: Where | None, question: str) -> Mask:
    """Return the mask of one of two conditions."""
    if only is not None and drop is None:
        return Mask(store, end, only, drops=False)
    if drop is not None and only is None:
        return Mask(store, end, drop, drops=True)
    raise QuestionError(f'{question}() needs one of only= and drop=, e.g. drop=pl.col("task") == "fashion".')


def masked_weights(
    network: Network, mask: Mask, parameters: Sequence[str], read: str, workers: int, progress: Progress | None
) -> Mapping[str, Tensor]:
    """Return the weights of the whole network, of which some parameters have only the slots that take part."""
    if read not in READS:
        raise QuestionError(f'read={read!r}: expected "fewest" or "kept".')
    by_groups = mask.groups()
    if by_groups is not None:
        return _from_groups(network, mask, *by_groups, parameters, read)
    return _from_slots(network, mask, parameters, read, workers, progress)


def _from_groups(
    network: Network, mask: Mask, view: GroupTotals, kept: Bools, parameters: Sequence[str], read: str
) -> dict[str, Tensor]:
    weights = network.weights_at(mask.end)
    masked = {}
    for name in parameters:
        is_editable = read == "fewest" and not is_marked(mask.store, name, mask.end)
        masked[name] = masked_by_groups(view, name, kept, weights[name] if is_editable else None)
    return weights | masked


def _from_slots(
    network: Network, mask: Mask, parameters: Sequence[str], read: str, workers: int, progress: Progress | None
) -> dict[str, Tensor]:
    slots = mask.slots()
    # These are put together from the beginning of training; the others are edited as they were trained
    rebuilt = [name for name in parameters if read == "kept" or is_replayed(mask.store, name)]
    weights = network.weights_at(mask.end, without=rebuilt)
    for name in parameters:
        check_all_outputs(mask.store, name, "masked()")
    trained = {name: weights[name] for name in parameters if name not in rebuilt}
    values = rebuild_each(mask.store, parameters, end=mask.end, keep=slots, trained=trained, workers=workers)
    for name, value in zip(report("masking", parameters, progress), values, strict=True):
        weights[name] = value
    return weights


def mask_reads(mask: Mask, parameters: Sequence[str]) -> dict[str, int]:
    """Return how many slots a mask reads for each parameter."""
    if mask.groups() is not None:
        return dict.fromkeys(parameters, 0)
    slots = mask.slots()
    reads = {}
    for name in parameters:
        mask_plan = plan(mask.store, name, end=mask.end, keep=slots)
        if mask_plan is None:
            reads[name] = sum(mask.store.slots(layer.name) for layer in mask.store.users(name))
        else:
            reads[name] = mask_plan.slots
    return reads
