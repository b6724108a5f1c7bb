"""Turns backward passes into the updates, slots and rows of a step.

Everything here happens in an optimizer's hooks, before or after its update. An exception may come at any moment (Ctrl-C), so an update is
first written down apart from everything else (`prepare`). Then its slots are taken out of the pending passes (`consume`), and it counts once the
optimizer has returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType

from torch import Tensor
from torch.optim import Optimizer

from dualform.arrays import Array
from dualform.errors import UnexplainedError
from dualform.record.columns import Batch
from dualform.record.edits import EditWatch, Gradients, OptimizerWatch
from dualform.record.exchange import Exchange
from dualform.record.gradients import ExplainedGradient, explain_gradients
from dualform.record.parameters import RecordedParameter
from dualform.record.passes import IGNORED_HOOKS, PendingPasses
from dualform.record.recorded import RecordedLayer, RecordedModule
from dualform.store import records
from dualform.store.format import NO_ROW, Mark

ON_UNEXPLAINED = ("raise", "mark")
"""What is done when slots do not explain a gradient: an error is raised, or the layer is marked as inexact."""
UNEXPLAINED = "has a gradient that its recorded slots do not explain"


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
        """A copy that can get an update without any change to this one. log() writes to both."""
        copied = OpenStep(self.record.copy(), self.next_row, self.updated_by)
        copied.rows_of.update(self.rows_of)
        copied.backward_of.update(self.backward_of)
        for layer, tasks in self.stored.items():
            copied.stored[layer] = set(tasks)
        return copied

    def add_slots(self, layer: RecordedLayer, task: int) -> None:
        """Add the slots of a layer in one backward pass."""
        if task in layer.problems:
            raise layer.problems[task]
        if task in layer.consumed:
            raise UnexplainedError(
                f"layer {layer.layer.name!r}, step {self.record.number}: its parameters are updated in different steps with gradients "
                f"of one backward pass, whose slots belong to the earlier step. Step its optimizers together, or zero gradients."
            )
        backward = self.backward_of.setdefault(task, len(self.backward_of))
        calls = layer.calls.get(task, [])
        calls.sort(key=lambda call: call.serial)
        for number, call in enumerate(calls):
            call.backward = backward
            call.call = number
            call.first_row = NO_ROW if call.is_shared else self._first_row(call.batch)
            self.record.blocks.append(call)
        self.stored.setdefault(layer, set()).add(task)

    def by_number(self, factors: Mapping[int, float]) -> list[float]:
        """The factors of backward passes by their numbers in this step; 0 for passes that take no part."""
        numbered = {self.backward_of[task]: factor for task, factor in factors.items()}
        if not numbered:
            return []
        count = 1 + max(numbered)
        return [numbered.get(number, 0.0) for number in range(count)]

    def _first_row(self, batch: Batch) -> int:
        """The number of a batch's first row in this step."""
        if batch.serial in self.rows_of:
            return self.rows_of[batch.serial]
        first = self.next_row
        self.rows_of[batch.serial] = first
        self.record.rows.append(records.Rows(first, batch.rows, batch.values))
        self.next_row += batch.rows
        return first


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

    def __init__(
        self,
        passes: PendingPasses,
        optimizers: Sequence[Optimizer],
        *,
        on_unexplained: str,
        exchange: Exchange | None = None,
    ):
        """exchange: with the other ranks that train copies of the model, if there are any."""
        self.watch = EditWatch(optimizers, passes.parameters)
        self.optimizers = optimizers
        self.exchange = exchange
        self._passes = passes
        self._on_unexplained = on_unexplained
        self.first_row = 0
        """The number of the first row that is recorded: more than 0 in a resumed recording."""
        self._kept_vectors: dict[RecordedParameter, bool] = {}
        """Of biases and elementwise weights: whether their gradients are stored, beside the slots."""

    @property
    def recorded(self) -> Collection[int]:
        """The ids of all recorded parameters."""
        return self._passes.parameters.keys()

    def prepare(self, number: int, step: OpenStep, within: FrameType) -> Update:
        """Write down the update that an optimizer is about to make, with the slots that explain it.

        step: gets the update; nobody else may use it. within: the call of optimizer.step().
        """
        step.record.row_evidence |= self._passes.rows.news
        step.updated_by |= {number}
        self.watch.refuse_shared()
        watch = self.watch[number]
        others = [(parameter, parameter._version) for parameter in watch.others]
        update = Update(number, step, within, self._passes.last_task, others)
        self._settle_edits(update)
        update.gradients = watch.gradients()
        gradients = explain_gradients(watch, self.exchange)
        for gradient in gradients:
            if not gradient.verdict.explained:
                self._report_unexplained(step.record, gradient)
        self._write(update, watch, gradients)
        return update

    def attempt(self, number: int) -> AbstractContextManager[None]:
        """Around everything that prepares an update of an optimizer: what fails is told to the other ranks, if there are any."""
        return contextlib.nullcontext() if self.exchange is None else self.exchange.attempt(self.watch[number])

    def consume(self, update: Update) -> None:
        """Take the slots of an update out of the pending passes. Calling it again changes nothing."""
        for layer in update.layers:
            past = {task for task in layer.tasks() if task <= update.last_task}
            layer.forget(past - self._waiting_tasks(layer, update))
        for parameter in update.parameters:
            parameter.forget_until(update.last_task)
        self._passes.spent.update(update.modules)
        self._passes.updates += 1

    def remember_after(self, update: Update) -> None:
        """Remember what an update has made of the parameters, and write it down. Calling it again changes nothing."""
        after = update.step.record.after
        after.update(self.watch[update.optimizer].remember_after(update.gradients))
        if update.edited:
            after.update(self.watch.remember())

    def retire(self, step: OpenStep) -> None:
        """The step is over: its backward passes cannot be part of another one."""
        for layer, tasks in step.stored.items():
            layer.consumed.extend(tasks.difference(layer.consumed))
        self._passes.rows.forget_news(step.record.row_evidence)

    def _waiting_tasks(self, layer: RecordedLayer, update: Update) -> set[int]:
        """The backward passes that an update has not stored, and that other parameters of the layer may need.

        Weight and bias may have different optimizers. That of the bias stores no slots if its gradient is rounding alone.
        """
        counted: set[int] = set()
        for _, parameter in layer.uses:
            if parameter not in update.parameters:
                counted.update(share.task for share in parameter.shares if share.counted)
        return counted - update.step.stored.get(layer, set())

    # Writing an update

    def _write(self, update: Update, watch: OptimizerWatch, gradients: Sequence[ExplainedGradient]) -> None:
        """Write down an update by these gradients, and store the slots that explain them."""
        step = update.step
        factors = {}
        for gradient in gradients:
            factors[gradient.parameter] = self._factors(gradient, watch)
        self._store_slots(factors, update)
        update.parameters = list(factors)
        written = records.Update(
            optimizer=watch.kind,
            parameters=[parameter.number for parameter in factors],
            settings=[gradient.settings for gradient in gradients],
            factors=[step.by_number(by_task) for by_task in factors.values()],
            residuals=[gradient.verdict.residual for gradient in gradients],
            sizes=[gradient.size for gradient in gradients],
            gradients=[self._kept(gradient) for gradient in gradients],
        )
        step.record.updates.append(written)

    def _factors(self, gradient: ExplainedGradient, watch: OptimizerWatch) -> dict[int, float]:
        """By backward pass: what its slots are multiplied by to make up a gradient."""
        # A bias before a normalisation has no true gradient. The Adam family divides its rounding by its rounding, and would so
        # make anything of a slot's part of it: the gradient is kept, and belongs to the initial part as a whole
        is_without_slots = gradient.is_rounding and watch.is_elementwise
        if is_without_slots and self._is_kept(gradient.parameter):
            return {}
        return gradient.factors()

    def _kept(self, gradient: ExplainedGradient) -> Array | None:
        return gradient.copy() if self._is_kept(gradient.parameter) else None

    def _is_kept(self, parameter: RecordedParameter) -> bool:
        """Whether the gradients of a parameter are stored, beside the slots."""
        if parameter.is_matrix:
            return False
        known = self._kept_vectors.get(parameter)
        if known is None:
            # Sums of them are of use only where the slots explain them
            known = any(layer.stored.explains_gradients for layer in self._layers_of(parameter))
            self._kept_vectors[parameter] = known
        return known

    def _store_slots(self, factors: Mapping[RecordedParameter, Mapping[int, float]], update: Update) -> None:
        """Store the slots of the backward passes that take part in an update. factors: of each parameter, by backward pass."""
        for module in self._passes.modules:
            if factors.keys().isdisjoint(module.parameters):
                continue
            update.modules.append(module)
            for layer in module.layers:
                updated = [parameter for _, parameter in layer.uses if parameter in factors]
                if not updated:
                    continue
                update.layers.append(layer)
                tasks: set[int] = set()
                for parameter in updated:
                    tasks.update(factors[parameter])
                tasks -= update.step.stored.get(layer, set())
                for task in sorted(tasks):
                    update.step.add_slots(layer, task)

    # What slots do not explain

    def _settle_edits(self, update: Update) -> None:
        """Raise an error if something else has changed parameters between steps, or mark their layers."""
        for name, (parameter, how) in self.watch.edits().items():
            update.edited = True
            message = f"{name!r} {how}. Its dual form no longer holds. End the recording before such a change and begin a new one after it"
            self._raise_or_mark(update.step.record, parameter, message)

    def _report_unexplained(self, step: records.Step, gradient: ExplainedGradient) -> None:
        parameter = gradient.parameter
        tasks = {share.task for share in gradient.shares}
        for layer in self._layers_of(parameter):
            for task, problem in layer.problems.items():
                if task in tasks:
                    raise problem
        modules = [module for module in self._passes.modules if parameter in module.parameters]
        if not any(module.called for module in modules):
            message = f"{parameter.name!r} has a gradient, but its module was never called. {IGNORED_HOOKS}"
        else:
            message = (
                f"{parameter.name!r} {UNEXPLAINED} (residual {gradient.verdict.residual:.1e} of its size). Likely causes: gradients "
                f"clipped by value or with noise added, gradients not zeroed since an earlier step, the parameter used "
                f"outside its module (F.linear), or its input changed in place. Scaling, clipping by norm and accumulation "
                f"are understood"
            )
        self._raise_or_mark(step, parameter, message)

    def _layers_of(self, parameter: RecordedParameter) -> list[RecordedLayer]:
        layers = []
        for layer in self._passes.layers:
            used = [other for _, other in layer.uses]
            if parameter in used:
                layers.append(layer)
        return layers

    def _raise_or_mark(self, step: records.Step, parameter: RecordedParameter, message: str) -> None:
        layers = [layer.layer.name for layer in self._layers_of(parameter)]
        if self._on_unexplained == "raise":
            raise UnexplainedError(
                f"layer {layers[0]!r}, step {step.number}: {message}. To continue training and mark the layer as inexact from "
                f'here on, record with on_unexplained="mark".'
            )
        for layer in layers:
            step.marks.setdefault(layer, Mark(step.number, message))
