"""The paper's figures from what was found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dualform_paper import data
from dualform_paper import examples as looked
from dualform_paper.figures import bars, curves, inputs, lines, matches, totals
from dualform_paper.figures.results import (
    Bars,
    Group,
    Input,
    LayerCurves,
    LayerMatches,
    LayerTotals,
    Line,
    Lines,
    Match,
    Series,
)
from dualform_paper.settings import CLASSES, LAYERS
from dualform_paper.table import PAPER
from dualform_paper.tasks import Task

SHOWN = 3
"""How many matches the paper shows."""


@dataclass(frozen=True)
class Picture:
    """A figure on the page: its file's stem, and the words below it."""

    stem: str
    caption: str


def paper_name(layer: str) -> str:
    """Our layer "2" is the paper's layer-1."""
    return f"layer-{LAYERS.index(layer)}"


def of_examples(
    examples: Sequence[looked.Example], splits: Sequence[dict[str, Any]], tasks: Mapping[str, Task], folder: Path
) -> list[list[Picture]]:
    """For each example: attention curves, totals, top matches, contributions."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_of_example(one, split, tasks, folder) for one, split in zip(examples, splits, strict=True)]


def gallery(examples: Sequence[looked.Example], tasks: Mapping[str, Task], folder: Path) -> Picture:
    """The test inputs (figures 3 and 10)."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for one in examples:
        task = tasks[one.rule.dataset]
        shown.append(
            Input(
                _image(task.test_pixels[one.place]),
                task.classes[one.label],
                task.name,
                one.label,
                task.classes[one.answer],
                f"test image {one.place}",
            )
        )
    inputs.save(shown, "Test inputs", folder / "inputs")
    numbers = ", ".join(one.rule.figures[0] for one in examples)
    return Picture("inputs", f"The test inputs (the paper's figures {numbers}), each chosen by the rule given with it.")


def _of_example(one: looked.Example, split: dict[str, Any], tasks: Mapping[str, Task], folder: Path) -> list[Picture]:
    task, groups = tasks[one.rule.dataset], _groups(tasks)
    what = f"{_article(task.classes[one.label])} (test image {one.place}), answered {task.classes[one.answer]}"
    target, answer = (Group(task.name, label, task.classes[label]) for label in (one.label, one.answer))
    key, (_, of_curves, of_totals, of_matches) = one.rule.key, one.rule.figures
    curves.save(
        [
            LayerCurves(
                paper_name(layer),
                groups,
                tuple(seen.curves.get((g.dataset, g.label), np.zeros(0, dtype=np.float32)) for g in groups),
            )
            for layer, seen in one.looks.items()
        ],
        f"Attention weights for {what}",
        folder / f"{key}-curves",
    )
    totals.save(
        [
            LayerTotals(
                paper_name(layer), groups, tuple(seen.totals[g.dataset, g.label] for g in groups), layer == LAYERS[0]
            )
            for layer, seen in one.looks.items()
        ],
        f"Total attention by class for {what}",
        folder / f"{key}-totals",
        target=target,
        answer=answer,
    )
    matches.save(
        [
            LayerMatches(
                paper_name(layer),
                tuple(_match(m, tasks) for m in seen.by_slot[:SHOWN]),
                tuple(_match(m, tasks) for m in seen.by_image[:SHOWN]),
            )
            for layer, seen in one.looks.items()
        ],
        _image(task.test_pixels[one.place]),
        f"Top matches for {what}",
        folder / f"{key}-matches",
    )
    totals.save(
        [
            LayerTotals(
                paper_name(layer), groups, tuple(split[layer]["totals"][g.dataset][g.label] for g in groups), False
            )
            for layer in one.looks
        ],
        f"Contributions to the answer's logit by class, for {what}",
        folder / f"{key}-contributions",
        target=target,
        answer=answer,
        quantity="contribution to the logit",
    )
    return [
        Picture(
            f"{key}-curves",
            f"As the paper's figure {of_curves}: the highest attention weights of each class by size, descending.",
        ),
        Picture(f"{key}-totals", f"As the paper's figure {of_totals}: attention summed by class."),
        Picture(
            f"{key}-matches",
            f"As the paper's figure {of_matches}: the best slots, and the images whose visits sum to the most.",
        ),
        Picture(
            f"{key}-contributions",
            "Beyond the paper: signed contributions to the logit of the answer. Exact in layer-2, first order below.",
        ),
    ]


