"""Single test examples, chosen by a rule, and what the network looks at for them: the paper's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

import dualform
from dualform_paper.settings import CLASSES, LAYERS, Settings
from dualform_paper.table import by_class
from dualform_paper.tasks import Task

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Candidates:
    """The test images of one dataset, for a rule to choose from."""

    labels: Tensor
    answers: Tensor
    first_answers: Tensor
    """Of the network after the first phase."""
    elected: Tensor
    """The class with the most attention in the last layer."""


@dataclass(frozen=True)
class Rule:
    """One example of the paper and how ours is found: the first test image that fits."""

    key: str
    dataset: str
    words: str
    fits: Callable[[Candidates], Tensor]
    figures: tuple[str, str, str, str]
    """The paper's numbers: test input, attention curves, totals, top matches."""
    otherwise: Callable[[Candidates], Tensor] | None = None
    """If none fits."""


def _right(label: int) -> Callable[[Candidates], Tensor]:
    return lambda c: (c.labels == label) & (c.answers == label)


RULES = {
    "single-task": (
        Rule("six", "mnist", "the first test image of a 6 that is answered right", _right(6), ("3a", "4", "5", "8")),
        Rule(
            "three", "mnist", "the first test image of a 3 that is answered right", _right(3), ("10a", "12", "13", "11")
        ),
    ),
    "joint": (
        Rule(
            "boot",
            "fashion-mnist",
            "the first ankle boot of the test images that is answered right",
            _right(9),
            ("3b", "6", "7", "9"),
        ),
        Rule(
            "dress",
            "fashion-mnist",
            "the first dress of the test images that is answered right",
            _right(3),
            ("10b", "15", "16", "14"),
        ),
        Rule(
            "sandal",
            "fashion-mnist",
            "the first sandal of the test images that is answered right although layer-2's totals elect another class",
            lambda c: _right(5)(c) & (c.elected != 5),
            ("10c", "18", "19", "17"),
            _right(5),
        ),
    ),
    "continual": (
        Rule(
            "one",
            "mnist",
            "the first 1 of the test images that was answered right after MNIST and is answered 3 after Fashion-MNIST",
            lambda c: (c.labels == 1) & (c.first_answers == 1) & (c.answers == 3),
            ("10d", "21", "22", "20"),
            lambda c: (c.labels == 1) & (c.answers != 1),
        ),
        Rule(
            "dress",
            "fashion-mnist",
            "the first dress of the test images that is answered right",
            _right(3),
            ("10e", "24", "25", "23"),
        ),
        Rule(
            "seven",
            "mnist",
            "the first test image of a 7 that is still answered right",
            _right(7),
            ("10f", "27", "28", "26"),
        ),
    ),
}


@dataclass(frozen=True)
class Match:
    """A training example that a layer attends to."""

    dataset: str
    label: int
    sample_id: int
    step: int | None
    """Of a slot; an image has several."""
    visits: int
    weight: float


@dataclass(frozen=True)
class Look:
    """What one layer looks at."""

    curves: dict[tuple[str, int], Floats]
    """By dataset and label: the highest attention weights, descending."""
    totals: dict[tuple[str, int], float]
    """Sums of the weights' sizes."""
    by_slot: tuple[Match, ...]
    by_image: tuple[Match, ...]


@dataclass(frozen=True)
class Example:
    """A test example and what each layer looks at."""

    rule: Rule
    fitted: bool
    """Whether it fits the rule, and not only its second best."""
    place: int
    """Its number among the test images of its dataset."""
    label: int
    answer: int
    looks: dict[str, Look]


def choose(rule: Rule, candidates: Candidates) -> tuple[int, bool]:
    """The place of the first test image that fits, and whether the rule itself does; a label that is nowhere gives the first image."""
    for fits in (rule.fits, rule.otherwise):
        places = [] if fits is None else torch.nonzero(fits(candidates))[:, 0].tolist()
        if places:
            return places[0], fits is rule.fits
    return 0, False


def look(
    dual: dualform.Dual,
    settings: Settings,
    tasks: Mapping[str, Task],
    chosen: Mapping[Rule, tuple[int, bool]],
    answers: Mapping[str, Tensor],
) -> list[Example]:
    """What each layer looks at, for the chosen test images."""
    rules = list(chosen)
    images = torch.stack([tasks[rule.dataset].test[chosen[rule][0]] for rule in rules])
    attention = dual.attend(images)
    visits = dual.rows.group_by("dataset", "sample_id").len(name="visits")
    looks = [_looks(attention[layer], settings, visits, len(rules)) for layer in LAYERS]
    return [
        Example(
            rule,
            chosen[rule][1],
            chosen[rule][0],
            int(tasks[rule.dataset].test_labels[chosen[rule][0]]),
            int(answers[rule.dataset][chosen[rule][0]]),
            {layer: looks[n][i] for n, layer in enumerate(LAYERS)},
        )
        for i, rule in enumerate(rules)
    ]


def _looks(attention: Any, settings: Settings, visits: pl.DataFrame, count: int) -> list[Look]:
    """One for each query. Scores are sizes of attention weights, as in the authors' code."""
    best = attention.top(settings.top, per=["dataset", "label"], absolute=True).join(
        visits, on=["dataset", "sample_id"], how="left", maintain_order="left"
    )
    totals = by_class(attention.total(["dataset", "label"], absolute=True), settings.datasets)
    images = attention.top(10, by=["dataset", "sample_id"], absolute=True)
    found = []
    for query in range(count):
        mine = best.filter(pl.col("query") == query)
        curves = {
            (str(key[0]), int(key[1])): part["weight"].abs().to_numpy().astype(np.float32)
            for key, part in mine.group_by(["dataset", "label"], maintain_order=True)
        }
        by_slot = mine.sort(pl.col("weight").abs(), descending=True, maintain_order=True).head(10).to_dicts()
        by_image = images.filter(pl.col("query") == query).to_dicts()
        found.append(
            Look(
                curves,
                {
                    (name, label): float(totals[query, n, label])
                    for n, name in enumerate(settings.datasets)
                    for label in range(CLASSES)
                },
                tuple(
                    Match(r["dataset"], r["label"], r["sample_id"], r["step"], r["visits"], r["weight"])
                    for r in by_slot
                ),
                tuple(
                    Match(r["dataset"], r["label"], r["sample_id"], None, r["visits"], r["weight"]) for r in by_image
                ),
            )
        )
    return found
