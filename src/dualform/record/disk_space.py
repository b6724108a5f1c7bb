"""Warns once, early, if the disk will be full before the training ends."""

from __future__ import annotations

import shutil
import warnings

from dualform.store.format import size_text
from dualform.store.writer import Writer

FIRST_LOOK = 20
"""After so many steps the free space is looked at first; then whenever there are twice as many."""


class DiskSpace:
    """The free space of the disk that a recording is written to, and how fast it is used up."""

    def __init__(self, writer: Writer, expected_steps: int | None = None):
        """expected_steps: after how many steps, counted from the first, the training will end; None: nobody knows."""
        self._writer = writer
        self._expected_steps = expected_steps
        self._first_step = writer.manifest.end_step
        self._sealed_before = _sealed_bytes(writer)
        self._handed_over = 0
        self._next_step = self._first_step
        self._next_look = FIRST_LOOK
        self._has_warned = False

    def add(self, step: int, nbytes: int) -> None:
        """A step was handed to the writer. One that was added before is left out."""
        if step < self._next_step:
            return
        self._next_step = step + 1
        self._handed_over += nbytes
        steps = self._next_step - self._first_step
        if steps < self._next_look or self._has_warned:
            return
        self._next_look = 2 * steps
        self._look(steps)

    def _look(self, steps: int) -> None:
        rate = self._bytes_per_step(steps)
        free = _free_bytes(self._writer.location)
        if free is None or rate <= 0:
            return
        lasts = max(0, int((free - self._writer.held_bytes) / rate))
        # If nobody knows how long it will be: it must last until the next look
        wanted = steps if self._expected_steps is None else self._expected_steps - self._next_step
        if lasts >= wanted:
            return
        self._has_warned = True
        to_come = "" if self._expected_steps is None else f", and {wanted:,} are still to come"
        warnings.warn(
            f"the disk of {self._writer.location} has {size_text(free)} left: it will be full after about {lasts:,} more steps of "
            f'{size_text(rate)} each{to_come}. What takes less: keep="rows", dtype="float16", or fewer layers=. '
            f"dualform.estimate() tells how much.",
            stacklevel=2,
        )

    def _bytes_per_step(self, steps: int) -> float:
        """What a step takes on the disk, snapshots included; before anything is sealed, what it takes in memory."""
        sealed_steps = self._writer.manifest.end_step - self._first_step
        if sealed_steps:
            return (_sealed_bytes(self._writer) - self._sealed_before) / sealed_steps
        return self._handed_over / steps


def _sealed_bytes(writer: Writer) -> int:
    return sum(file.size for _, file in writer.manifest.files())


def _free_bytes(folder: str) -> int | None:
    """None: it is not known."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
