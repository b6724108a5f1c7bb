"""What an uninterrupted training leaves behind: the truth that interrupted ones are compared with."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dualform
from campaigns import forks
from campaigns.contents import Contents, contents, differences, totals_differ
from campaigns.runs import STEPS, Kind, State, Training
from dualform.errors import StoreMissingError
from dualform.store.files import files_at
from dualform.store.reader import Store


@dataclass
class Reference:
    """An uninterrupted training of one kind and seed."""

    kind: Kind
    seed: int
    contents: Contents
    """Of the finished store, with a snapshot of every step."""
    states: list[State]
    """The checkpoint of each step."""
    totals: list[dict[str, Any]]
    """The totals after each step, if they are kept while recording."""


def reference(kind: Kind, seed: int, folder: Path) -> Reference:
    """Train twice in a child: as everybody does, and with a seal after each step. Both must leave the same slots."""
    return forks.call(lambda: _reference(kind, seed, folder))


def _reference(kind: Kind, seed: int, folder: Path) -> Reference:
    shutil.rmtree(folder, ignore_errors=True)
    plain = Training(kind, seed)
    with plain.record(folder / "plain") as recorder:
        while plain.done < STEPS:
            plain.step(recorder)
    whole = contents(Store(files_at(folder / "plain")))

    sealed = Training(kind, seed)
    states = [sealed.state()]
    snapshots = {}
    totals: list[dict[str, Any]] = [{}]
    with sealed.record(folder / "sealed") as recorder:
        snapshots.update(contents(Store(files_at(folder / "sealed"))).snapshots)
        while sealed.done < STEPS:
            sealed.step(recorder)
            recorder.seal()
            states.append(sealed.state())
            if not kind.keeps_slots:  # such a store has the first snapshot and the last one only
                snapshots.update(contents(Store(files_at(folder / "sealed"))).snapshots)
            if kind.has_totals:
                totals.append(contents(Store(files_at(folder / "sealed"))).totals)
    known = contents(Store(files_at(folder / "sealed")))
    known.snapshots.update(snapshots)
    said = differences(whole, known)
    if said or not known.end_step == whole.end_step == STEPS:
        raise AssertionError(f"{kind.name}: two uninterrupted trainings differ: {said}")
    shutil.rmtree(folder)
    return Reference(kind, seed, known, states, totals)


def check(folder: Path, expected: Reference, promised: int) -> int | None:
    """Compare a store with the first steps of an uninterrupted training; gives how many steps it holds, None for no store.

    promised: how many steps the last seal() that returned has promised.
    """
    try:
        dual = dualform.open(folder)
    except StoreMissingError:
        if promised:
            raise AssertionError(f"{promised} steps were sealed, and there is no store") from None
        return None
    said = []
    if dual.end_step < promised:
        said.append(f"{promised} steps were sealed, {dual.end_step} are left")
    found = contents(dual.store)
    said += differences(found, expected.contents)
    if expected.kind.has_totals and found.totals_step:
        said += totals_differ(found.totals, expected.totals[found.totals_step])
    if dual.end_step:
        certificate = dual.verify()
        if not certificate.passed:
            said.append(f"verify: {certificate}")
    if said:
        raise AssertionError("; ".join(said))
    return dual.end_step


def resume_step(folder: Path, kind: Kind) -> int:
    """The last step that a recording can be gone on with from; totals are those of one step."""
    manifest = Store(files_at(folder)).manifest
    if kind.has_totals:
        return manifest.totals.step if manifest.totals else 0
    return manifest.end_step


def finish(folder: Path, expected: Reference) -> None:
    """Go on with what a store holds, up to the end, and compare all of it with the uninterrupted training."""
    at = resume_step(folder, expected.kind)
    training = Training(expected.kind, expected.seed, expected.states[at])
    with training.record(folder, resume=at) as recorder:
        training.go_on(recorder)
    if check(folder, expected, STEPS) != STEPS:
        raise AssertionError("the resumed training is longer than the uninterrupted one")
