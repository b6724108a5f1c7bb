"""From an optimizer's hooks to finished steps: an update is written down before it is made, and counts once it has been.

An exception may come between any two lines (Ctrl-C), and the store must then end with the last finished step:

- A step is finished by a single assignment (`_progress`), after the optimizer has returned. An update before that is kept apart
  (`_update`); the next call finishes or drops it (`recover`).
- What happens to a finished step afterwards (totals, curvature, the writer) can be done again without being counted twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dualform.errors import RecordingError
from dualform.record.finished import FinishedSteps
from dualform.record.interrupts import INTERRUPTS, is_running
from dualform.record.passes import PendingPasses
from dualform.record.steps import OpenStep, StepBuilder, Update
from dualform.store import records


@dataclass(frozen=True)
class _Progress:
    """What is recorded for sure. Replaced as a whole, so that an exception finds the one before or the one after."""

    finished: int
    """How many steps are finished."""
    next_row: int
    open: OpenStep | None = None
    """The last of them, until it is handed over: log() may add to it, and other optimizers may."""
    early_log: dict[str, float] = field(default_factory=dict)
    """What log() was given for the next one."""


class StepProgress:
    """The steps of a recording: those that are finished, and the update that is under way."""

    def __init__(self, passes: PendingPasses, steps: StepBuilder, finished: FinishedSteps, first_step: int):
        self._passes = passes
        self._steps = steps
        self._finished = finished
        self._progress = _Progress(first_step, steps.first_row)
        self._update: Update | None = None
        """The update that an optimizer is making."""
        self._unfinished: Update | None = None
        """The last update that an optimizer has begun and not finished, if no other was finished since."""
        self._handles: list[RemovableHandle] = []
        self._is_attached = False

    @property
    def finished(self) -> int:
        """How many steps are finished."""
        return self._progress.finished

    # The optimizers' hooks

    def attach(
        self, optimizers: Sequence[Optimizer], is_recording: Callable[[], bool], guarded: Callable[..., bool]
    ) -> None:
        """Listen to optimizers. is_recording: whether recording goes on; guarded(work, …): does what may fail in the writer."""
        self._is_attached = True
        for number, optimizer in enumerate(optimizers):
            self._handles.append(optimizer.register_step_pre_hook(self._before_step(number, is_recording, guarded)))
            self._handles.append(optimizer.register_step_post_hook(self._after_step(number)))

    def detach(self) -> None:
        """Listen no more, also if optimizer.step() is running."""
        self._is_attached = False
        for handle in self._handles:
            handle.remove()

    def _before_step(
        self, number: int, is_recording: Callable[[], bool], guarded: Callable[..., bool]
    ) -> Callable[..., Any]:
        def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not is_recording():
                return None
            self.recover()
            if float(getattr(optimizer, "found_inf", None) or 0.0):  # a scaler's fused optimizer will skip this step
                return None
            within = sys._getframe(1)  # optimizer.step()
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
            if closure is None:
                guarded(self._attempt_update, number, within)
                return None

            def recorded() -> Any:
                self._finish_update()  # some optimizers call the closure again after they have changed the weights
                loss = closure()
                if self._is_attached:
                    guarded(self._attempt_update, number, within)
                return loss

            if "closure" in kwargs:
                return args, {**kwargs, "closure": recorded}
            return (args[0], recorded, *args[2:]), kwargs

        return hook

    def _after_step(self, number: int) -> Callable[..., None]:
        def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            update = self._update
            if update is not None:
                update.has_returned = True
            if not self._is_attached:
                return
            if update is None:
                self._steps.watch[number].remember()  # the step was skipped
            else:
                self._finish_update()

        return hook

    # An update

    def _attempt_update(self, number: int, within: FrameType) -> None:
        with self._steps.attempt(number):
            self._begin_update(number, within)

    def _begin_update(self, number: int, within: FrameType) -> None:
        """An optimizer is about to update its parameters: write it down as part of a step. within: the call of optimizer.step().

        A step holds one update of each optimizer; it stays open, for log(), until an optimizer steps again.
        """
        if self._update is not None:
            raise RecordingError(
                "optimizer.step() was called within optimizer.step() of another recorded optimizer. Record one of them only."
            )
        self._passes.settle_early()
        last = self._progress.open
        if last is not None and number in last.updated_by:
            self.hand_over()
            if self._finished.is_snapshot_due and not self.has_moved():
                self.put_snapshot()
            last = None
        step = OpenStep(records.Step(self.finished), self._progress.next_row) if last is None else last.copy()
        update = self._steps.prepare(number, step, within)
        self._update = update  # from here on, the weights may change
        INTERRUPTS.hold((self, "update"), within)
        self._steps.consume(update)
        self._passes.pending = False

    def _finish_update(self) -> None:
        """The optimizer has changed the weights: look at them. Then the update counts, and with it the step."""
        update = self._update
        if update is None:
            return
        step = update.step
        before = self._progress
        if before.open is not step:  # else an exception came right after it was counted
            self._steps.remember_after(update)
            early_log = before.early_log
            if step.record.number == before.finished:
                step.record.log.update(early_log)
                early_log = {}
            self._progress = _Progress(step.record.number + 1, step.next_row, step, early_log)
        self._unfinished = self._update = None
        INTERRUPTS.release((self, "update"))

    def recover(self) -> None:
        """If an exception has ended optimizer.step(): finish its update if the weights were changed, else forget it."""
        update = self._update
        if update is None:
            return
        if update.has_returned:
            self._finish_update()
        elif not is_running(update.within, sys._getframe()):
            self.forget_update()

    def forget_update(self) -> None:
        """If an optimizer has begun an update, and has not made it, or only a part of it: it is in no step."""
        update = self._update
        if update is None:
            return
        self._steps.consume(update)
        self._unfinished = update
        self._update = None
        INTERRUPTS.release((self, "update"))

    # Finished steps

    def log(self, numbers: Mapping[str, float]) -> None:
        """Keep numbers beside the last step, or beside the coming one if its backward pass has begun."""
        last = self._progress.open
        if last is None or self._passes.pending:
            self._progress.early_log.update(numbers)
        else:
            last.record.log.update(numbers)

    def hand_over(self) -> None:
        """Have the last finished step stored."""
        last = self._progress.open
        if last is None:
            return
        self._finished.put(last.record)
        self._steps.retire(last)
        self._progress = replace(self._progress, open=None)

    def put_snapshot(self) -> None:
        """Store the weights, which must be those of the last step."""
        self._finished.put_snapshot(self.finished, self._progress.next_row)

    def put_totals(self) -> None:
        """Store the totals without weights."""
        self._finished.put_totals(None, self.finished, self._progress.next_row)

    @property
    def is_interrupted(self) -> bool:
        """Whether the last optimizer.step() did not return."""
        return self._unfinished is not None

    def has_moved_others(self) -> bool:
        """Whether an interrupted optimizer.step() has changed parameters that are not recorded."""
        return self._unfinished is not None and self._unfinished.has_moved_others()

    def has_moved(self) -> bool:
        """Whether the weights are no longer those that the last finished step left."""
        return self.has_moved_others() or bool(self._steps.watch.edits())
