"""What a run of ours says about its data: a settings file beside the recording names a built-in dataset and network.

The file is JSON and holds numbers and names only; nothing in it is evaluated, and no name in it becomes a path.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
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
from dualform.store.files import address, files_at, read_if_there

Place = str | os.PathLike[str]
Reader = Callable[[Place, dict[str, Any], Path | None], Subject]
"""The folder or address of a run, the content of its settings file, and where datasets are."""
PROMPT, LOOKED = 60, 3000
"""The page of a language model begins with so many characters of a sentence among the first tokens of the test text."""
PAPER = "trained.json"
"""The settings file of runs whose reader comes with dualform-paper."""


def find(path: Place, data: Path | None = None) -> Subject:
    """Return the subject of a run that `dualform demo` or `dualform paper` has recorded. data: where datasets are."""
    dualform.open(path)  # raises an error that says what is wrong with the recording, if anything is
    files = files_at(path)
    location = files.location
    for name, load in _readers():
        text = read_if_there(files, name)
        if text is None:
            continue
        try:
            return load()(path, json.loads(text), data)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(f"{address(files, name)} is not what dualform writes there: {error}.") from None
    if read_if_there(files, PAPER) is not None:
        raise DataError(f"{location} is a run of the paper's experiments. To show it: pip install 'dualform[paper]'.")
    raise DataError(
        f"{location} does not say what data it was trained on. Open it from Python, with the model and the data: "
        f"dualform.open({location!r}, model).explore(train=…, test=…)."
    )


def _readers() -> Iterator[tuple[str, Callable[[], Reader]]]:
    """The names of settings files, each with what loads its reader; our own come first."""
    for name, read in KNOWN.items():
        yield name, partial(_same, read)
    for name, entry in plugins.entry_points(plugins.RUNS).items():
        if name not in KNOWN:
            yield name, entry.load


def _same(read: Reader) -> Reader:
    return read


def _demo(path: Place, found: dict[str, Any], data: Path | None) -> Subject:
    names = {field.name for field in fields(demo.Settings)}
    settings = demo.Settings(**{name: value for name, value in found.items() if name in names})
    check_sizes(settings.width, settings.train_images)
    digits = demo.load(settings)
    ink = digits.raw_mean, digits.raw_deviation

    def drawn(drawing: Tensor) -> Tensor:
        return (fit_drawing(drawing, 8, (8, 8)) * 16 - ink[0]) / ink[1]

    return subject(
        dualform.open(path, demo.network(settings, settings.seed)),
        (digits.images, digits.labels),
        (digits.images[digits.test], digits.labels[digits.test]),
        class_names=[str(number) for number in range(demo.CLASSES)],
        draw=lambda drawing: drawn(drawing).flatten(),
        title="Digits (the demo)",
        ink=True,
    )


def _language(path: Place, found: dict[str, Any], data: Path | None) -> Subject:
    described = description.read_description(path)
    check_sizes(described.shape.embedding, described.shape.state)
    text = described.text

    def passage(position: int) -> Excerpt:
        return excerpt(text.passage(position))

    begin = text.decode(text.test.ids[:LOOKED].tolist())
    sentence = re.search(r"[A-Z][a-z]* [^\n.]{30,}", begin)
    begin = (sentence.group() if sentence else begin)[:PROMPT].rpartition(" ")[0]
    return subject(
        dualform.open(path, described.model()),
        language=Language(text.encode, text.decode, passage, described.column, prompt=begin),
        title=f"{text.name}, {text.unit}s",
    )


KNOWN: dict[str, Reader] = {
    demo.SETTINGS: _demo,
    description.JSON: _language,
}
"""By the name of the settings file, what reads it."""
