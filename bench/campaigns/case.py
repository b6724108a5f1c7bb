"""What every campaign has: a goal, cases that can be run one by one, and their outcomes."""

from __future__ import annotations

import random
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.results import STORE_AND_RECORDER

KEPT = Path(tempfile.gettempdir()) / "dualform-torture"
"""Where the stores of failed cases are copied to."""


@dataclass
class Outcome:
    """Counts by name, and a description of each failure."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fail(self, what: str, store: Path | None = None) -> None:
        """Note a failure. store: the folder that shows it, of which a copy is kept."""
        self.counts["failures"] += 1
        if store is not None and store.exists():
            KEPT.mkdir(exist_ok=True)
            copy = Path(tempfile.mkdtemp(dir=KEPT)) / "store"
            shutil.copytree(store, copy)
            what = f"{what}\n(a copy of the store is in {copy})"
        self.failures.append(what)


class Campaign(ABC):
    """A kind of test that is repeated with other random numbers. Its cases work in a folder on a RAM disk."""

    name: str
    unit: str
    """The count that the goal is about."""
    goal: int
    needs_system_calls = False
    """Whether system calls must be watched (system_calls.py)."""
    sources: Sequence[str] = STORE_AND_RECORDER
    """The parts of the package whose change makes all counts void."""

    @abstractmethod
    def __init__(self, folder: Path):
        """Prepare what all cases need."""

    @abstractmethod
    def run(self, draw: random.Random, number: int) -> Outcome:
        """Run one case. draw: its random numbers, which follow from its number."""
