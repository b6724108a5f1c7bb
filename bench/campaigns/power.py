"""Pull the plug: replay the system calls of a recording on a model of a disk, and open what a loss of power leaves.

A case records one life of a training (a new recording, a resumed one, one that overwrites another) with every write, flush,
rename and removal. The loss of power comes after each of some calls, drawn at random; what was not flushed is lost, kept, or kept in
part (disk.py). The store must then open with at least the steps that seal() had promised by that time, be equal slot by slot to an
uninterrupted training, pass verify and be resumable. The calls as a whole must give the folder as it is: none is missed.
"""

from __future__ import annotations

import os
import random
import shutil
from functools import partial
from pathlib import Path

from campaigns import forks
from campaigns.case import Campaign as Base
from campaigns.case import Outcome
from campaigns.disk import Disk, read_trace
from campaigns.kill import Victim, look, train
from campaigns.progress import Progress
from campaigns.references import Reference, reference
from campaigns.runs import KINDS, Training
from campaigns.system_calls import Interference, library

SEEDS = 2
LOSSES = 12
"""How many losses of power one life is tried with."""
MODES = ("lost", "kept", "any", "torn")


class Campaign(Base):
    """Losses of power, some for each life of a training."""

    name = "power"
    unit = "losses of power"
    needs_system_calls = True
    goal = 1_000

    def __init__(self, folder: Path):
        self._folder = folder
        self._references: dict[tuple[str, int], Reference] = {}

    def run(self, draw: random.Random, number: int) -> Outcome:
        """One life, and what would be left of it."""
        kind = draw.choice(list(KINDS))
        seed = draw.randrange(SEEDS)
        expected = self._reference(kind, seed)
        begin = draw.choice(["record", "record", "overwrite", "resume"])
        folder = self._folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        previous = None
        if begin == "overwrite":
            previous = self._reference(kind, (seed + 1) % SEEDS)
            forks.call(partial(train, previous, folder))
        elif begin == "resume":
            forks.call(partial(_stop_early, expected, folder, draw.randint(1, 12)))
        victim = Victim(expected, folder, begin)
        disk = Disk(folder)
        trace = self._folder / "trace"
        try:
            forks.call(partial(_live, victim, trace))
            return forks.call(partial(_lose_power, victim, previous, disk, trace, draw), seconds=600)
        except forks.ChildError as error:
            outcome = Outcome()
            outcome.fail(f"{victim}: {error}", folder)
            return outcome

    def _reference(self, kind: str, seed: int) -> Reference:
        if (kind, seed) not in self._references:
            self._references[kind, seed] = reference(KINDS[kind], seed, self._folder / "reference")
        return self._references[kind, seed]


def _stop_early(expected: Reference, folder: Path, steps: int) -> None:
    """A recording that ends after some steps."""
    training = Training(expected.kind, expected.seed)
    with training.record(folder) as recorder:
        training.go_on(recorder, steps)


def _live(victim: Victim, trace: Path) -> None:
    """One life from begin to end, with all its system calls written to a file."""
    descriptor = os.open(trace, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    victim.live(Progress(on_promise=library().mark_trace), Interference(), descriptor)


def _lose_power(victim: Victim, previous: Reference | None, disk: Disk, trace: Path, draw: random.Random) -> Outcome:
    """Lose power at some of the calls of a life. disk: as it was before the first call."""
    calls = list(read_trace(trace.read_bytes()))
    losses = sorted((draw.randint(0, len(calls)), draw.choice(MODES)) for _ in range(LOSSES))
    left = Victim(victim.expected, _left(victim.folder), victim.begin)
    outcome = Outcome()
    done = 0
    for at, mode in losses:
        for call in calls[done:at]:
            disk.apply(call)
        done = at
        _write(left.folder, disk.after_power_loss(draw, mode))
        progress = Progress()
        progress.promised = disk.promised or 0
        progress.begun = disk.promised is not None
        try:
            state = look(left, progress, previous, is_last=True).replace("kills", "losses")
        except Exception as error:
            last = calls[at - 1] if at else None
            where = "at the beginning" if last is None else f"after call {at}, {last.kind} {Path(last.path).name}"
            what = f"{victim}: power lost {where}, what was not flushed is {mode}"
            outcome.fail(f"{what}: {type(error).__name__}: {error}", left.folder)
            state = "losses that failed"
        outcome.counts["losses of power"] += 1
        outcome.counts[f"what was not flushed is {mode}"] += 1
        outcome.counts[state] += 1
    for call in calls[done:]:
        disk.apply(call)
    if disk.everything() != _read(victim.folder):
        raise AssertionError("the recorded calls do not give the folder as it is: some were missed")
    return outcome


def _left(folder: Path) -> Path:
    return folder.with_name("left")


def _read(folder: Path) -> dict[str, bytes]:
    """All files below a folder: bytes by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """A folder with these files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
