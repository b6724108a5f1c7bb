"""A language model's training, recorded: killed at any time, the same call goes on from the last checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dualform
from dualform.errors import QuestionError, RecordingError
from dualform.language.description import COLUMN, Description, write_description
from dualform.language.model import LanguageModel
from dualform.language.shape import LAYER
from dualform.language.text import Text
from dualform.progress import Progress, ignore_progress
from dualform_paper.language import checkpoints
from dualform_paper.language.settings import Settings
from dualform_paper.language.training import adam, batch_of, evaluate, initial_model, start, train_step
from dualform_paper.settings import completed

Measure = Callable[[Path], Any]
"""A recording's folder → plain data about it."""
TRAINED = "trained.json"
CHECKPOINT_STEPS = 100
"""Steps between two checkpoints."""
BOUND = 20e9
"""Bytes that all slots may take on the disk."""
CURVE_POINTS = 40
CURVE_TOKENS = 10_000
"""The learning curve: its points, and the tokens of the test text on which each is measured."""


@dataclass
class Trained:
    """The course of a training so far."""

    settings: dict[str, Any]
    keep: str
    steps: int = 0
    seconds: float = 0.0
    """Wall time of training and recording, without evaluation."""
    nbytes: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(step, nats per token of the training text since the point before)"""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, nats per token of the test text's beginning)"""
    test: float | None = None
    """Nats per token of the whole test text."""
    processor: float = 0.0
    """Processor time of the same work, of all threads."""
    recent: list[float] = field(default_factory=list)
    """The loss of each step since the last point of `losses`."""
    measured: list[tuple[int, Any]] = field(default_factory=list)
    """(step, what `measure` found at a checkpoint)"""

    def add_point(self, test: float) -> None:
        """A point of the learning curve. test: nats per token of the test text's beginning."""
        self.losses.append((self.steps, sum(self.recent) / len(self.recent)))
        self.curve.append((self.steps, test))
        self.recent = []


