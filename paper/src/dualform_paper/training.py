"""Training as the paper, recorded."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import dualform
from dualform.progress import Progress
from dualform_paper.network import two_hidden
from dualform_paper.settings import CLASSES, Settings, completed
from dualform_paper.tasks import Task

FINISHED = "trained.json"
"""Written into a recording when its training is over; without it, a training begins anew."""
BARE_STEPS = 200
"""How many steps without a recorder are timed, to compare with."""
WARM_STEPS = 50
"""The first of them are slower, and are not counted."""


@dataclass(frozen=True)
class Trained:
    """A training that is over."""

    accuracies: tuple[dict[str, float], ...]
    """After each phase: the share of right answers on each dataset's test images."""
    seconds: float
    bare_seconds: float
    """What the same training would take without a recorder: some steps timed, and multiplied."""
    nbytes: int


def network(settings: Settings) -> nn.Sequential:
    """The paper's network: 784-800-800-10."""
    return two_hidden(784, settings.width, CLASSES, settings.seed)


def train(settings: Settings, tasks: Mapping[str, Task], folder: Path, progress: Progress) -> Trained:
    """Train and record into a folder; what is there already and finished is not trained again."""
    finished = folder / FINISHED
    if finished.exists():
        found = json.loads(finished.read_text())
        if completed(Settings, found.pop("settings")) == json.loads(json.dumps(settings.to_dict())):
            return Trained(**{**found, "accuracies": tuple(found["accuracies"])})
    bare = _bare_seconds(settings, tasks, progress)
    folder.parent.mkdir(parents=True, exist_ok=True)
    model, accuracies = network(settings), []
    optimizer = _optimizer(model, settings)
    began = time.perf_counter()
    with dualform.record(model, optimizer, folder, dtype="float16", overwrite=True) as recorder:
        for number, images, labels, ids, dataset in _batches(settings, tasks):
            recorder.batch(sample_id=ids, label=labels, dataset=dataset)
            recorder.log(loss=_step(model, optimizer, images, labels, settings))
            if number in (ends := _phase_ends(settings)):
                recorder.seal()  # so that the network of this moment is in the recording as it is
                accuracies.append({name: accuracy(model, task.test, task.test_labels) for name, task in tasks.items()})
            if number % 25 == 0 or number in ends:
                progress("training", number, settings.steps)
    seconds = time.perf_counter() - began
    trained = Trained(tuple(accuracies), seconds, bare, dualform.open(folder).info()["bytes"])
    finished.write_text(json.dumps({"settings": settings.to_dict(), **asdict(trained)}, indent=1))
    return trained


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of right answers."""
    return float((answers(model, images) == labels).double().mean())


def answers(model: nn.Module, images: Tensor) -> Tensor:
    """The class with the largest logit, for each image."""
    with torch.no_grad():
        found: Tensor = model(images).argmax(1)
        return found


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=settings.preset.lr, momentum=settings.preset.momentum)


def _step(model: nn.Module, optimizer: torch.optim.SGD, images: Tensor, labels: Tensor, settings: Settings) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    if settings.preset.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), settings.preset.clip)
    optimizer.step()
    return float(loss.detach())


def _phase_ends(settings: Settings) -> list[int]:
    return [sum(phase.steps for phase in settings.phases[: n + 1]) for n in range(len(settings.phases))]


def _batches(
    settings: Settings, tasks: Mapping[str, Task]
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, str | list[str]]]:
    """(updates after this one, images, labels, sample numbers in their dataset, their datasets), epoch after epoch."""
    generator = torch.Generator().manual_seed(settings.seed)
    number = 0
    for phase in settings.phases:
        mixed = [tasks[name] for name in phase.datasets]
        sizes = torch.tensor([len(task.train) for task in mixed])
        starts = torch.cumsum(sizes, 0) - sizes
        images = torch.cat([task.train for task in mixed]) if len(mixed) > 1 else mixed[0].train
        labels = torch.cat([task.train_labels for task in mixed])
        of = torch.repeat_interleave(torch.arange(len(mixed)), sizes)
        order = torch.empty(0, dtype=torch.long)
        for _ in range(phase.steps):
            if len(order) < min(settings.batch, len(images)):
                order = torch.randperm(len(images), generator=generator)
            ids, order = order[: settings.batch], order[settings.batch :]
            number += 1
            which = of[ids]
            named = phase.datasets[0] if len(mixed) == 1 else [phase.datasets[n] for n in which.tolist()]
            yield number, images[ids], labels[ids], ids - starts[which], named


def _bare_seconds(settings: Settings, tasks: Mapping[str, Task], progress: Progress) -> float:
    """Time some steps without a recorder."""
    model, times = network(settings), []
    optimizer = _optimizer(model, settings)
    count = min(BARE_STEPS, settings.steps)
    warm = min(WARM_STEPS, count // 2)
    progress("timing the bare training", 0, count)
    batches = _batches(settings, tasks)
    for number in range(count):
        began = time.perf_counter()
        _, images, labels, _, _ = next(batches)
        _step(model, optimizer, images, labels, settings)
        times.append(time.perf_counter() - began)
        if number % 25 == 24:
            progress("timing the bare training", number + 1, count)
    progress("timing the bare training", count, count)
    return math.fsum(times[warm:]) / (count - warm) * settings.steps
