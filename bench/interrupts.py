"""Interrupt a recording at every line of dualform's own code, and check what is left.

    python bench/interrupts.py                       # each line of code once: hours
    python bench/interrupts.py --times 0             # each line as often as it is executed: days
    python bench/interrupts.py --scenario totals --kind signal --part 1/20 --seed 3

A dry run lists the lines that are executed in dualform's files (`sys.settrace`). Trial number k then raises a KeyboardInterrupt at the
k-th of them. Kinds of interrupts:

- "exception": the trace function raises it, as anything may that raises an exception from outside (`PyThreadState_SetAsyncExc`)
- "signal": SIGINT is sent, as Ctrl-C does
- "twice", "signals": the same, and once more while the recorder closes

The disk is slow: each write and each flush takes a while. After each trial: the folder is unlocked, the writer's thread is gone, the
hooks are gone, Ctrl-C works as before, the store opens and ends with the last finished step, each update is there once, totals are those
of the slots, no snapshot lies beyond the end, and `verify` passes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import DualformError, RecordingError
from dualform.record import finished
from dualform.store import files
from dualform.store.files import files_at
from dualform.store.format import MANIFEST
from dualform.store.reader import Store

PACKAGE = str(Path(dualform.__file__).parent)
STEPS = 5
SEALED_AT = 3
"""After this step, recorder.seal() is called."""
KINDS = ("exception", "signal", "twice", "signals")


def _sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)]


def _adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=0.01)]


def _two(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, second = model.get_submodule("0"), model.get_submodule("2")
    return [torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(second.parameters(), lr=0.01)]


@dataclass(frozen=True)
class Scenario:
    """How a training is recorded."""

    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]]
    settings: dict[str, Any] = field(default_factory=dict)
    resume: bool = False
    """Whether the recording is closed and resumed in the middle."""


SCENARIOS = {
    "slots": Scenario(_sgd),
    "totals": Scenario(_sgd, {"totals": ["label"]}),
    "adam totals": Scenario(_adam, {"totals": ["label"], "dtype": "float64", "curvature": True}),
    "two optimizers": Scenario(_two),
    "resume": Scenario(_adam, resume=True),
    "totals alone": Scenario(_sgd, {"totals": ["label"], "keep": "totals"}),
}


class Training:
    """A short training: what has happened so far."""

    def __init__(self, scenario: Scenario, folder: Path):
        self.scenario, self.folder = scenario, folder
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
            self.inputs = torch.randn(12, 6)
        self.labels = torch.arange(12) % 3
        self.optimizers = scenario.optimizers(self.model)
        self.recorder: dualform.Recorder | None = None
        self._threads = set(threading.enumerate())
        self.begun = 0
        """How many steps have begun."""
        self.finished = 0
        """After how many of them the last optimizer.step() has returned."""
        self.sealed = 0
        """What recorder.seal() has returned."""

    def run(self, on_close: Callable[[], None] = lambda: None) -> None:
        """Train and record. on_close: called when the recorder is about to be closed."""
        halves = (0, STEPS // 2, STEPS) if self.scenario.resume else (0, STEPS)
        for begin, end in pairwise(halves):
            # As a with statement does, but with something in between
            self.recorder = dualform.record(
                self.model, self.optimizers, self.folder, chunk_bytes=1500, resume=begin > 0, **self.scenario.settings
            )
            try:
                for step in range(begin, end):
                    self._step(self.recorder, step)
            except BaseException as error:
                on_close()
                self.recorder.__exit__(type(error), error, error.__traceback__)
                raise
            on_close()
            self.recorder.__exit__(None, None, None)

    def writers(self) -> list[threading.Thread]:
        """The background threads of its recorders that are still there."""
        every = set(threading.enumerate()) - self._threads
        return [thread for thread in every if thread.name == "dualform-writer"]

    def _step(self, recorder: dualform.Recorder, step: int) -> None:
        ids = (torch.arange(4) + 3 * step) % 12
        recorder.batch(sample_id=ids, label=self.labels[ids])
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.inputs[ids]), self.labels[ids])
        loss.backward()  # type: ignore[no-untyped-call]
        self.begun = step + 1
        for optimizer in self.optimizers:
            optimizer.step()
        self.finished = step + 1
        recorder.log(loss=loss.item())
        if step + 1 == SEALED_AT:
            self.sealed = recorder.seal()


class Interrupter:
    """A trace function that interrupts at the k-th line of dualform's own code, in this thread."""

    def __init__(self, at: int, by_signal: bool):
        """at: 0 only counts."""
        self._at, self._by_signal = at, by_signal
        self.places: list[tuple[str, int]] = []
        """The file and line of each line that was executed."""
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        """A function is called."""
        is_ours = frame.f_code.co_filename.startswith(PACKAGE)
        return self._line if is_ours and not _is_finalizer(frame) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        # The end of a with statement is a line event, too, but nothing in Python can raise an exception there
        if event == "line" and not _leaves_a_with_block(frame):
            self.places.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.places) == self._at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                if not self._by_signal:
                    raise KeyboardInterrupt
                signal.raise_signal(signal.SIGINT)
        return self._line


