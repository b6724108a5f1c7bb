"""Going on with a recording from a training checkpoint."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.errors import RecordingError
from dualform.projection import SLACK
from dualform.record.choose import ChosenModule
from dualform.record.edits import COUNTED_AS, WatchedParameter
from dualform.record.parameters import RecordedParameter, roundoff
from dualform.record.passes import PendingPasses
from dualform.record.steps import StepBuilder
from dualform.store.collection import SETTING
from dualform.store.cut import manifest_until
from dualform.store.files import Files
from dualform.store.format import Grouping, Manifest
from dualform.store.reader import Store

LOAD_STATE = (
    "Save the optimizer's state with the model when you call recorder.seal(), and load both before record(…, resume=…): "
    "optimizer.load_state_dict(…)."
)


class EarlierRecording:
    """A recording that is gone on with. Nothing on disk is changed yet."""

    def __init__(self, files: Files, step: int | None):
        """step: where to go on; None: at its end."""
        self._location = files.location
        self._store = Store(files)
        self.manifest = _manifest_until(self._store, self._store.end_step if step is None else step)
        """As it was at that step."""

    @property
    def seed(self) -> int:
        """Of the audit's random matrices."""
        return int(self.manifest.settings["seed"])

    def sort(self, modules: list[ChosenModule]) -> None:
        """Bring modules into the order of the store, where layers that entered during training come last."""
        numbers = {layer.name: number for number, layer in enumerate(self.manifest.layers)}
        modules.sort(key=lambda chosen: numbers.get(chosen.layers[0].name, len(numbers)))

    def go_on(
        self, new: Manifest, passes: PendingPasses, steps: StepBuilder, groupings: Sequence[Grouping]
    ) -> Manifest:
        """Check that model and settings are those of the recording at that step. Returns the manifest to go on with."""
        earlier = self.manifest
        for name in ("keep", "every", "dtype", "layers", "parameters", "base"):
            self._compare_setting(name, getattr(earlier, name), getattr(new, name))
        Checkpoint(self._store, earlier).compare(steps)
        steps.first_row = _next_row(earlier)
        for module in passes.modules:
            module.called = any(self._has_slots(layer.number) for layer in module.layers)
        # A collection may have further checkpoints now
        collected = {name: text for name, text in new.settings.items() if name == SETTING}
        return replace(
            earlier,
            created_by=new.created_by,
            left_out=new.left_out,
            batch_axis=new.batch_axis,
            settings={**earlier.settings, **collected},
            totals=earlier.totals if groupings else None,
        )

    def totals(self, groupings: Sequence[Grouping]) -> Store | None:
        """The store with the totals to go on with, if any are wanted and there are."""
        earlier = self.manifest
        if not groupings:
            if earlier.keep == "totals":
                raise RecordingError(f"resume: {self._location} keeps totals; say the same totals= again.")
            return None
        if earlier.totals is None and earlier.end_step == 0:
            return None
        if earlier.totals is None or earlier.totals.groupings != tuple(groupings):
            raise RecordingError(
                f"resume: the totals in {self._location} are of another step or of other columns, so they cannot be carried on. Resume "
                f"without totals= and build them afterwards: dualform totals RUN --by COLUMN."
            )
        return self._store

    def _compare_setting(self, name: str, earlier: object, now: object) -> None:
        if earlier != now:
            raise RecordingError(
                f"resume: the recording in {self._location} has other {name} than this model and these settings: "
                f"{_shortened(earlier)} instead of {_shortened(now)}."
            )

    def _has_slots(self, layer: int) -> bool:
        """Whether a layer was called before."""
        earlier = self.manifest
        if earlier.keep != "totals":
            return any(chunk.slots[layer] for chunk in earlier.chunks)
        return earlier.totals is not None and any(name.endswith(f".{layer}.visits") for name in self._store.totals())


def _manifest_until(store: Store, step: int) -> Manifest:
    """The manifest of a recording, cut at a step."""
    manifest = store.manifest
    location = store.location
    if manifest.keep == "totals" and step != store.end_step:
        raise RecordingError(
            f"resume={step}: {location} keeps totals only, as they were after step {store.end_step}: go on from there."
        )
    if not 0 <= step <= store.end_step:
        raise RecordingError(
            f"resume={step}: the recording in {location} is sealed up to step {store.end_step}. Go on from an earlier "
            f"checkpoint, or record into a new folder."
        )
    return manifest_until(store, step)


def _next_row(manifest: Manifest) -> int:
    """The number of the first row after those that are recorded."""
    if manifest.keep == "totals" and manifest.totals is not None:
        return manifest.totals.rows
    if not manifest.chunks:
        return 0
    last = manifest.chunks[-1]
    return last.first_row + last.rows


