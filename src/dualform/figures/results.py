"""What a figure is given: plain numbers, computed elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Image = np.ndarray[Any, np.dtype[np.float32]]
"""(height, width), 0 is the ground."""


@dataclass(frozen=True)
class Source:
    """A training example that a layer attends to: the visit with the highest attention weight."""

    sample_id: int
    label: int
    step: int
    weight: float
    image: Image


@dataclass(frozen=True)
class LayerSources:
    """Where one layer looks: its top training examples, best first, and its attention summed by class."""

    layer: str
    top: tuple[Source, ...]
    totals: tuple[float, ...]


@dataclass(frozen=True)
class LogitSplit:
    """A logit of the last layer: initial part + one part for each class of the training examples."""

    unit: int
    initial: float
    parts: tuple[float, ...]
    logit: float
    """The model's own, computed without any recording."""

    @property
    def total(self) -> float:
        """What the parts add up to."""
        return self.initial + sum(self.parts)

    @property
    def remainder(self) -> float:
        """What they leave of the model's own logit: rounding."""
        return self.logit - self.total


@dataclass(frozen=True)
class Explained:
    """A test image, and where the answer to it comes from."""

    sample_id: int
    image: Image
    label: int
    answer: int
    layers: tuple[LayerSources, ...]
    splits: tuple[LogitSplit, ...]
    """Of the answer's logit and, where the answer is wrong, of the true class's."""

    @property
    def right(self) -> bool:
        """Whether the answer is the label."""
        return self.answer == self.label
