"""Training again on parts of the data: several at a time, kept in a folder, gone on with after an interruption."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from dualform.errors import QuestionError, StudyError
from dualform.evaluate.study import Study
from dualform.progress import Progress
from dualform.store.files import is_address

ABOUT = "retrained.json"
LONG = 5.0
"""Seconds. A training that takes longer is timed once; of a shorter one the second counts: the first may load data."""


class Job(NamedTuple):
    """One training: on these samples, (n,) ascending, with this seed."""

    ids: Tensor
    seed: int

    @property
    def name(self) -> str:
        """The name of the file that keeps its outcome."""
        return f"{xxhash.xxh3_64_hexdigest(self.ids.numpy().astype('<i8').tobytes(), self.seed)}.npy"


class Estimate(NamedTuple):
    """What is still to do."""

    trainings: int
    seconds: float


def trainings_folder(location: str, out: str | os.PathLike[str] | None) -> Path:
    """Return the folder that keeps the trainings: the one that the user names, or one beside the recording."""
    if out is None and is_address(location):
        raise QuestionError(
            f"{location} is an address: name a folder on this machine for the trainings, out=… or --out."
        )
    return Path(f"{location}-retrained") if out is None else Path(out)


@dataclass(frozen=True)
class Retrained:
    """The outcomes of trainings, (jobs, test examples), in a folder that belongs to one study."""

    study: Study
    folder: Path
    workers: int = 1
    """So many processes, with one thread each. 1: here, in this process."""

    def outcomes(self, jobs: Sequence[Job], progress: Progress | None = None) -> Tensor:
        """The study's target after each of the trainings, (jobs, examples) float64. Those in the folder are read."""
        self._claim()
        missing = self._missing(jobs)
        for done, _ in enumerate(self._trained(missing)):
            if progress is not None:
                progress("retraining", len(jobs) - len(missing) + done + 1, len(jobs))
        found = [torch.from_numpy(np.load(self.folder / job.name)) for job in jobs]
        return torch.stack(found) if found else torch.zeros(0, 0, dtype=torch.float64)

    def estimate(self, jobs: Sequence[Job]) -> Estimate:
        """How long the trainings that are not in the folder will take, from one or two of them, which are kept."""
        self._claim()
        missing = self._missing(jobs)
        done, seconds = 0, 0.0
        for job in missing[:2]:
            before = time.perf_counter()
            retrain(self.study, job, self.folder)
            done, seconds = done + 1, time.perf_counter() - before
            if seconds > LONG:
                break
        left = len(missing) - done
        return Estimate(left, left * seconds / min(self.workers, os.cpu_count() or 1))

    def _missing(self, jobs: Sequence[Job]) -> list[Job]:
        named = {job.name: job for job in jobs}
        return [job for name, job in named.items() if not (self.folder / name).exists()]

    def _trained(self, jobs: Sequence[Job]) -> Iterator[None]:
        if self.workers == 1:
            for job in jobs:
                retrain(self.study, job, self.folder)
                yield
        elif jobs:
            self._check_travels()
            with ProcessPoolExecutor(self.workers, get_context("spawn"), _begin, (self._pickled, self.folder)) as pool:
                waiting = [pool.submit(_retrain, job.ids.numpy(), job.seed) for job in jobs]
                try:
                    for one in as_completed(waiting):
                        one.result()
                        yield
                finally:
                    pool.shutdown(wait=True, cancel_futures=True)

    @cached_property
    def _pickled(self) -> bytes:
        return pickle.dumps(replace(self.study, samples=None))  # which no training needs

    def _check_travels(self) -> None:
        try:
            _ = self._pickled
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise StudyError(
                f"the study cannot be sent to other processes: {error}. Put its functions at the top of a module, or retrain "
                f"in this process with workers=1."
            ) from None

    def _claim(self) -> None:
        """Make the folder, or see that it holds trainings of this very study."""
        about = {"dualform": "retrained", "study": self._fingerprint}
        path = self.folder / ABOUT
        if path.exists():
            if json.loads(path.read_text()) != about:
                raise StudyError(
                    f"{self.folder} holds trainings of another study: its training function, model or test examples are not "
                    f"these. Give another folder, or delete it."
                )
            return
        if self.folder.exists() and any(self.folder.iterdir()):
            raise StudyError(
                f"{self.folder} holds something else. Give a folder for the trainings that is new or empty."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(about, indent=1))

    @cached_property
    def _fingerprint(self) -> str:
        """Changes with the architecture, the test examples, and the names and settings of the functions; not with their code."""
        names = f"{self.study.model} {_named(self.study.train)} {_named(self.study.target)}"
        digest = xxhash.xxh3_64(names.encode())
        for part in (self.study.inputs, _settings(self.study.train), _settings(self.study.target)):
            for value in _inside(part):
                array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
                digest.update(array.tobytes() if isinstance(array, np.ndarray) else repr(array).encode())
        return digest.hexdigest()


def retrain(study: Study, job: Job, folder: Path) -> None:
    """Train once and keep the outcome."""
    with torch.random.fork_rng(devices=[]):
        model = study.train(job.ids, job.seed)
    if not isinstance(model, nn.Module):
        raise StudyError(f"the study's train(ids, seed) gave {type(model).__name__}; expected the trained model.")
    part = folder / f".{job.name}.{os.getpid()}"
    with part.open("wb") as file:
        np.save(file, study.judge(model).numpy())
    part.replace(folder / job.name)


_STUDY: list[tuple[Study, Path]] = []
"""In a process that retrains: the study, sent once."""


def _begin(pickled: bytes, folder: Path) -> None:
    torch.set_num_threads(1)
    _STUDY[:] = [(pickle.loads(pickled), folder)]


def _retrain(ids: np.ndarray[Any, Any], seed: int) -> None:
    study, folder = _STUDY[0]
    retrain(study, Job(torch.from_numpy(ids), seed), folder)


def _named(function: Any) -> str:
    if isinstance(function, partial):
        return _named(function.func)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _settings(function: Any) -> list[Any]:
    """What a function brings along: its attributes or its object's, what it closes over, what a partial has set."""
    if isinstance(function, partial):
        return [function.args, function.keywords, *_settings(function.func)]
    owner = function.__self__ if isinstance(function, MethodType) else None
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [*(getattr(one, "__dict__", {}) for one in (function, owner)), cells]


Plain = Tensor | np.ndarray[Any, Any] | str | int | float | None


def _inside(value: Any) -> Iterator[Plain]:
    """The tensors, arrays and plain values that something is made of."""
    if isinstance(value, Mapping):
        for name in value:
            yield from _inside(value[name])
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _inside(one)
    elif value is None or isinstance(value, (Tensor, np.ndarray, str, int, float)):
        yield value
