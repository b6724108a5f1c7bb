"""The recorder: the one object a training loop sees."""

from __future__ import annotations

import contextlib
import weakref
from types import TracebackType
from typing import Any

from dualform.errors import BatchError, DualformError
from dualform.record.recording import Recording


class Recorder:
    """Records until closed. Made by `dualform.record`; a context manager.

    It belongs to the thread that trains: do not call it, the model or the optimizer from several threads at once.
    One that is dropped without being closed closes itself, at the latest when the process ends.
    """

    def __init__(self, recording: Recording):
        self.path = recording.path
        # Hooks hold the recording and not the recorder, so that the recorder goes when the user lets go of it
        self._recording = recording
        self._finalizer = weakref.finalize(self, recording.close_dropped)

    @property
    def step(self) -> int:
        """How many steps have been recorded."""
        return self._recording.finished

    def batch(self, *unnamed: Any, **columns: Any) -> None:
        """Name the rows of the next forward pass: columns of integers, floats, strings or booleans.

        Each is a tensor, array or list of shape (rows,) or (rows, positions), or a scalar that stands for all rows.
        """
        if unnamed:
            raise BatchError("batch() takes columns by name: recorder.batch(sample_id=ids, label=labels).")
        self._recording.batch(columns)

    def log(self, **scalars: float) -> None:
        """Keep numbers beside a step: the last one, or the coming one if its backward pass has begun."""
        self._recording.log(scalars)

    def seal(self) -> int:
        """Seal everything so far with a snapshot and wait for the disk; call it when you save a checkpoint.

        Gives the number of steps: `resume=` takes it.
        """
        return self._recording.seal()

    def close(self) -> None:
        """Seal everything and leave model and optimizers as they were. Called by leaving the `with` block."""
        self._close("closed")

    def _close(self, ended: str) -> None:
        try:
            self._recording.close(ended)
        finally:
            if self._recording.is_closed:
                self._finalizer.detach()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._close("closed")
            return
        with contextlib.suppress(DualformError):  # the loop's own error matters more than ours
            self._close(kind.__name__)
