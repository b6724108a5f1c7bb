"""Two ways to record a language model, side by side with none: what each costs, in one run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import dualform
from dualform.language.description import COLUMN
from dualform.language.text import Text
from dualform.progress import Progress, ignore_progress
from dualform_paper.language.recording import BOUND, options
from dualform_paper.language.settings import Settings
from dualform_paper.language.training import adam, batch_of, initial_model, start, train_step

WAYS = ("bare", "totals", "slots")


@dataclass
class Cost:
    """Of some steps of training."""

    seconds: float = 0.0
    processor: float = 0.0
    """Seconds of all threads, the background writer's with them: less disturbed by what else runs."""
    nbytes: int = 0
    """Of slots or totals, without snapshots."""


@dataclass(frozen=True)
class Costs:
    """Of the same steps, bare and in each way."""

    steps: int
    """That were timed: one less than were recorded."""
    by: dict[str, Cost]

    def ratio(self, way: str, of: str = "processor") -> float:
        """Time with recording / time without."""
        return float(getattr(self.by[way], of) / getattr(self.by["bare"], of))

    @property
    def slot_bytes(self) -> float:
        """That all slots take for each step."""
        return self.by["slots"].nbytes / (self.steps + 1)

    @property
    def steps_within_bound(self) -> int:
        """So many steps can be recorded with all slots within BOUND."""
        return int(BOUND / self.slot_bytes)


def compare(text: Text, settings: Settings, folder: Path, steps: int, progress: Progress = ignore_progress) -> Costs:
    """Train three copies in turn, a step each, one without a recorder; the first step of each is not counted."""
    costs = {way: Cost() for way in WAYS}
    with ExitStack() as stack:
        copies = {way: _steps(text, settings, folder / way, way, stack) for way in WAYS}
        for step in range(steps + 1):
            for way in WAYS:
                began, used = time.perf_counter(), time.process_time()
                next(copies[way])
                if step:
                    costs[way].seconds += time.perf_counter() - began
                    costs[way].processor += time.process_time() - used
            progress("two ways", step, steps)
        for copy in copies.values():
            copy.close()
    for way in WAYS[1:]:
        costs[way].nbytes = _grown(folder / way)
        shutil.rmtree(folder / way)
    return Costs(steps, costs)


def _grown(folder: Path) -> int:
    info = dualform.open(folder).info()
    return int(info["bytes"] - info["snapshot_bytes"])


def _steps(text: Text, settings: Settings, folder: Path, way: str, stack: ExitStack) -> Generator[None]:
    model = initial_model(settings, len(text.vocabulary))
    optimizer = adam(model, settings)
    state = start(model, settings.batch)
    step = 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    recorder = None
    if way != "bare":
        recorder = stack.enter_context(
            dualform.record(model, optimizer, folder, overwrite=True, **options(text, settings, way))
        )
    while True:
        read = batch_of(text.train.ids, step, settings)
        if recorder is not None:
            recorder.batch(**{COLUMN: read.positions})
        _, state = train_step(model, optimizer, read, state, step, settings)
        step += 1
        yield
