"""One recording: what happens behind the methods of a recorder, and how a recording ends.

Whoever closes a recording does again what an exception has interrupted: see `progress.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import DualformError, RecordingError, WriterError
from dualform.record.choose import ChosenModule
from dualform.record.columns import read_batch
from dualform.record.finished import FinishedSteps
from dualform.record.hooks import COMPILER, Capture
from dualform.record.interrupts import INTERRUPTS
from dualform.record.late_layers import LateLayers
from dualform.record.passes import PendingPasses
from dualform.record.progress import StepProgress
from dualform.record.row_gradients import columns_of_rows
from dualform.record.steps import StepBuilder
from dualform.store.writer import Writer

DROPPED = "its recorder was dropped without being closed"
ON_WRITE_ERROR = ("raise", "stop")
"""What is done when the writer fails: the error is raised, or the training goes on without a recorder."""
UNFINISHED = "the weights are not stored: the last optimizer.step() did not return"


class Recording:
    """Records the training of a model until it is closed."""

    def __init__(
        self,
        model: nn.Module,
        outer: nn.Module,
        writer: Writer,
        passes: PendingPasses,
        steps: StepBuilder,
        finished: FinishedSteps,
        waiting: Sequence[ChosenModule],
        on_write_error: str,
    ):
        """outer: what the training loop calls: the model, or what torch.compile(model) gave. waiting: modules that are recorded once their parameters are in an optimizer."""
        self.path = Path(writer.location)
        self._process = os.getpid()
        self._writer = writer
        self._passes = passes
        self._steps = steps
        self._finished = finished
        self._on_write_error = on_write_error
        self._batches = 0
        self._is_detached = False
        self.is_closed = False
        self._late = LateLayers(waiting, steps.optimizers, passes, writer)
        steps.watch.remember()
        self._progress = StepProgress(passes, steps, finished, writer.manifest.end_step)
        self._capture = Capture(model, outer, passes, before_forward=self._adopt if self._late else None)
        try:
            self._attach()
        except BaseException:
            self._detach()
            raise

    def _attach(self) -> None:
        for module in self._passes.modules:
            self._capture.add(module)
        if COMPILER in sys.modules:
            # What was compiled before, for this model or another one of its class, would ignore the new hooks
            torch.compiler.reset()
        self._progress.attach(self._steps.optimizers, self._is_recording, self._guarded)

    @property
    def finished(self) -> int:
        """How many steps are finished."""
        return self._progress.finished

    # What the user calls

    def batch(self, columns: Mapping[str, Any]) -> None:
        """Name the rows of the next forward pass."""
        if not self._is_recording():
            return
        if self._steps.exchange is not None:
            self._steps.exchange.ranks.refuse_unsupported()
        self._progress.recover()
        finished = self._finished
        if self._passes.store_as.sums_rows:
            columns = columns_of_rows(columns)
        batch = read_batch(self._batches, dict(columns), finished.columns)
        batch.step = self.finished
        self._batches += 1
        if finished.columns is None:
            if finished.totals is not None:
                finished.totals.check(batch.columns)
            finished.columns = batch.columns
        self._passes.rows.step = self.finished
        self._passes.begin(batch)

    def log(self, scalars: Mapping[str, float]) -> None:
        """Keep numbers beside the last step, or beside the coming one if its backward pass has begun."""
        if not self._is_recording():
            return
        self._progress.recover()
        numbers = {n: v.item() if isinstance(v, Tensor) else float(v) for n, v in scalars.items()}
        self._progress.log(numbers)

    def seal(self) -> int:
        """Seal everything so far with a snapshot and wait for the disk; gives the number of steps."""
        if self._is_recording():
            self._guarded(self._seal_now)
        return self.finished

    def _seal_now(self) -> None:
        self._progress.recover()
        self._progress.hand_over()
        if self._progress.is_interrupted and self._progress.has_moved():
            raise RecordingError(
                f"seal(): the last optimizer.step() did not return, so the weights are not those of step {self.finished}. Close the "
                f"recorder, load a checkpoint of model and optimizer, and go on with record(…, resume=n)."
            )
        self._progress.put_snapshot()
        self._writer.wait()
        self._finished.is_checkpointed = self._finished.keeps_only_totals

    def close(self, ended: str) -> None:
        """Seal everything and remove all hooks. ended: "closed", or the exception that ended the training.

        An exception that comes while it closes waits until it is closed. Ctrl-C is held back, until it comes a second time.
        """
        try:
            warned = self._close_held(ended)
        except Exception:
            raise
        except BaseException:
            # First what is left to do, unless Ctrl-C came a second time: whoever insists wants to leave
            if INTERRUPTS.was_insisted:
                self._abandon()
            else:
                with contextlib.suppress(DualformError):
                    self._close(ended)
            raise
        for text in warned:
            warnings.warn(text, stacklevel=4)

    def _close_held(self, ended: str) -> list[str]:
        if not self.is_closed and os.getpid() != self._process:
            self._refuse_child()
        with INTERRUPTS.held((self, "closing")):
            return self._close(ended)

    def close_dropped(self) -> None:
        """Nobody can close it any more."""
        if os.getpid() != self._process:
            return  # in a forked child, everything belongs to the parent
        try:
            self.close(DROPPED)
        except DualformError as error:
            warnings.warn(f"closing the recording in {self.path} failed: {error}", stacklevel=2)

    def _close(self, ended: str) -> list[str]:
        """Do what is yet to be done; gives warnings. Doing so again, after an exception, changes nothing."""
        warned: list[str] = []
        if self.is_closed:
            return warned
        self._detach()
        try:
            left_out = {}
            if ended == "closed":
                left_out = self._never_called(warned)
                self._warn_of_unused_batch(warned)
            if not self._writer.failed:
                ended = self._put_everything(ended, warned)
            self._writer.close(ended, left_out)
        except WriterError as error:
            self._abandon()
            self._raise_or_warn(error, warned)
        except Exception as error:
            # What was handed over before is whole
            self._writer.close(f"{ended}; {type(error).__name__} while it was closed")
            self.is_closed = True
            raise
        self.is_closed = True
        if self._finished.problem is not None:
            raise self._finished.problem
        return warned

    def _put_everything(self, ended: str, warned: list[str]) -> str:
        """Hand over all that is finished, and the weights of now, if they are those of the last step; gives how it ended."""
        self._progress.recover()
        self._progress.forget_update()  # closed within optimizer.step()
        self._hand_over_at_the_end()
        is_by_user = ended == "closed"
        if self._finished.has_given_up_totals:
            ended = f"{ended}; totals are not kept"
        changes = self._steps.watch.edits()
        if self._progress.is_interrupted and (changes or self._progress.has_moved_others()):
            self._progress.put_totals()
            return f"{ended}; {UNFINISHED}"
        if changes:
            self._progress.put_totals()
            names = ", ".join(sorted(changes))
            if is_by_user:  # else an error is on its way that says so
                warned.append(
                    f"{names}: changed after the last step by something else than the optimizer, so the model's weights are not "
                    f"those that were trained and are not stored. The slots are whole up to step {self.finished}."
                )
            return f"{ended}; {names} changed after the last step"
        is_stored = self._finished.has_fixed_weights or (self._finished.is_checkpointed and not is_by_user)
        if not is_stored:
            self._progress.put_snapshot()
        return ended

    def _hand_over_at_the_end(self) -> None:
        try:
            self._progress.hand_over()
            self._finished.fold()
        except WriterError:
            raise
        except Exception as error:
            self._finished.put_without_extras(error)
            self._progress.hand_over()

    def _never_called(self, warned: list[str]) -> dict[str, str]:
        """Layers that had no part in the training: named once, at the end."""
        idle = [layer.layer.name for one in self._passes.modules if not one.called for layer in one.layers]
        # With several ranks, another one may have called them
        if idle and self.finished and self._steps.exchange is None:
            warned.append(f"not recorded: {', '.join(map(repr, idle))}: never called in training")
        return dict.fromkeys(idle, "it was never called in training")

    def _warn_of_unused_batch(self, warned: list[str]) -> None:
        last = self._passes.batch
        if self.finished and last is not None and not last.is_used:
            warned.append(
                "the last recorder.batch() call was not followed by a forward pass. Call it right before the forward pass of its rows; "
                "if it is called after that, each batch has the rows of the one before."
            )

    # Whether it goes on

    def _detach(self) -> None:
        self._is_detached = True
        self._finished.is_closing = True
        self._progress.detach()
        self._capture.remove()

    def _abandon(self) -> None:
        self._detach()
        self._writer.abandon()
        self.is_closed = True

    def _is_recording(self) -> bool:
        """Whether recording goes on; False after a write error, if the user asked for that."""
        if os.getpid() != self._process:
            self._refuse_child()
        if not self._is_detached and not self._writer.failed:
            return True
        if self._is_detached:
            if self._writer.failed and self._on_write_error == "stop":
                return False
            raise RecordingError(f"the recorder of {self.path} is closed. Record into a new folder.")
        return self._guarded(self._writer.check)

    def _refuse_child(self) -> None:
        raise RecordingError(
            f"the recorder of {self.path} belongs to process {self._process} and was used in process {os.getpid()}, a forked child of "
            f"it (a DataLoader worker, say), where its writer does not run. Use it in the process that called dualform.record(); "
            f'to record a training in a child, start that by the method "spawn" or "forkserver" and call dualform.record() there, with a '
            f"folder of its own."
        )

    def _guarded(self, work: Callable[..., object], *given: Any) -> bool:
        """Do what may fail in the writer; False if it did and the training is to go on without us."""
        try:
            work(*given)
        except WriterError as error:
            self._abandon()
            warned: list[str] = []
            self._raise_or_warn(error, warned)
            for text in warned:
                warnings.warn(text, stacklevel=4)
            return False
        return True

    def _raise_or_warn(self, error: WriterError, warned: list[str]) -> None:
        if self._on_write_error == "raise":
            raise error
        warned.append(f"recording has stopped, the training goes on: {error}")

    def _adopt(self) -> None:
        """Before a forward pass: has add_param_group brought in a layer that was left out?"""
        for module in self._late.enter(with_totals=self._finished.totals is not None):
            self._capture.add(module)
