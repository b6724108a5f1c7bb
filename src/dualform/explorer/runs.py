"""What a run of ours says about its data: a settings file beside the recording names a built-in dataset and network.

The file is JSON and holds numbers and names only; nothing in it is evaluated, and no name in it becomes a path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

import dualform
from dualform import demo, plugins
from dualform.errors import DataError
from dualform.explorer.drawing import fit_drawing
from dualform.explorer.forms import Excerpt
from dualform.explorer.subject import Subject, check_sizes, subject
from dualform.explorer.text import Language, excerpt
from dualform.language import description

Reader = Callable[[Path, dict[str, Any], Path | None], Subject]
"""The folder of a run, the content of its settings file, and where datasets are."""
PROMPT, LOOKED = 60, 3000
"""The page of a language model begins with so many characters of a sentence among the first tokens of the test text."""
PAPER = "trained.json"
"""The settings file of runs whose reader comes with dualform-paper."""


def find(folder: Path, data: Path | None = None) -> Subject:
    """Return the subject of a run that `dualform demo` or `dualform paper` has recorded. data: where datasets are."""
    dualform.open(folder)  # raises an error that says what is wrong with the recording, if anything is
    name, read = next(_readers(folder), (None, None))
    if name is not None and read is not None:
        try:
            settings = json.loads((folder / name).read_text())
            return read(folder, settings, data)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(f"{folder / name} is not what dualform writes there: {error}.") from None
    if (folder / PAPER).is_file():
        raise DataError(f"{folder} is a run of the paper's experiments. To show it: pip install 'dualform[paper]'.")
    raise DataError(
        f"{folder} does not say what data it was trained on. Open it from Python, with the model and the data: "
        f"dualform.open({str(folder)!r}, model).explore(train=…, test=…)."
    )


def _readers(folder: Path) -> Iterator[tuple[str, Reader]]:
    """The settings files in a folder, each with what reads it; our own come first."""
    for name, read in KNOWN.items():
        if (folder / name).is_file():
            yield name, read
    for name, entry in plugins.entry_points(plugins.RUNS).items():
        if name not in KNOWN and (folder / name).is_file():
            yield name, entry.load()


def _demo(folder: Path, found: dict[str, Any], data: Path | None) -> Subject:
    names = {field.name for field in fields(demo.Settings)}
    settings = demo.Settings(**{name: value for name, value in found.items() if name in names})
    check_sizes(settings.width, settings.train_images)
    digits = demo.load(settings)
    ink = digits.raw_mean, digits.raw_deviation

    def drawn(drawing: Tensor) -> Tensor:
        return (fit_drawing(drawing, 8, (8, 8)) * 16 - ink[0]) / ink[1]

    return subject(
        dualform.open(folder, demo.network(settings, settings.seed)),
        (digits.images, digits.labels),
        (digits.images[digits.test], digits.labels[digits.test]),
        class_names=[str(number) for number in range(demo.CLASSES)],
        draw=lambda drawing: drawn(drawing).flatten(),
        title="Digits (the demo)",
        ink=True,
    )


def _language(folder: Path, found: dict[str, Any], data: Path | None) -> Subject:
    described = description.read_description(folder)
    check_sizes(described.shape.embedding, described.shape.state)
    text = described.text

    def passage(position: int) -> Excerpt:
        return excerpt(text.passage(position))

    begin = text.decode(text.test.ids[:LOOKED].tolist())
    sentence = re.search(r"[A-Z][a-z]* [^\n.]{30,}", begin)
    begin = (sentence.group() if sentence else begin)[:PROMPT].rpartition(" ")[0]
    return subject(
        dualform.open(folder, described.model()),
        language=Language(text.encode, text.decode, passage, described.column, prompt=begin),
        title=f"{text.name}, {text.unit}s",
    )


KNOWN: dict[str, Reader] = {
    demo.SETTINGS: _demo,
    description.JSON: _language,
}
"""By the name of the settings file, what reads it."""
