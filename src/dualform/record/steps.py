"""Turns backward passes into the updates, slots and rows of a step.

Everything here happens in an optimizer's hooks, before or after its update. An exception may come at any moment (Ctrl-C), so an update is
first written down apart from everything else (`prepare`). Then its slots are taken out of the pending passes (`consume`), and it counts once the
optimizer has returned.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from torch import Tensor
from torch.optim import Optimizer

from dualform.arrays import Array
from dualform.errors import UnexplainedError
from dualform.projection import Projected, wide_enough
from dualform.record import audit
from dualform.record.columns import Batch
from dualform.record.edits import EditWatch, Gradients, OptimizerWatch
from dualform.record.parameters import PassShare, RecordedParameter
from dualform.record.passes import IGNORED_HOOKS, PendingPasses
from dualform.record.recorded import RecordedLayer, RecordedModule
from dualform.recursions import KINDS
from dualform.store import records
from dualform.store.format import NO_ROW, Mark

ON_UNEXPLAINED = ("raise", "mark")
"""What is done when slots do not explain a gradient: an error is raised, or the layer is marked as inexact."""
UNEXPLAINED = "has a gradient that its recorded slots do not explain"


@dataclass(slots=True)
class _Audited:
    parameter: RecordedParameter
    gradient: Tensor
    seen: Projected
    """The gradient, seen through R."""
    shares: list[PassShare]
    verdict: audit.Verdict
    settings: dict[str, float]
    factors: dict[int, float] = field(default_factory=dict)
    """By backward pass; those that take no part are not in it."""


@dataclass(eq=False, slots=True)
class OpenStep:
    """A step that may still get updates of other optimizers: what is recorded of it, and what the next update needs to know."""

    record: records.Step
    next_row: int
    """The number of the first row after it."""
    updated_by: frozenset[int] = frozenset()
    """The optimizers whose updates are in it."""
    rows_of: dict[int, int] = field(default_factory=dict)
    """By batch() call: the number of its first row."""
    backward_of: dict[int, int] = field(default_factory=dict)
    """By backward pass: its number in this step."""
    stored: dict[RecordedLayer, set[int]] = field(default_factory=dict)
    """By layer: the backward passes whose slots are in it. Weight and bias may have different optimizers."""

    def copy(self) -> OpenStep:
        """Another one, which can get an update without any change to this one; log() writes to both."""
        stored = {layer: set(tasks) for layer, tasks in self.stored.items()}
        return OpenStep(
            self.record.copy(), self.next_row, self.updated_by, dict(self.rows_of), dict(self.backward_of), stored
        )

    def row_of(self, batch: Batch) -> int:
        """The number of a batch's first row in this step."""
        if batch.serial not in self.rows_of:
            self.rows_of[batch.serial] = self.next_row
            self.record.rows.append(records.Rows(self.next_row, batch.rows, batch.values))
            self.next_row += batch.rows
        return self.rows_of[batch.serial]


@dataclass(eq=False, slots=True)
class Update:
    """An update that an optimizer is about to make."""

    optimizer: int
    step: OpenStep
    """The step with this update in it."""
    within: FrameType
    """The call of optimizer.step() that makes it."""
    last_task: int
    """The last backward pass before it."""
    others: list[tuple[Tensor, int]]
    """The optimizer's parameters that are not recorded, with PyTorch's counts of their changes."""
    modules: list[RecordedModule] = field(default_factory=list)
    layers: list[RecordedLayer] = field(default_factory=list)
    parameters: list[RecordedParameter] = field(default_factory=list)
    """What it takes out of the pending passes: modules that need a new batch() call, slots, and what backward passes added to gradients."""
    gradients: Gradients = field(default_factory=list)
    """The gradients that it was audited with, with PyTorch's counts of their changes."""
    edited: bool = False
    """Whether something else has changed weights or optimizer state before it (and on_unexplained="mark")."""
    has_returned: bool = False
    """Whether the optimizer has made it."""

    def has_moved_others(self) -> bool:
        """Whether parameters that are not recorded may have changed since it began."""
        return any(parameter._version != version for parameter, version in self.others)


