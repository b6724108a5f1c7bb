"""What a run of ours says about its data: a settings file beside the recording names a built-in dataset and network.

The file is JSON and holds numbers and names only; nothing in it is evaluated, and no name in it becomes a path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import dualform
from dualform import demo
from dualform.errors import DataError
from dualform.explorer.forms import Excerpt
from dualform.explorer.subject import Subject, subject
from dualform.explorer.text import Language
from dualform.paper.language import beside
from dualform.paper.settings import Phase, Settings
from dualform.paper.tasks import load
from dualform.paper.training import FINISHED, network

PROMPT, LOOKED = 60, 3000
"""The page of a language model begins with so many characters of a sentence among the first tokens of the test text."""
WIDEST = 1 << 14
"""A network in a settings file that is wider than this is no network of ours."""


def find(folder: Path, data: Path | None = None) -> Subject:
    """The subject of a run that `dualform demo` or `dualform paper` has recorded. data: where datasets are."""
    dualform.open(folder)  # says what is wrong with it, if anything
    for name, read in KNOWN.items():
        if (folder / name).is_file():
            try:
                settings = json.loads((folder / name).read_text())
                return read(folder, settings, data)
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise DataError(f"{folder / name} is not what dualform writes there: {error}.") from None
    raise DataError(
        f"{folder} does not say what data it was trained on. Open it from Python, with the model and the data: "
        f"dualform.open({str(folder)!r}, model).explore(train=…, test=…)."
    )


def _demo(folder: Path, found: dict[str, Any], data: Path | None) -> Subject:
    names = {field.name for field in fields(demo.Settings)}
    settings = demo.Settings(**{name: value for name, value in found.items() if name in names})
    _check(settings.width, settings.train_images)
    digits = demo.load(settings)
    ink = digits.raw_mean, digits.raw_deviation

    def drawn(drawing: Tensor) -> Tensor:
        return (fitted(drawing, 8, (8, 8)) * 16 - ink[0]) / ink[1]

    return subject(
        dualform.open(folder, demo.network(settings, settings.seed)),
        (digits.images, digits.labels),
        (digits.images[digits.test], digits.labels[digits.test]),
        class_names=[str(number) for number in range(demo.CLASSES)],
        draw=lambda drawing: drawn(drawing).flatten(),
        title="Digits (the demo)",
        ink=True,
    )


def _paper(folder: Path, found: dict[str, Any], data: Path | None) -> Subject:
    given = dict(found["settings"])
    phases = tuple(Phase(tuple(map(str, phase["datasets"])), int(phase["steps"])) for phase in given.pop("phases"))
    settings = Settings(phases=phases, **given)
    _check(settings.width, settings.batch)
    tasks = load(settings, data)
    first = next(iter(tasks.values()))
    low, high = float(first.train.min()), float(first.train.max())

    def drawn(drawing: Tensor) -> Tensor:
        return (fitted(drawing, 28, (20, 20)) * (high - low) + low).flatten()

    return subject(
        dualform.open(folder, network(settings)),
        {name: task.train for name, task in tasks.items()},
        {name: (task.test, task.test_labels) for name, task in tasks.items()},
        class_names={name: task.classes for name, task in tasks.items()},
        by=("dataset", "sample_id"),
        draw=drawn,
        title=f"{' and '.join(tasks)}, {settings.experiment}",
        ink=True,
    )


def _language(folder: Path, found: dict[str, Any], data: Path | None) -> Subject:
    kept = beside.read(folder)
    _check(kept.shape.embedding, kept.shape.state)
    text = kept.text

    def passage(position: int) -> Excerpt:
        shown = text.passage(position)
        return Excerpt(
            before=shown.before, token=shown.token, after=shown.after, title=shown.title, position=shown.position
        )

    begin = text.decode(text.test.ids[:LOOKED].tolist())
    sentence = re.search(r"[A-Z][a-z]* [^\n.]{30,}", begin)
    begin = (sentence.group() if sentence else begin)[:PROMPT].rpartition(" ")[0]
    return subject(
        dualform.open(folder, kept.model()),
        language=Language(text.encode, text.decode, passage, kept.column, prompt=begin),
        title=f"{text.name}, {text.unit}s",
    )


def _check(*sizes: Any) -> None:
    if not all(isinstance(size, int) and 0 < size <= WIDEST for size in sizes):
        raise ValueError(f"sizes {sizes} are not those of a network of ours")


KNOWN: dict[str, Callable[[Path, dict[str, Any], Path | None], Subject]] = {
    demo.SETTINGS: _demo,
    beside.JSON: _language,
    FINISHED: _paper,
}
"""By the name of the settings file, what reads it."""


def fitted(drawing: Tensor, size: int, box: tuple[int, int]) -> Tensor:
    """A drawing, cut out, brought to fit a box and put in the middle, as datasets of digits do: (size, size), 0 to 1."""
    places = torch.nonzero(drawing > 0.1)
    if not len(places):
        return torch.zeros(size, size)
    (top, left), (bottom, right) = places.min(0).values.tolist(), (places.max(0).values + 1).tolist()
    cut = drawing[top:bottom, left:right]
    scale = min(box[0] / cut.shape[0], box[1] / cut.shape[1])
    height, width = (max(1, round(side * scale)) for side in cut.shape)
    small = F.interpolate(cut[None, None], (height, width), mode="bilinear", antialias=True)[0, 0]
    page = torch.zeros(size, size)
    rows, columns = torch.arange(height).float(), torch.arange(width).float()
    total = small.sum().clamp(min=1e-6)
    middle = (small.sum(1) @ rows) / total, (small.sum(0) @ columns) / total
    first = [
        min(max(round((size - 1) / 2 - float(mean)), 0), size - length)
        for mean, length in zip(middle, (height, width), strict=True)
    ]
    page[first[0] : first[0] + height, first[1] : first[1] + width] = small
    return page.clamp(0, 1)