class Stopwatch:
    """Wall and processor time, without pauses; goes on from what was measured before."""

    def __init__(self, seconds: float, processor: float):
        self._before = (seconds, processor)
        self._began = self._now()
        self._aside = (0.0, 0.0)

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    @property
    def here(self) -> tuple[float, float]:
        """Seconds since this stopwatch was made: wall, processor."""
        now = self._now()
        return (now[0] - self._began[0] - self._aside[0], now[1] - self._began[1] - self._aside[1])

    @property
    def total(self) -> tuple[float, float]:
        """Seconds with those before: wall, processor."""
        here = self.here
        return (self._before[0] + here[0], self._before[1] + here[1])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens meanwhile does not count."""
        began = self._now()
        yield
        ended = self._now()
        self._aside = (self._aside[0] + ended[0] - began[0], self._aside[1] + ended[1] - began[1])


def options(text: Text, settings: Settings, keep: str) -> dict[str, Any]:
    """Arguments of dualform.record(). keep: "totals" (sums of keys by position) or "slots" (everything, float16)."""
    if keep == "slots":
        return {"layers": [LAYER], "dtype": "float16"}
    key = settings.shape(len(text.vocabulary)).key
    return {
        "layers": [LAYER],
        "keep": "totals",
        "totals": {COLUMN: "keys"},
        "totals_bytes": 4 * key * len(text.train) + (1 << 20),
    }


def train(
    text: Text,
    settings: Settings,
    folder: Path,
    *,
    keep: str = "totals",
    minutes: float | None = None,
    checkpoint_every: int = CHECKPOINT_STEPS,
    measure: Measure | None = None,
    progress: Progress = ignore_progress,
) -> tuple[LanguageModel, Trained]:
    """Train and record until settings.steps, or for some minutes; goes on from the last checkpoint, if there is one.

    keep: "totals" per position, or all "slots", of as many steps as BOUND has room for. measure: called with the folder after each
    checkpoint; its answers are kept in `Trained.measured`. Only totals can be measured: slots may be ahead of the checkpoint.
    """
    if checkpoint_every < 1:
        raise QuestionError(f"checkpoint_every {checkpoint_every}: expected at least 1 step.")
    if keep != "totals" and measure is not None:
        raise QuestionError(f'measure= needs totals, and keep is {keep!r}. Leave it out, or say keep="totals".')
    if keep == "slots":
        most = max(1, int(BOUND / settings.slot_bytes))
        settings = replace(settings, steps=min(settings.steps, most))
    model = initial_model(settings, len(text.vocabulary))
    optimizer = adam(model, settings)
    state = start(model, settings.batch)
    trained = Trained(replace(settings, steps=0).to_dict(), keep)

    checkpoint = _last_checkpoint(folder, keep)
    if checkpoint is not None:
        trained = _same_training(folder, checkpoint, trained)
        state = checkpoints.load(checkpoint, model, optimizer)
    if trained.steps >= settings.steps:
        return model, _finish(text, model, folder, trained, measure, progress)

    folder.parent.mkdir(parents=True, exist_ok=True)
    if trained.steps:
        resume: dict[str, Any] = {"resume": trained.steps}
        _measure(folder, trained, measure)  # in case the training was killed before it could
    else:
        resume = {"overwrite": True}
        checkpoints.remove_all(folder)  # left by a training that was killed before its recording was first sealed

    point_every = max(1, settings.steps // CURVE_POINTS)
    watch = Stopwatch(trained.seconds, trained.processor)
    with dualform.record(model, optimizer, folder, **options(text, settings, keep), **resume) as recorder:
        write_description(folder, Description(text, model.shape))
        for step in range(trained.steps, settings.steps):
            read = batch_of(text.train.ids, step, settings)
            recorder.batch(**{COLUMN: read.positions})
            loss, state = train_step(model, optimizer, read, state, step, settings)
            recorder.log(loss=loss)
            trained.steps = step + 1
            trained.recent.append(loss)
            trained.seconds, trained.processor = watch.total

            late = minutes is not None and watch.here[0] > 60 * minutes
            last = late or trained.steps == settings.steps
            if last or trained.steps % point_every == 0:
                with watch.paused():
                    trained.add_point(evaluate(model, text.test.ids, most=CURVE_TOKENS))
            progress("training", trained.steps, settings.steps)
            if last:
                break
            if trained.steps % checkpoint_every == 0:
                checkpoints.save(folder, trained.steps, model, optimizer, state, asdict(trained))
                recorder.seal()
                checkpoints.remove_all(folder, but=trained.steps)
                with watch.paused():
                    _measure(folder, trained, measure)
        checkpoints.save(folder, trained.steps, model, optimizer, state, asdict(trained))
    return model, _finish(text, model, folder, trained, measure, progress)


def _measure(folder: Path, trained: Trained, measure: Measure | None) -> None:
    """Measure what is sealed, once a step."""
    known = bool(trained.measured) and trained.measured[-1][0] == trained.steps
    if measure is not None and not known:
        trained.measured.append((trained.steps, measure(folder)))


def _finish(
    text: Text, model: LanguageModel, folder: Path, trained: Trained, measure: Measure | None, progress: Progress
) -> Trained:
    """Measure the whole test text, once, and write down how the training went."""
    checkpoints.remove_all(folder, but=trained.steps)
    path = folder / TRAINED
    if path.exists():
        known = Trained(**json.loads(path.read_text()))
        if known.steps == trained.steps:
            return known
    _measure(folder, trained, measure)
    trained.nbytes = dualform.open(folder).info()["bytes"]
    progress("test text", 0, 1)
    trained.test = evaluate(model, text.test.ids)
    progress("test text", 1, 1)
    written = json.dumps(asdict(trained), indent=1)
    checkpoints.replace_file(path, lambda unfinished: _write(unfinished, written))
    return trained


def _write(path: Path, content: str) -> None:
    path.write_text(content)


def _last_checkpoint(folder: Path, keep: str) -> Path | None:
    """The checkpoint that the recording can go on from; None: the training begins anew."""
    known = checkpoints.by_step(folder)
    if not known:
        return None
    sealed = dualform.open(folder).end_step
    # Slots can be cut at any step; totals are those of the one step at which they were sealed.
    fitting = [step for step in known if step == sealed or (keep == "slots" and step < sealed)]
    if fitting:
        return known[max(fitting)]
    if sealed < min(known):
        return None  # killed after the first checkpoint was saved, before the recording was sealed there
    raise RecordingError(
        f"{folder}: the recording is sealed at step {sealed}, and there are checkpoints of step "
        f"{', '.join(map(str, sorted(known)))} only, so the training cannot go on. Remove the folder to train again."
    )


def _same_training(folder: Path, checkpoint: Path, wanted: Trained) -> Trained:
    """The course of the training in a checkpoint, which must have the same settings."""
    found = Trained(**checkpoints.about(checkpoint))
    found.settings = completed(Settings, found.settings)
    if (found.settings, found.keep) != (wanted.settings, wanted.keep):
        raise RecordingError(
            f"{folder} holds another training ({found.keep}, {found.settings}). Choose another folder, or remove it."
        )
    return found