def table_one(measured: Mapping[str, Mapping[str, tuple[float, float]]], folder: Path) -> Picture:
    """Table 1 as bars. measured: by layer and column, mean and deviation."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {
        "right": "model right: label = answer",
        "output_wrong": "model wrong: answer",
        "target_wrong": "model wrong: label",
    }
    panels = [
        Bars(
            words,
            tuple(paper_name(layer) for layer in LAYERS),
            tuple(
                Series(
                    name,
                    tuple(numbers[layer][column][0] for layer in LAYERS),
                    _errors(numbers[layer][column] for layer in LAYERS),
                )
                for name, numbers in (("ours", measured), ("paper", PAPER))
            ),
            "% of test images",
        )
        for column, words in columns.items()
    ]
    bars.save(panels, "How often the class with the most attention is the label, or the answer", folder / "table-1")
    return Picture("table-1", "Table 1 as bars: mean over the seeds, with its deviation.")


def recency(shares: Mapping[str, Mapping[str, Sequence[float]]], folder: Path) -> Picture:
    """When top slots were written. shares: by layer, of "first", "all" and "late"."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {"first": "best 10", "all": "best 500", "late": "ranks 251 to 500"}
    panels = []
    for layer in LAYERS:
        tenths = np.arange(len(shares[layer]["all"])) * 10 + 5.0
        series = [Line(words, tenths, 100 * np.array(shares[layer][key])) for key, words in names.items()]
        chance = Line("chance", tenths, np.full(len(tenths), 100 / len(tenths)), reference=True)
        panels.append(
            Lines(paper_name(layer), "written after % of the training", "% of the top slots", (*series, chance))
        )
    lines.save(panels, "When the top slots were written", folder / "recency")
    return Picture("recency", "The share of top slots written in each tenth of the training, and what chance gives.")


def masks(accuracies: Mapping[str, Mapping[str, tuple[float, float]]], names: Sequence[str], folder: Path) -> Picture:
    """Accuracies of masked networks: by mask and dataset, mean and deviation."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = tuple(accuracies)
    series = tuple(
        Series(
            data.SOURCES[name].title,
            tuple(100 * accuracies[row][name][0] for row in rows),
            _errors((100 * mean, 100 * deviation) for mean, deviation in (accuracies[row][name] for row in rows)),
        )
        for name in names
    )
    bars.save(
        [Bars("test accuracy without the later task's slots", rows, series, "%")],
        "What masking out the later task gives back",
        folder / "masks",
    )
    return Picture("masks", "Test accuracy when the later task's slots are masked out in some layers.")


def from_section(title: str, found: Mapping[str, Any], stem: Path) -> bool:
    """The curves of an aside, if it has any."""
    series = [
        Line(str(name), np.array(line["x"], dtype=float), np.array(line["y"], dtype=float))
        for name, line in found.get("curves", {}).items()
    ]
    if not series:
        return False
    axes = found["axes"]
    drawn = Lines("", axes["x"], axes["y"], tuple(series), log_y=bool(axes.get("log_y")))
    lines.save([drawn], title, stem)
    return True


def _errors(found: Iterable[tuple[float, float]]) -> tuple[float, ...] | None:
    """The deviations; None where one seed has none."""
    deviations = tuple(deviation for _, deviation in found)
    return None if any(math.isnan(one) for one in deviations) else deviations


def _groups(tasks: Mapping[str, Task]) -> tuple[Group, ...]:
    return tuple(Group(t.name, label, t.classes[label]) for t in tasks.values() for label in range(CLASSES))


def _match(match: looked.Match, tasks: Mapping[str, Task]) -> Match:
    task = tasks[match.dataset]
    return Match(
        match.dataset,
        match.label,
        task.classes[match.label],
        match.sample_id,
        -1 if match.step is None else match.step,
        match.visits,
        match.weight,
        _image(task.train_pixels[match.sample_id]),
    )


def _image(pixels: Any) -> Any:
    return pixels.astype(np.float32) / 255


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou8' else 'a'} {name}"
