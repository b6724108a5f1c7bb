"""What the paper's figures are given: plain numbers, computed elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dualform.figures.results import Image

Numbers = np.ndarray[Any, np.dtype[Any]]
"""(n,)"""


@dataclass(frozen=True)
class Group:
    """A class of a dataset: ("mnist", 6, "6"), ("fashion-mnist", 9, "ankle boot")."""

    dataset: str
    label: int
    name: str


@dataclass(frozen=True)
class LayerCurves:
    """The highest attention weights of a layer for each class, in descending order."""

    layer: str
    groups: tuple[Group, ...]
    weights: tuple[Numbers, ...]


@dataclass(frozen=True)
class LayerTotals:
    """What a layer's attention weights add up to for each class."""

    layer: str
    groups: tuple[Group, ...]
    totals: tuple[float, ...]
    absolute: bool
    """Whether sizes were summed."""


@dataclass(frozen=True)
class Match:
    """A training example that a layer attends to: at one step, or summed over its visits."""

    dataset: str
    label: int
    name: str
    sample_id: int
    step: int
    visits: int
    weight: float
    image: Image


@dataclass(frozen=True)
class LayerMatches:
    """Whom a layer attends to most, best first: single slots, and distinct images with all their slots."""

    layer: str
    by_slot: tuple[Match, ...]
    by_image: tuple[Match, ...]


@dataclass(frozen=True)
class Input:
    """A test example that is asked about."""

    image: Image
    name: str
    dataset: str
    label: int
    answer: str
    """The name of the class that the model answers."""
    caption: str

    @property
    def right(self) -> bool:
        """Whether the answer is the class."""
        return self.answer == self.name


@dataclass(frozen=True)
class Series:
    """Bars of one colour, one for each group."""

    name: str
    values: tuple[float, ...]
    errors: tuple[float, ...] | None = None
    label: int | None = None
    """The class that it shows, if any: it then has the class's colour."""


@dataclass(frozen=True)
class Bars:
    """A panel of bars side by side."""

    title: str
    groups: tuple[str, ...]
    series: tuple[Series, ...]
    unit: str
    """What the values are: "accuracy (%)"."""


@dataclass(frozen=True)
class Line:
    """A line, and the band between low and high."""

    name: str
    x: Numbers
    y: Numbers
    low: Numbers | None = None
    high: Numbers | None = None
    label: int | None = None
    """The class that it shows, if any: it then has the class's colour."""
    reference: bool = False
    """Whether others are compared with it, as with chance: it then stands back."""


@dataclass(frozen=True)
class Lines:
    """A panel of lines."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Spot:
    """A token of the training text with what stands around it, and the weight with which it is read. Blanks come as "␣"."""

    before: str
    token: str
    after: str
    title: str
    """Of the fable or article."""
    weight: float


@dataclass(frozen=True)
class Reading:
    """What one vector reads from the training text, best first."""

    name: str
    spots: tuple[Spot, ...]


@dataclass(frozen=True)
class Retrieval:
    """Self-attention as two levels: over the prompt by softmax, and from each of its tokens to the training text."""

    tokens: tuple[str, ...]
    """Of the prompt; the last one asks."""
    shares: Numbers
    """(heads, tokens): the softmax of the last token."""
    asked: Reading
    """The last token's own vector."""
    attended: dict[int, Reading]
    """By place in the prompt: tokens with the largest shares."""
    heads: tuple[Reading, ...]
    """What the tokens' vectors, mixed by a head's softmax, read."""