class StepBuilder:
    """Turns the backward passes of one recording into steps."""

    def __init__(self, passes: PendingPasses, optimizers: Sequence[Optimizer], *, keep: str, on_unexplained: str):
        self.watch = EditWatch(optimizers, passes.parameters)
        self._passes = passes
        self.optimizers = optimizers
        self._keep = keep
        self._on_unexplained = on_unexplained
        self.first_row = 0
        """The number of the first row that is recorded: more than 0 in a resumed recording."""

    @property
    def recorded(self) -> Collection[int]:
        """The ids of all recorded parameters."""
        return self._passes.parameters.keys()

    def _settle_edits(self, update: Update) -> None:
        """Raise what changed between steps, or mark it and go on from what there is now."""
        for name, (parameter, how) in self.watch.edits().items():
            update.edited = True
            self._complain(update.step.record, parameter, f"{name!r} {how}. Its dual form no longer holds. End the recording before "
                           f"such a change and begin a new one after it")  # fmt: skip

    def remember_after(self, update: Update) -> None:
        """Remember what an update has made of the parameters, and write it down. Doing so again changes nothing."""
        after = update.step.record.after
        after.update(self.watch[update.optimizer].remember_after(update.gradients))
        if update.edited:
            after.update(self.watch.remember())

    def prepare(self, number: int, step: OpenStep, within: FrameType) -> Update:
        """An optimizer is about to update its parameters: write down what it will make of which slots.

        step: one that nobody else uses; it gets the update. within: the call of optimizer.step().
        """
        step.record.row_evidence |= self._passes.rows.news
        self.watch.refuse_shared()
        watch = self.watch[number]
        others = [(one, one._version) for one in watch.others]
        update = Update(number, step, within, self._passes.last_task, others)
        step.updated_by |= {number}
        self._settle_edits(update)
        update.gradients = watch.gradients()
        audited = self._audit(step.record, watch)
        # A loss scaler may leave the division to a fused optimizer
        scale = getattr(self.optimizers[number], "grad_scale", None)
        self._write(update, watch.kind, audited, 1 / float(scale or 1.0))
        return update

    def consume(self, update: Update) -> None:
        """Take the slots of an update out of the pending passes. Doing so again changes nothing."""
        for layer in update.layers:
            waiting = self._waiting_tasks(layer, update)
            layer.forget({task for task in layer.tasks() if task <= update.last_task and task not in waiting})
        for parameter in update.parameters:
            parameter.forget_until(update.last_task)
        self._passes.spent.update(update.modules)
        self._passes.updates += 1

    def _waiting_tasks(self, layer: RecordedLayer, update: Update) -> set[int]:
        """The backward passes that an update has not stored, and that other parameters of the layer may need.

        Weight and bias may have different optimizers. That of the bias stores no slots if its gradient is rounding alone.
        """
        others = [parameter for _, parameter in layer.uses if parameter not in update.parameters]
        counted = {share.task for parameter in others for share in parameter.shares if share.counted}
        return counted - update.step.stored.get(layer, set())

    def retire(self, step: OpenStep) -> None:
        """A step is over: its backward passes cannot be part of another one."""
        for layer, tasks in step.stored.items():
            layer.consumed.extend(tasks.difference(layer.consumed))
        self._passes.rows.forget_news(step.record.row_evidence)

    def _write(self, update: Update, kind: str, audited: list[_Audited], unscaled: float) -> None:
        """Write down an update by any gradients. unscaled: by what the optimizer will multiply them first."""
        elementwise = kind in KINDS and KINDS[kind].elementwise
        for one in audited:
            # A bias before a normalisation has no true gradient. The Adam family divides its rounding by its rounding, and would
            # so make anything of a slot's part of it: the gradient is kept, and belongs to the initial part as a whole
            is_rounding = not one.verdict.determined and any(share.scale for share in one.shares)
            if is_rounding and elementwise and self._keeps_gradient(one.parameter):
                continue
            for share, factor in zip(one.shares, one.verdict.factors, strict=True):
                if factor != 0:
                    one.factors[share.task] = factor * unscaled
        self._store_slots({one.parameter.number: one.factors for one in audited}, update)
        numbers, factors = update.step.backward_of, []
        for one in audited:
            listed = [0.0] * (1 + max([numbers[task] for task in one.factors], default=-1))
            for task, factor in one.factors.items():
                listed[numbers[task]] = factor
            factors.append(listed)
            update.parameters.append(one.parameter)
        update.step.record.updates.append(
            records.Update(
                kind,
                [one.parameter.number for one in audited],
                [one.settings for one in audited],
                factors,
                [one.verdict.residual for one in audited],
                [one.verdict.size * unscaled / math.sqrt(one.parameter.columns) for one in audited],
                [_copied(one.gradient, unscaled) if self._keeps_gradient(one.parameter) else None for one in audited],
            )
        )

    def _keeps_gradient(self, parameter: RecordedParameter) -> bool:
        return not parameter.is_matrix and self._keep != "keys"

    def _audit(self, step: records.Step, watch: OptimizerWatch) -> list[_Audited]:
        """Do the slots explain the gradients of an optimizer's parameters?"""
        audited = []
        for parameter, own in zip(watch.recorded, watch.settings(), strict=True):
            gradient = parameter.tensor.grad
            if gradient is None:
                continue
            seen = parameter.project(gradient)
            shares = [share for share in parameter.shares if share.counted]
            coarse = [share for share in shares if share.coarse_dtype is not None]
            if coarse:
                hidden = parameter.hidden_part(gradient, seen)
                own = {**own, "autocast": max(parameter.bound_coarse_error(share, hidden) for share in coarse)}
            if all(share.audited for share in shares):
                verdict = audit.explain(shares, seen, parameter.roundoff)
            else:
                verdict = audit.unaudited(shares)
            audited.append(_Audited(parameter, gradient, seen, shares, verdict, own))
        _share_factors(audited)
        for one in audited:
            if not one.verdict.explained:
                self._unexplained(step, one.parameter, one.verdict, one.shares)
        return audited

    def _store_slots(self, tasks: Mapping[int, Iterable[int]], update: Update) -> None:
        """Store the slots of those backward passes that take part in an update of some parameters; the others are forgotten."""
        for module in self._passes.modules:
            if not any(p.number in tasks for p in module.parameters):
                continue
            for layer in module.layers:
                mine = [tasks[p.number] for _, p in layer.uses if p.number in tasks]
                wanted: set[int] = set()
                wanted.update(*mine)
                for task in sorted(wanted - update.step.stored.get(layer, set())):
                    self._store(layer, task, update.step)
                if mine:
                    update.layers.append(layer)
            update.modules.append(module)

    def _store(self, layer: RecordedLayer, task: int, step: OpenStep) -> None:
        if task in layer.problems:
            raise layer.problems[task]
        if task in layer.consumed:
            raise UnexplainedError(
                f"layer {layer.layer.name!r}, step {step.record.number}: its parameters are updated in different steps with gradients "
                f"of one backward pass, whose slots belong to the earlier step. Step its optimizers together, or zero gradients."
            )
        backward = step.backward_of.setdefault(task, len(step.backward_of))
        calls = layer.calls.get(task, [])
        if len(calls) > 1:
            calls.sort(key=lambda call: call.serial)
        for number, call in enumerate(calls):
            call.backward, call.call = backward, number
            call.first_row = NO_ROW if call.is_shared else step.row_of(call.batch)
            step.record.blocks.append(call)
        step.stored.setdefault(layer, set()).add(task)

    def _unexplained(
        self, step: records.Step, parameter: RecordedParameter, verdict: audit.Verdict, shares: list[PassShare]
    ) -> None:
        tasks = {share.task for share in shares}
        for layer in self._layers_of(parameter):
            for task, problem in layer.problems.items():
                if task in tasks:
                    raise problem
        if not any(module.called for module in self._passes.modules if parameter in module.parameters):
            self._complain(
                step, parameter, f"{parameter.name!r} has a gradient, but its module was never called. {IGNORED_HOOKS}"
            )
            return
        self._complain(
            step,
            parameter,
            f"{parameter.name!r} {UNEXPLAINED} (residual {verdict.residual:.1e} of its size). Likely causes: gradients "
            f"clipped by value or with noise added, gradients not zeroed since an earlier step, the parameter used "
            f"outside its module (F.linear), or its input changed in place. Scaling, clipping by norm and accumulation "
            f"are understood",
        )

    def _layers_of(self, parameter: RecordedParameter) -> list[RecordedLayer]:
        return [layer for layer in self._passes.layers if any(p is parameter for _, p in layer.uses)]

    def _complain(self, step: records.Step, parameter: RecordedParameter, what: str) -> None:
        layers = [layer.layer.name for layer in self._layers_of(parameter)]
        if self._on_unexplained == "raise":
            raise UnexplainedError(
                f"layer {layers[0]!r}, step {step.number}: {what}. To let the training go on and mark the layer as inexact "
                f'from here, record with on_unexplained="mark".'
            )
        for layer in layers:
            step.marks.setdefault(layer, Mark(step.number, what))


def _share_factors(audited: list[_Audited]) -> None:
    """Let gradients that do not tell well by what they were scaled take the factor of those that do."""
    verdicts = [one.verdict for one in audited]
    audit.share_factors(verdicts)
    likely = audit.likely_factors(verdicts)
    for one in audited:
        if one.verdict.determined or not one.shares or not bool(one.gradient.detach().any()):
            continue
        # It is nothing but rounding, as that of a bias before a normalisation is
        one.verdict = audit.explain_by_others(one.shares, one.seen, one.parameter.roundoff, likely)
        is_kept = not one.parameter.is_matrix
        if not one.verdict.explained and is_kept and not any(other.determined for other in verdicts):
            one.verdict = audit.explain_rounding(one.shares, one.seen, one.parameter.roundoff)


def _copied(gradient: Tensor, times: float) -> Array:
    own: Array = gradient.detach().cpu().to(wide_enough(gradient.dtype), copy=True).numpy()
    return own if times == 1 else own * times
