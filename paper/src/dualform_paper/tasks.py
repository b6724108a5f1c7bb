"""The paper's image tasks: pixels as the network sees them, with their labels and names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dualform_paper import data
from dualform_paper.data import Pixels
from dualform_paper.settings import Settings


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
    mean, deviation = (0.0, 1.0) if settings.raw_pixels else _mean_and_deviation(train.pixels)
    few, fewer = settings.train_images, settings.test_images

    def seen(images: Pixels) -> Tensor:
        return torch.from_numpy(images.copy()).float().div_(255).sub_(mean).div_(deviation).flatten(1)

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


def _mean_and_deviation(pixels: Pixels) -> tuple[float, float]:
    """Of all pixels, from 0 to 1."""
    counts, values = np.bincount(pixels.reshape(-1), minlength=256), np.arange(256) / 255
    mean = float(counts @ values / counts.sum())
    return mean, float(np.sqrt(counts @ (values - mean) ** 2 / (counts.sum() - 1)))
