"""The paper's image tasks: pixels as the network sees them, with their labels and names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dualform import data
from dualform.data import Pixels
from dualform.paper.settings import Settings


@dataclass(frozen=True)
class Task:
    """One dataset: images (n, 784) as the network sees them, labels (n,), pixels (n, 28, 28) to be shown."""

    name: str
    classes: tuple[str, ...]
    train: Tensor
    train_labels: Tensor
    train_pixels: Pixels
    test: Tensor
    test_labels: Tensor
    test_pixels: Pixels


def load(settings: Settings, folder: Path | None = None) -> dict[str, Task]:
    """The tasks of an experiment by name."""
    return {name: _task(name, settings, folder) for name in settings.datasets}


def _task(name: str, settings: Settings, folder: Path | None) -> Task:
    train, test = (data.images(name, part, folder) for part in ("train", "test"))
    pixels = torch.from_numpy(train.pixels.copy()).float() / 255
    mean, deviation = (0.0, 1.0) if settings.raw_pixels else (float(pixels.mean()), float(pixels.std()))
    few, fewer = settings.train_images, settings.test_images

    def seen(images: Pixels) -> Tensor:
        return ((torch.from_numpy(images.copy()).float() / 255 - mean) / deviation).flatten(1)

    return Task(
        name,
        data.SOURCES[name].classes,
        seen(train.pixels[:few]),
        torch.from_numpy(train.labels[:few]),
        train.pixels[:few],
        seen(test.pixels[:fewer]),
        torch.from_numpy(test.labels[:fewer]),
        test.pixels[:fewer],
    )
