"""A recording that a training framework begins, seals at checkpoints and ends: what all integrations share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import polars as pl
from torch import distributed, nn
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.query.dual import open as open_run
from dualform.record import Recorder, record
from dualform.record.choose import EXCLUDED
from dualform.store.files import files_at, folder_at
from dualform.store.format import read_manifest
from dualform.store.run import open_store
from dualform.store.samples import with_earlier, write_samples
from dualform.store.shards import is_run, read_run

GLOBAL_STEP = "global_step"
"""The framework's own count of steps, logged beside each recorded step: after a scaler's overflow it counts a step that never was."""


class ManagedRecording:
    """Records one training: from `begin`, when model and optimizer are ready, until the `with` block around the training is left."""

    def __init__(self, path: str | os.PathLike[str], options: Mapping[str, Any], samples: pl.DataFrame | None = None):
        """options: of dualform.record(). samples: what is to be kept of each sample, by its `sample_id`."""
        if "resume" in options:
            raise RecordingError("resume= follows from the checkpoint that training resumes from. Leave it out.")
        self.path = Path(path)
        self._options = dict(options)
        self._samples = samples
        self.recorder: Recorder | None = None
        """Only while training is recorded."""

    def began_from(self, initial: str) -> None:
        """Say what the weights are when recording begins, unless the user has."""
        self._options.setdefault("initial", initial)

    def begin(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        resume: int | bool = False,
        left_out: Mapping[str, str] | None = None,
    ) -> Recorder:
        """Start to record, or go on after a number of steps. left_out: layers that cannot be recorded, with reasons."""
        excluded = self._options.get("exclude", ())
        if isinstance(excluded, str):
            excluded = [excluded]
        if not isinstance(excluded, Mapping):
            excluded = dict.fromkeys(excluded, EXCLUDED)
        samples = self._samples
        if samples is not None and resume is not False:
            samples = with_earlier(samples, open_store(files_at(self.path)).samples())
        self.recorder = record(
            model,
            optimizers,
            self.path,
            **{**self._options, "exclude": {**excluded, **(left_out or {})}},
            resume=resume,
        )
        if samples is not None and _is_first_rank():
            files = folder_at(self.path)
            run = read_run(files).run if is_run(files) else read_manifest(files).run
            write_samples(files, run, samples)
        return self.recorder

    def batch(self, columns: Mapping[str, Any]) -> None:
        """Name the rows of the next forward pass, if training is recorded."""
        if self.recorder is not None:
            self.recorder.batch(**columns)

    def finish_step(self, global_step: int) -> None:
        """Keep the framework's count of steps beside the step that was just made."""
        if self.recorder is not None:
            self.recorder.log(**{GLOBAL_STEP: global_step})

    def seal(self) -> None:
        """Seal the recording where a checkpoint was saved, so that both can be resumed."""
        if self.recorder is not None:
            self.recorder.seal()

    def end(self) -> None:
        """Close the recording: training has ended."""
        self.__exit__(None, None, None)

    def steps_at(self, global_step: int) -> int | bool:
        """Return how many steps were recorded when a framework had counted `global_step`; False if it has not begun."""
        if global_step == 0:
            return False
        log = open_store(files_at(self.path)).log
        steps = log.filter(pl.col(GLOBAL_STEP) <= global_step)["step"].to_list() if GLOBAL_STEP in log.columns else []
        if not steps:
            raise RecordingError(
                f"{self.path} has no step {global_step} to go on from: another loop has recorded it, or it begins later. Record into a "
                f"folder of its own what follows a checkpoint that was not recorded."
            )
        return int(max(steps)) + 1

    def costs(self) -> dict[str, float]:
        """Return what a tracker may show: how many steps are recorded, and how many bytes of disk they take."""
        if self.recorder is None:
            return {}
        steps = self.recorder.step
        size = sum(map(_size_of, self.path.rglob("*")))
        return {"dualform/steps": float(steps), "dualform/bytes": float(size)}

    def gap(self) -> dict[str, float]:
        """Verify the recording, which is closed, and return the largest gap of a parameter for a tracker. With several ranks, on each of them."""
        if _ranks() > 1:
            distributed.barrier()  # until all have closed it
        # Optimizers that cannot be replayed have no gap
        largest = open_run(self.path).verify().frame["gap"].drop_nans().max()
        return {} if largest is None else {"dualform/gap": float(largest)}  # type: ignore[arg-type]

    def __enter__(self) -> ManagedRecording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.__exit__(kind, error, trace)


def _ranks() -> int:
    """How many processes train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _is_first_rank() -> bool:
    return _ranks() == 1 or distributed.get_rank() == 0


def _size_of(path: Path) -> int:
    """The size of a file; 0 for a folder, and for what has another name by now: chunks are published while this looks."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def refuse(setups: Mapping[str, bool]) -> None:
    """Refuse ways of training that spread a model or a batch over devices or processes. setups: whether each is in use, by name."""
    used = [name for name, is_used in setups.items() if is_used]
    if used:
        raise RecordingError(f"{' and '.join(used)}: not recorded yet. Train in one process on one device.")
