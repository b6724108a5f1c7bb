"""What is explored: a recording with the samples it was trained and is tested on, and how these are shown and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

import dualform
from dualform.errors import QuestionError
from dualform.explorer.collection import Key, TestSet, TrainingSet
from dualform.explorer.forms import Named, Shown, Value
from dualform.explorer.showing import Show, shown
from dualform.explorer.text import Language, language_of
from dualform.language.documents import RecordedDocuments
from dualform.query.forward import output_of

Names = Sequence[str] | Mapping[Any, str]
ClassNames = Names | Mapping[str, Names] | None
"""Names of classes by number or value; or such names by dataset, where datasets share the outputs."""
Draw = Callable[[Tensor], Tensor]
"""From a drawing, (32, 32) with 1 where there is ink, to an input of the model."""


WIDEST = 1 << 14
"""A network in a settings file that is wider than this was not written by dualform."""


@dataclass(frozen=True)
class Subject:
    """Everything that the explorer needs to know about a run."""

    dual: dualform.Dual
    train: TrainingSet
    test: TestSet
    title: str
    by: tuple[str, ...]
    """The columns that name a training sample; none: rows have no names."""
    label: str | None
    """The column that holds classes."""
    class_names: ClassNames = None
    show: Show | str | None = None
    draw: Draw | None = None
    ink: bool = False
    """Whether grey pictures are ink on paper."""
    language: Language | None = None

    @cached_property
    def info(self) -> dict[str, Any]:
        """What the recording says about itself."""
        return self.dual.info()

    @property
    def collected(self) -> str:
        """Empty, or that the slots were collected at checkpoints."""
        return str(self.info["origin"]) if self.info["checkpoints"] else ""

    def again(self) -> Subject:
        """The same, with the recording opened anew: totals were built meanwhile."""
        return replace(self, dual=self.dual.reopened())

    def name(self, value: Value, of: Value = None) -> str:
        """The name of a class; of: the dataset, where each has names of its own. Without it, the names of all."""
        names: Any = self.class_names
        if isinstance(names, Mapping) and any(not isinstance(one, str) for one in names.values()):
            apart = {dataset: _name(own, value) for dataset, own in names.items()}
            return apart.get(str(of)) or " / ".join(dict.fromkeys(apart.values()))
        return _name(names, value)

    def named(self, value: Value, place: int | None = None, *, of: Value = None) -> Named:
        """A class with its name and colour: that of its number or, if it has none, of its place among the others."""
        output = _output_of(self._names_of(of), value)
        colour = output if output is not None else place or 0
        return Named(value=value, name=self.name(value, of), colour=colour)

    def output(self, label: Value, of: Value = None) -> int | None:
        """The number of the output that stands for a label; None: there is no label, or it is no class. of: the dataset.

        Names are looked up in class_names. A name that is not there, or there twice, is an error: counted as a wrong answer, it
        would make the accuracy wrong.
        """
        found = _output_of(self._names_of(of), label)
        if found is None and isinstance(label, str):
            raise QuestionError(
                f"the label {label!r} of a test example names no output of the model. Give labels as numbers of outputs, or "
                f"class_names= with {label!r} at the place of its output and nowhere else."
            )
        return found

    def _names_of(self, dataset: Value) -> Names | None:
        """The class names of a dataset, where each has its own; else those of all."""
        names: Any = self.class_names
        if isinstance(names, Mapping) and any(not isinstance(one, str) for one in names.values()):
            names = names.get(str(dataset))
        found: Names | None = names
        return found

    def label_of(self, key: Key, label: Value) -> Named | None:
        """The class of a training sample; with several columns in its key, the first names its dataset."""
        return None if label is None else self.named(label, of=key[0] if len(key) > 1 else None)

    def show_input(self, sample: Any) -> Shown:
        """An input as plain data."""
        return Shown(kind="none") if sample is None else shown(sample, self.show, ink=self.ink)

    def show_training(self, key: Key) -> Shown:
        """A training sample as plain data; nothing, if its data are not at hand."""
        return self.show_input(self.train.input(key) if self.train else None)


def subject(
    dual: dualform.Dual,
    train: Any = None,
    test: Any = None,
    *,
    class_names: ClassNames = None,
    by: str | Sequence[str] = "sample_id",
    label: str = "label",
    show: Show | str | None = None,
    draw: Draw | None = None,
    title: str | None = None,
    ink: bool = False,
    language: Language | None = None,
    tokenizer: Any = None,
) -> Subject:
    """Put together what the user gave; columns that were not recorded are left out, unless they were asked for by name.

    tokenizer: shows test examples as text; without test examples, the model is a language model that takes prompts.
    """
    columns = dual.info()["columns"]
    names = (by,) if isinstance(by, str) else tuple(by)
    unknown = [name for name in names if name not in columns]
    if unknown and names != ("sample_id",):
        raise QuestionError(f"by={by!r}: there is no column {unknown[0]!r}. Columns: {', '.join(columns) or 'none'}.")
    if label != "label" and label not in columns:
        raise QuestionError(f"label={label!r}: there is no such column. Columns: {', '.join(columns) or 'none'}.")
    if tokenizer is not None and test is not None and show is None:
        show = _as_text(tokenizer)
    elif tokenizer is not None and language is None:
        language = language_of(RecordedDocuments(dual, tokenizer, names[-1]))
    tests = TestSet(test)
    if len(tests) and language is None:
        _try(dual, tests)
    per_position = [name for name in (*names, label) if columns.get(name, "").endswith("position")]
    found = Subject(
        dual,
        TrainingSet(train),
        tests,
        title or Path(dual.store.location).name,
        () if unknown or set(names) & set(per_position) else names,
        label if label in columns and label not in per_position else None,
        class_names,
        show,
        draw,
        ink,
        language,
    )
    if language is None:
        _check_labels(found)
    return found


def _as_text(tokenizer: Any) -> Show:
    """Show inputs by their tokens, and texts as they are."""

    def show(sample: Any) -> Any:
        tokens = sample["input_ids"] if isinstance(sample, Mapping) else sample
        return sample if isinstance(sample, str) else tokenizer.decode(tokens, skip_special_tokens=True)

    return show


def _check_labels(subject: Subject) -> None:
    """Refuse test labels that name no output, before anybody looks at a page. Of datasets only the first label is read: that may be slow."""
    for part in subject.test.parts:
        count = len(part) if part.has_labels_apart else min(1, len(part))
        for place in range(count):
            subject.output(part.label(place), of=part.name)


def _try(dual: dualform.Dual, tests: TestSet) -> None:
    """Ask the model once, before anybody looks at a page: inputs of another form are told here."""
    part, place = tests.place(0)
    model = dual.model()
    try:
        with torch.no_grad():
            output_of(model, part.batch([place]))
    except Exception as error:  # whatever a user's model does
        cause = error.__cause__ if isinstance(error, QuestionError) and error.__cause__ else error
        raise QuestionError(
            f"the model does not take the first test example: {type(cause).__name__}: {cause}. Give inputs as the model takes them."
        ) from error


def _name(names: Names | None, value: Value) -> str:
    if isinstance(names, Mapping):
        return str(names.get(value, value))
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        return str(names[value])
    return str(value)


def _output_of(names: Names | None, label: Value) -> int | None:
    """The number of the output that stands for a label; None if none does, or if several do."""
    if isinstance(label, int):
        return int(label)
    if isinstance(label, float):
        return int(label) if label.is_integer() else None
    if names is None:
        return None
    numbered = names.items() if isinstance(names, Mapping) else enumerate(names)
    fitting = [number for number, name in numbered if name == label and isinstance(number, int)]
    return fitting[0] if len(fitting) == 1 else None


def plain(value: Any) -> Value:
    """An entry of a column as plain data."""
    return value if value is None or isinstance(value, int | float | str | bool) else str(value)


def distinct(frame: pl.DataFrame, column: str) -> list[Value]:
    """The values of a column, sorted."""
    return [plain(value) for value in frame[column].unique().sort().to_list()]


def check_sizes(*sizes: Any) -> None:
    """Refuse the sizes of a network in a settings file that dualform has not written."""
    if not all(isinstance(size, int) and 0 < size <= WIDEST for size in sizes):
        raise ValueError(f"sizes {sizes} are not those of a network of ours")