class Checkpoint:
    """What a recording knows of weights and optimizer state at the step that is gone on from."""

    def __init__(self, store: Store, before: Manifest):
        self._location, self._keep, self._step = store.location, before.keep, before.end_step
        self._updates = store.updates.filter(pl.col("step") < self._step)
        self._snapshot_step = max(snapshot.step for snapshot in before.snapshots)
        self._snapshot = store.snapshot(self._snapshot_step)
        self._is_inexact = bool(before.inexact)
        """Whether something else than the optimizer has moved weights."""
        self._without_buffer: list[str] = []
        """Parameters whose momentum begins afresh."""
        self._with_buffer: list[str] = []

    def compare(self, steps: StepBuilder) -> None:
        """Refuse a model and optimizers that are not what they were at that step."""
        for watched in steps.watch.parameters():
            mine = self._updates.filter(pl.col("parameter") == watched.parameter.number)
            since_snapshot = mine.filter(pl.col("step") >= self._snapshot_step)
            self._compare_fingerprint(watched.parameter, mine)
            if not since_snapshot.height:
                self._compare_weights(watched.parameter)
            if self._keep == "keys":
                continue  # nothing that is stored depends on the optimizer
            self._compare_kind(watched, mine)
            self._compare_counters(watched, mine, since_snapshot)
            if not since_snapshot.height:
                self._compare_state(watched)
            elif watched.is_elementwise:
                if not watched.tensors:
                    self._refuse_missing(watched, list(watched.names))
            else:
                self._compare_momentum(watched, since_snapshot)
        if self._without_buffer and self._with_buffer:
            raise RecordingError(
                f"resume: the optimizer has no momentum_buffer for {', '.join(map(repr, self._without_buffer))}, and has one for "
                f"{', '.join(map(repr, self._with_buffer))}. {LOAD_STATE}"
            )
        if self._without_buffer:
            warnings.warn(
                f"resume: the optimizer has no momentum, and the recording in {self._location} had some after step {self._step}. It "
                f"begins afresh, as the optimizer of a second phase does. If it is to go on: {LOAD_STATE}",
                stacklevel=4,
            )

    def _compare_fingerprint(self, parameter: RecordedParameter, mine: pl.DataFrame) -> None:
        """After each step, one number of each parameter is stored."""
        known = mine.filter(pl.col("after").is_not_null())
        if not known.height:
            return
        bound = SLACK * roundoff(parameter.tensor) * np.sqrt(parameter.tensor.numel()) * parameter.size
        if not abs(parameter.fingerprint - float(known["after"][-1])) <= bound:
            self._refuse_weights(parameter)

    def _compare_weights(self, parameter: RecordedParameter) -> None:
        if not _is_same(self._snapshot[f"model.{parameter.name}"], parameter.tensor):
            self._refuse_weights(parameter)

    def _refuse_weights(self, parameter: RecordedParameter) -> None:
        raise RecordingError(
            f"resume: {parameter.name!r} is not what the recording in {self._location} says it was after step {self._step}. Load the "
            f"checkpoint of that step into the model (and its optimizer) first, or say which step it is: resume=n."
        )

    def _compare_kind(self, watched: WatchedParameter, mine: pl.DataFrame) -> None:
        before = mine["optimizer"][-1] if mine.height else watched.kind
        if before != watched.kind:
            raise RecordingError(
                f"resume: {watched.parameter.name!r} was trained by an optimizer of the kind {before!r} in {self._location} and is now given "
                f"to one of the kind {watched.kind!r}. A dual form holds for one kind: record this phase into another folder."
            )

    def _compare_counters(self, watched: WatchedParameter, mine: pl.DataFrame, since_snapshot: pl.DataFrame) -> None:
        """How many updates the optimizer has counted: Adam and its relatives correct their averages by it."""
        for name, now in watched.counters.items():
            stored = f"state.{watched.parameter.name}.{name}"
            at_snapshot = float(self._snapshot[stored]) if stored in self._snapshot else None
            recorded = COUNTED_AS[name]
            if recorded in mine.columns and mine.height and mine[recorded][-1] is not None:
                known = float(mine[recorded][-1])
            elif name == "step" and since_snapshot.height:
                # RMSprop and Adadelta count updates without using the count, so it is not among the recorded numbers
                known = (at_snapshot or 0.0) + since_snapshot.height
            elif at_snapshot is not None:
                known = at_snapshot
            else:
                continue
            if not math.isclose(now, known, rel_tol=1e-6):
                raise RecordingError(
                    f"resume: the optimizer's {name} of {watched.parameter.name!r} is {now:g}, and {known:g} after step {self._step} in "
                    f"{self._location}. {LOAD_STATE}"
                )

    def _compare_momentum(self, watched: WatchedParameter, since_snapshot: pl.DataFrame) -> None:
        """Between snapshots, what SGD's momentum was can be told from how the weights moved."""
        last = since_snapshot.row(-1, named=True)
        if not last.get("momentum"):  # an optimizer that cannot be replayed has no settings
            return
        momentum = watched.tensors.get("momentum_buffer")
        if momentum is None:
            self._without_buffer.append(watched.parameter.name)
            return
        self._with_buffer.append(watched.parameter.name)
        known = self._momentum_fingerprint(watched.parameter, since_snapshot)
        if known is None:
            return
        fingerprint, bound = known
        now = watched.parameter.projection.fingerprint(watched.parameter.project(momentum))
        if not abs(now - fingerprint) <= bound:
            self._refuse_state(watched, "momentum_buffer")

    def _momentum_fingerprint(
        self, parameter: RecordedParameter, since_snapshot: pl.DataFrame
    ) -> tuple[float, float] | None:
        """The fingerprint of SGD's momentum after the last update, and how far rounding may have moved it.

        SGD moves weights by lr · momentum, or by lr · (gradient + μ · momentum) with Nesterov's, so fingerprints of weights tell
        that of the momentum. None: they do not, because there is none after some update, or because lr was 0.
        """
        if self._is_inexact or since_snapshot["after"].null_count() or not (since_snapshot["lr"] > 0).all():
            return None
        projection = parameter.projection
        weight = projection.fingerprint(projection.project(self._snapshot[f"model.{parameter.name}"]))
        stored = f"state.{parameter.name}.momentum_buffer"
        momentum = (
            projection.fingerprint(projection.project(self._snapshot[stored])) if stored in self._snapshot else 0.0
        )
        rounding = SLACK * roundoff(parameter.tensor) * np.sqrt(parameter.tensor.numel()) * parameter.size
        error = 0.0
        for update in since_snapshot.iter_rows(named=True):
            moved = (weight - update["after"]) / update["lr"]
            weight = update["after"]
            error = max(error, rounding / update["lr"])
            mu = update["momentum"]
            if not update["nesterov"]:
                momentum = moved
            elif update["fresh"]:
                momentum = moved / (1 + mu)
            else:
                undamped = 1 - update["dampening"]
                momentum = (mu * momentum + undamped * moved) / (1 + undamped * mu)
        return momentum, error

    def _compare_state(self, watched: WatchedParameter) -> None:
        """Every tensor of the optimizer, both ways."""
        prefix = f"state.{watched.parameter.name}."
        every = {name.removeprefix(prefix) for name in self._snapshot if name.startswith(prefix)}
        known = every - set(COUNTED_AS)
        missing, added = sorted(known - set(watched.tensors)), sorted(set(watched.tensors) - known)
        if missing and not added and not watched.is_elementwise:
            self._without_buffer.append(watched.parameter.name)
            return
        if missing:
            self._refuse_missing(watched, missing)
        if added:
            raise RecordingError(
                f"resume: the optimizer has {', '.join(added)} for {watched.parameter.name!r}, which the recording in {self._location} did "
                f"not have after step {self._step}. {LOAD_STATE}"
            )
        for name, value in watched.tensors.items():
            if not _is_same(self._snapshot[prefix + name], value):
                self._refuse_state(watched, name)
        if known:
            self._with_buffer.append(watched.parameter.name)

    def _refuse_state(self, watched: WatchedParameter, name: str) -> None:
        raise RecordingError(
            f"resume: the optimizer's {name} of {watched.parameter.name!r} is not what it was after step {self._step} in "
            f"{self._location}. {LOAD_STATE}"
        )

    def _refuse_missing(self, watched: WatchedParameter, missing: list[str]) -> None:
        raise RecordingError(
            f"resume: the optimizer has no {', '.join(missing)} for {watched.parameter.name!r}, which it had after step {self._step} in "
            f"{self._location}: it is a new one, or its state was not loaded. {LOAD_STATE}"
        )


def _is_same(known: Tensor, value: Tensor) -> bool:
    """Whether two tensors are the same, up to the rounding of the coarser of their types."""
    if known.shape != value.shape:
        return False
    unit = max(torch.finfo(one.dtype).eps for one in (known, value))
    now = value.detach().cpu().double()
    return torch.allclose(now, known.double(), rtol=unit, atol=torch.finfo(torch.float32).tiny, equal_nan=True)


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) < 200 else text[:200] + "…"
