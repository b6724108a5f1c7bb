"""Memory: what is freed goes back to the system, and what is needed again is kept.

PyTorch asks for aligned memory, and glibc before 2.38 seldom uses a freed aligned block again: a loop that decodes chunk after chunk
would seem to need more and more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.store.pages import system_call


class Room:
    """Memory that is used again and again: fresh pages cost more than what is written to them."""

    def __init__(self, dtype: torch.dtype):
        self._memory = torch.empty(0, dtype=dtype)

    def __call__(self, n: int, m: int) -> Tensor:
        """A matrix with any content."""
        if self._memory.numel() < n * m:
            self._memory = self._memory.new_empty(n * m)
        return self._memory[: n * m].view(n, m)


def give_back() -> None:
    """Let go of what is free; milliseconds. Does nothing where the system's library has no such call."""
    trim = system_call("malloc_trim")
    if trim is not None:
        trim(0)