def _is_finalizer(frame: FrameType | None) -> bool:
    """Whether this runs within `__del__`, where Python prints exceptions and ignores them."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _leaves_a_with_block(frame: FrameType) -> bool:
    """Whether the next instruction calls __exit__ without an exception: LOAD_CONST None three times, and a call."""
    code = frame.f_code.co_code
    load_nothing = code[frame.f_lasti : frame.f_lasti + 2]
    three_times = code[frame.f_lasti : frame.f_lasti + 6] == load_nothing * 3
    return three_times and load_nothing[:1] == bytes([_LOAD_CONST]) and frame.f_code.co_consts[load_nothing[1]] is None


def _load_const() -> int:
    import opcode

    return opcode.opmap["LOAD_CONST"]


_LOAD_CONST = _load_const()


@contextlib.contextmanager
def slow_disk(seconds: float) -> Iterator[None]:
    """Each write and each flush takes a while."""
    flush, write = os.fsync, files.write_pieces

    def slow_flush(descriptor: int) -> None:
        time.sleep(seconds)
        flush(descriptor)

    def slow_write(descriptor: int, pieces: list[memoryview]) -> int:
        time.sleep(seconds)
        return write(descriptor, pieces)

    with mock.patch.object(os, "fsync", slow_flush), mock.patch.object(files, "write_pieces", slow_write):
        yield


@contextlib.contextmanager
def small_stretches() -> Iterator[None]:
    """Totals are folded and snapshots taken several times in a short training."""
    with (
        mock.patch.object(finished, "STRETCH_BYTES", 1500),
        mock.patch.object(finished, "SNAPSHOT_SHARE", 0),
        mock.patch.object(finished, "SNAPSHOT_CHUNKS", 2),
    ):
        yield


@dataclass(frozen=True)
class Lines:
    """What is executed in a training that nothing interrupts."""

    places: list[tuple[str, int]]
    closing: int
    """How many of them are executed while the recorder closes."""

    def chosen(self, times: int, seed: int) -> list[int]:
        """The numbers of some executed lines, from 1 on: each line of code that many times, if it is executed as often. 0: all."""
        executed: dict[tuple[str, int], list[int]] = {}
        for number, place in enumerate(self.places, 1):
            executed.setdefault(place, []).append(number)
        chance = random.Random(seed)
        some = [
            number
            for numbers in executed.values()
            for number in (numbers if not times else chance.sample(numbers, min(times, len(numbers))))
        ]
        chance.shuffle(some)
        return some


@lru_cache
def executed_lines(scenario: str) -> Lines:
    """Run a training without an interrupt."""
    _trace(SCENARIOS[scenario])  # what is loaded lazily is loaded before lines are counted
    return _trace(SCENARIOS[scenario])


def _trace(scenario: Scenario) -> Lines:
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        training, tracer, before = Training(scenario, Path(folder) / "run"), Interrupter(0, False), 0

        def on_close() -> None:
            nonlocal before
            before = len(tracer.places)

        sys.settrace(tracer)
        try:
            training.run(on_close)
        finally:
            sys.settrace(None)
        return Lines(tracer.places, len(tracer.places) - before)


def trial(scenario: Scenario, kind: str, at: int, then_at: int = 0, seconds: float = 0.001) -> str:
    """Interrupt a training at a line, check what is left, and return a word for it.

    then_at: of kinds that interrupt twice, the line after the beginning of the closing at which the second interrupt comes. seconds: how
    long the disk takes for a write.
    """
    by_signal, twice = kind in ("signal", "signals"), kind in ("twice", "signals")
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        training = Training(scenario, Path(folder) / "run")
        first, second = Interrupter(at, by_signal), Interrupter(then_at, by_signal)

        def on_close() -> None:
            if twice and first.where:
                sys.settrace(second)

        interrupted = False
        with slow_disk(seconds):
            sys.settrace(first)
            try:
                training.run(on_close)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                sys.settrace(None)
        try:
            assert not first.where or interrupted, "the interrupt was swallowed"
            return _check(training, by_signal)
        except (AssertionError, DualformError) as error:
            where = f"{first.where}{f', then {second.where}' if second.where else ''}"
            raise AssertionError(f"{kind} at {at} ({where}), {then_at}: {error}") from error


def _check(training: Training, by_signal: bool) -> str:
    """What must hold after an interrupt."""
    outcome = "closed"
    if training.recorder is not None and training.writers():
        # The exception came before the first line of __exit__: Python itself cannot keep it away from there
        outcome = "closed again"
        with contextlib.suppress(RecordingError):  # it says so if totals were given up
            training.recorder.close()
    training.recorder = None
    gc.collect()
    assert _is_interruptible(), "Ctrl-C is still held back"
    assert not training.writers(), "the writer's thread is still there"
    assert not _hooks(training), f"hooks are left: {_hooks(training)}"
    if (training.folder / MANIFEST).exists():
        outcome = f"{outcome}, {_check_store(training, by_signal)}"
    else:
        assert training.begun == 0, "there is no store"
        outcome = f"{outcome}, nothing was begun"
    _check_goes_on(training)
    return outcome


def _is_interruptible() -> bool:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return False


def _hooks(training: Training) -> list[str]:
    """What still has a hook."""
    modules = dict(training.model.named_modules())
    parameters = dict(training.model.named_parameters())
    return [
        *[f"module {name!r}" for name, one in modules.items() if one._forward_hooks or one._forward_pre_hooks],
        *[name for name, one in parameters.items() if one._post_accumulate_grad_hooks],
        *[str(one) for one in training.optimizers if one._optimizer_step_pre_hooks or one._optimizer_step_post_hooks],
    ]


def _check_store(training: Training, by_signal: bool) -> str:
    store = Store(files_at(training.folder))
    end = store.end_step
    alone = store.manifest.keep == "totals"
    most = max(training.finished, training.begun)
    if alone and (training.sealed or not by_signal):
        # Totals alone are those of one step, with its weights. An exception leaves them at the last seal(); one that spoils the
        # sums, which Ctrl-C cannot, leaves them at the last snapshot
        assert training.sealed <= end <= most, f"{end} steps, {training.sealed} were sealed"
        assert end in store.snapshot_steps()
    else:
        assert training.finished <= end <= most, f"{end} steps, {training.finished} of {training.begun} were finished"
    beyond = [snapshot.step for snapshot in store.manifest.snapshots if snapshot.step > end]
    assert not beyond, f"snapshots {beyond} lie beyond the end, {end}"
    if not alone:
        _check_tables(store, training.finished)
        _check_totals(store, must_be_there=by_signal)
    if end:
        certificate = dualform.open(training.folder).verify()
        assert certificate.passed, str(certificate)
        assert certificate.step == end
    last = "the last weights" if end in store.snapshot_steps() else "no last weights"
    if by_signal and end:
        assert last == "the last weights", "Ctrl-C left no snapshot"
    return last


def _check_tables(store: Store, finished: int) -> None:
    end = store.end_step
    assert store.log["step"].to_list() == list(range(end))
    assert store.rows["step"].to_list() == [step for step in range(end) for _ in range(4)]
    once = store.updates.select("step", "parameter").unique().height
    assert once == store.updates.height, f"{store.updates.height} updates, {once} different ones"
    assert store.updates["step"].unique().sort().to_list() == list(range(end))
    for layer in store.manifest.layers:
        number = store.parameter(layer.parameters[0])
        updates = store.updates.filter(parameter=number).height
        # An interrupt may have come between the updates of two optimizers in one step
        assert finished <= updates <= end, f"layer {layer.name!r} has {updates} updates after {end} steps"
        slots = sum(len(chunk.keys(torch.float32)) for chunk in store.chunks(layer.name))
        assert slots == 4 * updates, f"layer {layer.name!r} has {slots} slots after {updates} updates"


def _check_totals(store: Store, *, must_be_there: bool) -> None:
    """Totals that were kept are those that are built from the slots."""
    totals, end = store.manifest.totals, store.end_step
    if totals is None or totals.step != end or not end:
        assert not (must_be_there and end and totals), f"totals after step {totals and totals.step}, not {end}"
        return
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(store.location, copy)
        dualform.build_totals(copy, "label")
        built = Store(files_at(copy))
        assert store.groups(0).equals(built.groups(0))
        names = sorted(name for name in built.totals() if name[0].isdigit())
        assert names == sorted(name for name in store.totals() if name[0].isdigit())
        for name in names:
            if ".average" in name:
                continue  # what is built at the end leaves out what the running average has forgotten
            kept, expected = store.totals()[name].double(), built.totals()[name].double()
            assert torch.allclose(kept, expected, rtol=1e-4, atol=1e-5), f"totals {name}: {kept} instead of {expected}"


def _check_goes_on(training: Training) -> None:
    """The folder can be resumed and overwritten."""
    again = Training(training.scenario, training.folder)
    settings = again.scenario.settings
    if (training.folder / MANIFEST).exists() and not training.scenario.resume:
        with contextlib.suppress(RecordingError):  # the weights may be those of a step that is not in the store
            dualform.record(training.model, training.optimizers, training.folder, resume=True, **settings).close()
    recorder = dualform.record(again.model, again.optimizers, again.folder, overwrite=True, **settings)
    with recorder:
        again._step(recorder, 0)
    assert Store(files_at(again.folder)).end_step == 1


def _memory() -> str | None:
    """A RAM disk, if there is one: real flushes would take most of the time."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def campaign(
    scenario: str,
    kind: str,
    *,
    times: int = 1,
    seed: int = 0,
    part: tuple[int, int] = (1, 1),
    seconds: float = 0.001,
) -> Counter[str]:
    """Interrupt at many lines; return how often each outcome was seen. Raises AssertionError at the first that must not be.

    times: how often at each line of code (0: whenever it is executed). part: (2, 5) is the second fifth of all trials. seconds: how
    long a write takes. The second interrupt of kinds that have one comes at a random line of the closing.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
    chosen, chance = SCENARIOS[scenario], random.Random(seed)
    outcomes: Counter[str] = Counter()
    with warnings.catch_warnings(), small_stretches():
        warnings.simplefilter("ignore")
        lines = executed_lines(scenario)
        number, parts = part
        for at in lines.chosen(times, seed)[number - 1 :: parts]:
            outcomes[trial(chosen, kind, at, chance.randint(1, lines.closing), seconds)] += 1
    return outcomes


def _part(text: str) -> tuple[int, int]:
    number, parts = map(int, text.split("/"))
    return number, parts


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=SCENARIOS, help="default: all")
    parser.add_argument("--kind", choices=KINDS, help="default: all")
    parser.add_argument(
        "--times", type=int, default=1, help="how often at each line of code; 0: whenever it is executed"
    )
    parser.add_argument("--seed", type=int, default=0, help="which of the times that a line is executed")
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="N/M", help="only the N-th of M parts of all trials"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for scenario in [asked.scenario] if asked.scenario else SCENARIOS:
        for kind in [asked.kind] if asked.kind else KINDS:
            began = time.monotonic()
            outcomes = campaign(scenario, kind, times=asked.times, seed=asked.seed, part=asked.part)
            took = time.monotonic() - began
            print(f"{scenario}, {kind}: {outcomes.total()} interrupts, {dict(outcomes)}, {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
