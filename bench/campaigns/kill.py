"""Kill a recording with SIGKILL, look at what is left, go on with it, kill it again.

A case is a chain of kills of one training. Each victim is a forked child that begins a recording, goes on with one, or
overwrites a finished one; trains, seals, closes and builds totals. It is killed at a random system call (before it,
after it, or with half of its bytes written), or a random moment after it has reached a random step: the parent follows
the victim's progress in shared memory, so the load of the machine does not matter.

After each kill the store must open with at least the steps that seal() has promised, be equal slot by slot to an
uninterrupted training of the same seed, and pass verify. The next victim goes on with it; after the last kill of a chain
it is resumed and must become that training. The page cache
survives a kill, so this tests the order of our own operations; power.py is about the loss of power.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import dualform
from campaigns import forks
from campaigns.case import Campaign as Base
from campaigns.case import Outcome
from campaigns.progress import Progress
from campaigns.references import Reference, check, finish, reference, resume_step
from campaigns.runs import KINDS, STEPS, Training
from campaigns.system_calls import KILL_AFTER, KILL_BEFORE, KILL_INSIDE, Interference

SEEDS = 3
"""So many trainings of each kind are used again and again."""
CHAIN = 4
"""How many kills a training must survive, one after the other."""


@dataclass
class Victim:
    """One child that is to be killed."""

    expected: Reference
    folder: Path
    begin: str
    """How it begins: "record", "overwrite" or "resume"."""

    def __str__(self) -> str:
        return f"{self.expected.kind.name}, seed {self.expected.seed}, {self.begin}"

    def live(self, progress: Progress, interference: Interference, trace: int = -1) -> None:
        """Everything a recording can do, from begin to end; the parent decides when it is over.

        trace: a descriptor to which all system calls are written.
        """
        kind = self.expected.kind
        state = None
        settings: dict[str, bool | int] = {}
        if self.begin == "resume":
            at = resume_step(self.folder, kind)
            state = self.expected.states[at]
            settings["resume"] = at
            progress.promised = at
        elif self.begin == "overwrite":
            settings["overwrite"] = True
        interference.begin(self.folder, trace)
        progress.phase = self.begin
        training = Training(kind, self.expected.seed, state)
        recorder = training.record(self.folder, **settings)
        progress.begun = True
        while training.done < STEPS:
            progress.phase = "training"
            training.step(recorder)
            progress.steps = training.done
            if training.done % kind.seal_every == 0:
                progress.phase = "seal"
                progress.promised = recorder.seal()
        progress.phase = "close"
        recorder.close()
        progress.promised = training.done
        if kind.keeps_slots and not kind.has_totals:
            progress.phase = "totals"
            dualform.build_totals(self.folder, "label")
        progress.phase = "ended"


class Campaign(Base):
    """Kills, in chains."""

    name = "kill"
    unit = "kills with sealed steps"
    needs_system_calls = True
    goal = 10_000

    def __init__(self, folder: Path):
        self._folder = folder
        self._references: dict[tuple[str, int], Reference] = {}
        self._calls: dict[tuple[str, str], int] = {}

    def run(self, draw: random.Random, number: int) -> Outcome:
        """One chain of kills."""
        outcome = Outcome()
        kind = draw.choice(list(KINDS))
        seed = draw.randrange(SEEDS)
        expected = self._reference(kind, seed)
        folder = self._folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        previous: Reference | None = None
        if draw.random() < 0.2:  # begin by overwriting a finished training of another seed
            previous = self._reference(kind, (seed + 1) % SEEDS)
            forks.call(partial(train, previous, folder))
        for number_in_chain in range(1, CHAIN + 1):
            if previous is not None:
                begin = "overwrite"
            else:
                begin = "resume" if (folder / "manifest.json").exists() else "record"
            victim = Victim(expected, folder, begin)
            progress = Progress()
            where = self._kill(victim, progress, draw)
            is_last = number_in_chain == CHAIN
            try:
                if where is None:
                    forks.call(partial(check, folder, expected, STEPS))
                    outcome.counts["ended before the kill"] += 1
                    return outcome
                left = forks.call(partial(look, victim, progress, previous, is_last))
            except forks.ChildError as error:
                outcome.fail(f"{victim}, killed {where}: {error}", folder)
                return outcome
            outcome.counts["kills"] += 1
            outcome.counts[left] += 1
            outcome.counts[f"during {progress.phase}"] += 1
            if left == "kills with sealed steps":
                outcome.counts[f"of {kind}"] += 1
            if left != "old recording left":
                previous = None
        return outcome

    def _kill(self, victim: Victim, progress: Progress, draw: random.Random) -> str | None:
        """Start a victim and kill it; says where, or None if it ended first."""
        calls = self._count(victim)
        if draw.random() < 0.7:
            action = draw.choice([KILL_BEFORE, KILL_AFTER, KILL_INSIDE])
            # The few calls that begin to resume or to overwrite should be hit as often as the many that follow
            is_early = victim.begin != "record" and draw.random() < 0.4
            last = max(1, calls // 4) if is_early else calls
            interference = Interference(draw.randint(1, last), action)
            child = forks.start(partial(victim.live, progress, interference))
        else:
            interference = Interference()
            target = draw.randint(0, STEPS)
            delay = draw.uniform(0, 0.01)
            child = forks.start(partial(victim.live, progress, interference))
            _kill_after(child, progress, target, delay)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return f"in {progress.phase} at step {progress.steps}, {interference.kind} {interference.path}"
        if status == 0:
            return None
        raise RuntimeError(f"the victim failed by itself, with status {status}")

    def _reference(self, kind: str, seed: int) -> Reference:
        if (kind, seed) not in self._references:
            self._references[kind, seed] = reference(KINDS[kind], seed, self._folder / "reference")
        return self._references[kind, seed]

    def _count(self, victim: Victim) -> int:
        """How many system calls such a victim makes if it is left alone, from the longest kind of its life."""
        key = (victim.expected.kind.name, victim.begin)
        if key not in self._calls:
            folder = self._folder / "counted"
            shutil.rmtree(folder, ignore_errors=True)
            if victim.folder.exists():
                shutil.copytree(victim.folder, folder)
            counted = Interference()
            alone = Victim(victim.expected, folder, victim.begin)
            forks.call(partial(alone.live, Progress(), counted))
            self._calls[key] = counted.calls
            shutil.rmtree(folder)
        return self._calls[key]


def _kill_after(child: int, progress: Progress, target: int, delay: float) -> None:
    """Wait until a victim has recorded `target` steps, and for a moment more; then kill it."""
    until = time.monotonic() + forks.SECONDS
    while progress.steps < target and progress.phase != "ended":
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            raise RuntimeError(f"the victim hangs in {progress.phase} at step {progress.steps}")
        time.sleep(0.0002)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)  # a child that has ended meanwhile is still there to be waited for


def train(expected: Reference, folder: Path, **settings: bool) -> None:
    """A finished recording."""
    training = Training(expected.kind, expected.seed)
    with training.record(folder, **settings) as recorder:
        training.go_on(recorder)


def look(victim: Victim, progress: Progress, previous: Reference | None, is_last: bool) -> str:
    """Check what a kill has left. The last of a chain is gone on with up to the end, the others by the next victim."""
    folder = victim.folder
    if previous is not None and not progress.begun and _is_left(folder, previous):
        return "old recording left"
    steps = check(folder, victim.expected, progress.promised)
    if steps is None:
        if is_last:
            train(victim.expected, folder)
            check(folder, victim.expected, STEPS)
        return "kills without a store"
    if is_last:
        finish(folder, victim.expected)
    return "kills with sealed steps" if steps else "kills with an empty store"


def _is_left(folder: Path, previous: Reference) -> bool:
    """Whether a store is still the one that was to be overwritten."""
    try:
        return check(folder, previous, STEPS) == STEPS
    except AssertionError:
        return False
