"""How far a child has come, in memory that its parent can read even after the child was killed."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable

PHASES = ("start", "record", "overwrite", "resume", "training", "seal", "close", "totals", "ended")


class Progress:
    """Create it before the fork."""

    def __init__(self, on_promise: Callable[[int], object] | None = None) -> None:
        """on_promise: called in the child with the number of steps that it has promised, also with 0 when record() returns."""
        self._memory = mmap.mmap(-1, 32)
        self._on_promise = on_promise

    def _get(self, place: int) -> int:
        return int(struct.unpack_from("q", self._memory, 8 * place)[0])

    def _set(self, place: int, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * place, value)

    @property
    def phase(self) -> str:
        """What the child is doing."""
        return PHASES[self._get(0)]

    @phase.setter
    def phase(self, phase: str) -> None:
        self._set(0, PHASES.index(phase))

    @property
    def steps(self) -> int:
        """How many steps of the training are done."""
        return self._get(1)

    @steps.setter
    def steps(self, steps: int) -> None:
        self._set(1, steps)

    @property
    def promised(self) -> int:
        """How many steps the last seal() that returned has promised."""
        return self._get(2)

    @promised.setter
    def promised(self, steps: int) -> None:
        self._set(2, steps)
        if self._on_promise is not None:
            self._on_promise(steps)

    @property
    def begun(self) -> bool:
        """Whether record() has returned."""
        return bool(self._get(3))

    @begun.setter
    def begun(self, begun: bool) -> None:
        self._set(3, int(begun))
        if self._on_promise is not None:
            self._on_promise(self.promised)
