"""Let a system call fail: each call of some short recordings, in each of the ways in which it can.

A case is one call (open, create, write, flush, rename, remove, make or remove a folder) of one scenario (a new recording with totals
built afterwards, one with totals, one of totals alone, a resumed one, one that overwrites another) that fails with ENOSPC, EIO or
EINTR, or writes half of its bytes; once, or from then on. The library in system_calls.c does so beneath every writer, Polars too.

The recording must then end with a StoreError that names the folder and the cause, or go through as if nothing had happened. The store must open
with at least what seal() has promised, be equal slot by slot to an uninterrupted training, and be gone on with in the same process:
the lock must be free. With on_write_error="stop" the training must come to its end.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dualform
from campaigns import forks
from campaigns.case import Campaign as Base
from campaigns.case import Outcome
from campaigns.kill import train
from campaigns.progress import Progress
from campaigns.references import Reference, check, finish, reference, resume_step
from campaigns.runs import KINDS, STEPS, Training
from campaigns.system_calls import FAIL, SHORT, Interference
from dualform.errors import StoreError, StoreMissingError

SHORT_RUN = 6
"""How many steps are trained with a fault."""


@dataclass(frozen=True)
class Fault:
    """What happens to a call."""

    name: str
    action: int
    error: int = 0
    persistent: bool = False
    """Whether it also happens to all later calls."""


MAIN_FAULTS = (
    Fault("ENOSPC from then on", FAIL, errno.ENOSPC, persistent=True),
    Fault("EIO once", FAIL, errno.EIO),
)
"""A full disk and a failing one: these happen to every call."""
OTHER_FAULTS = (
    Fault("ENOSPC once", FAIL, errno.ENOSPC),
    Fault("half written, then ENOSPC", SHORT, errno.ENOSPC, persistent=True),
    Fault("EIO from then on", FAIL, errno.EIO, persistent=True),
    Fault("EINTR once", FAIL, errno.EINTR),
    Fault("half written once", SHORT),
    Fault("half written from then on", SHORT, persistent=True),
)


@dataclass(frozen=True)
class Scenario:
    """What is being done when a call fails."""

    kind: str
    begin: str = "record"
    on_write_error: str = "raise"

    def __str__(self) -> str:
        return f"{self.begin} {self.kind!r}, on_write_error={self.on_write_error!r}"


SCENARIOS = (
    Scenario("slots"),
    Scenario("slots and totals"),
    Scenario("totals only"),
    Scenario("words", on_write_error="stop"),
    Scenario("adamw", "resume"),
    Scenario("slots and totals", "resume"),
    Scenario("slots", "overwrite"),
)


class Campaign(Base):
    """Every call of every scenario with the main faults; after these, with the others."""

    name = "faults"
    unit = "faults"
    needs_system_calls = True

    def __init__(self, folder: Path):
        self._folder = folder
        self._references: dict[str, Reference] = {}
        self._others: dict[str, Reference] = {}
        self._before: dict[Scenario, Path] = {}
        """What is in the folder of a scenario before it begins."""
        main: list[tuple[Scenario, int, Fault]] = []
        others: list[tuple[Scenario, int, Fault]] = []
        for scenario in SCENARIOS:
            counted = Interference()
            self._prepare(scenario)
            forks.call(partial(_live, scenario, self._reference(scenario), self._run, Progress(), counted))
            calls = range(1, counted.calls + 1)
            main += [(scenario, call, fault) for call in calls for fault in MAIN_FAULTS]
            others += [(scenario, call, fault) for call in calls for fault in OTHER_FAULTS]
        random.Random(0).shuffle(main)
        random.Random(0).shuffle(others)
        self._cases = main + others
        self.goal = len(main)

    @property
    def _run(self) -> Path:
        return self._folder / "run"

    def run(self, draw: random.Random, number: int) -> Outcome:
        """One call that fails."""
        scenario, call, fault = self._cases[number % len(self._cases)]
        self._prepare(scenario)
        progress = Progress()
        interference = Interference(call, fault.action, error=fault.error, persistent=fault.persistent)
        outcome = Outcome()
        try:
            result = forks.call(
                partial(
                    _try, scenario, self._reference(scenario), self._other(scenario), self._run, progress, interference
                )
            )
        except forks.ChildError as error:
            where = f"{interference.kind} {Path(interference.path).name} during {progress.phase}"
            outcome.fail(f"{scenario}: {fault.name} at call {call}, {where}: {error}", self._run)
            result = "failed"
        outcome.counts["faults"] += 1
        outcome.counts[f"{fault.name}: {result}"] += 1
        outcome.counts[f"in {interference.kind}"] += 1
        return outcome

    def _prepare(self, scenario: Scenario) -> None:
        """The folder as the scenario finds it."""
        shutil.rmtree(self._run, ignore_errors=True)
        if scenario.begin == "record":
            return
        if scenario not in self._before:
            before = self._folder / f"before {len(self._before)}"
            if scenario.begin == "resume":
                forks.call(partial(_begin, self._reference(scenario), before))
            else:
                forks.call(partial(train, self._other(scenario), before))
            self._before[scenario] = before
        shutil.copytree(self._before[scenario], self._run)

    def _reference(self, scenario: Scenario) -> Reference:
        if scenario.kind not in self._references:
            self._references[scenario.kind] = reference(KINDS[scenario.kind], 0, self._folder / "reference")
        return self._references[scenario.kind]

    def _other(self, scenario: Scenario) -> Reference:
        """The training whose recording is overwritten."""
        if scenario.kind not in self._others:
            self._others[scenario.kind] = reference(KINDS[scenario.kind], 1, self._folder / "reference")
        return self._others[scenario.kind]


def _begin(expected: Reference, folder: Path) -> None:
    """A recording that stopped after three steps."""
    training = Training(expected.kind, expected.seed)
    with training.record(folder) as recorder:
        training.go_on(recorder, 3)


def _live(
    scenario: Scenario, expected: Reference, folder: Path, progress: Progress, interference: Interference
) -> None:
    """Record as users do; the interference may raise anything."""
    settings: dict[str, Any] = {"on_write_error": scenario.on_write_error}
    state = None
    if scenario.begin == "resume":
        at = resume_step(folder, expected.kind)
        state = expected.states[at]
        settings["resume"] = at
        progress.promised = at
    elif scenario.begin == "overwrite":
        settings["overwrite"] = True
    interference.begin(folder)
    progress.phase = scenario.begin
    training = Training(expected.kind, expected.seed, state)
    with training.record(folder, **settings) as recorder:
        progress.begun = True
        while training.done < SHORT_RUN:
            progress.phase = "training"
            training.step(recorder)
            progress.steps = training.done
            if training.done % 2 == 0:
                progress.phase = "seal"
                sealed = recorder.seal()
                if scenario.on_write_error == "raise":
                    progress.promised = sealed
        progress.phase = "close"
    if scenario.on_write_error == "raise":
        progress.promised = training.done
    if expected.kind.keeps_slots and not expected.kind.has_totals and scenario.on_write_error == "raise":
        progress.phase = "totals"
        dualform.build_totals(folder, "label")
    progress.phase = "ended"


def _try(
    scenario: Scenario,
    expected: Reference,
    other: Reference,
    folder: Path,
    progress: Progress,
    interference: Interference,
) -> str:
    """Record with a fault, then look at what is left and go on with it; says what became of the recording."""
    result = "went through"
    try:
        _live(scenario, expected, folder, progress, interference)
    except StoreError as error:
        _check_message(str(error), folder, interference)
        result = "StoreError"
    interference.stop()
    if result == "went through" and progress.phase != "ended":
        raise AssertionError(f"the recording ended during {progress.phase} without an error")
    left = [thread.name for thread in threading.enumerate() if thread.name == "dualform-writer"]
    if left:
        raise AssertionError("the writer's thread is still there")
    if interference.kind == "none":
        return "not reached"
    _go_on(scenario, expected, other, folder, progress)
    return result


def _check_message(message: str, folder: Path, interference: Interference) -> None:
    """An error of ours names the folder, the cause and a cure."""
    cause = os.strerror(interference.error)
    if str(folder) not in message or cause not in message:
        raise AssertionError(f"the message should name {folder} and {cause!r}: {message}")
    if message.count(". ") < 1:
        raise AssertionError(f"the message names no cure: {message}")


def _go_on(scenario: Scenario, expected: Reference, other: Reference, folder: Path, progress: Progress) -> None:
    """What is left must be right, and be gone on with."""
    if scenario.begin == "overwrite" and not progress.begun:
        try:
            left = dualform.open(folder).log
        except StoreMissingError:
            left = None
        if left is not None and left.height and left["seed"][0] == other.seed:
            check(folder, other, STEPS)
            train(expected, folder, overwrite=True)
            check(folder, expected, STEPS)
            return
    steps = check(folder, expected, progress.promised)
    if steps is None:
        train(expected, folder)
        check(folder, expected, STEPS)
    else:
        finish(folder, expected)
