"""Where answers come from: a test image, its top training images, class totals, and its logit's split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dualform.figures.colours import FAINT, INITIAL, INK, RIGHT_INK, WRONG_INK, colour_of
from dualform.figures.lettering import LARGE, NORMAL, SMALL
from dualform.figures.numerals import short, signed
from dualform.figures.results import Explained, LayerSources, LogitSplit, Source
from dualform.figures.sheet import MARGIN, WIDTH, Sheet, write

BLOCK, LAYER, FOOT = 0.95, 1.06, 0.42
"""Inches: the height of a block beside its layers, of a layer in it, and of the foot."""
LEFT, MIDDLE, RIGHT = (MARGIN, 2.66), (3.24, 4.00), (7.64, 1.20)
"""Inches: where each of the three columns begins, and its width."""


def save(explained: Sequence[Explained], stem: Path) -> list[Path]:
    """Draw and save `stem`.png and `stem`.svg."""
    return write(lambda: draw(explained), stem)


def draw(explained: Sequence[Explained]) -> Figure:
    """One block for each test image, below each other."""
    heights = [BLOCK + LAYER * len(one.layers) for one in explained]
    sheet = Sheet(sum(heights) + FOOT)
    top = 0.0
    for one, height in zip(explained, heights, strict=True):
        _block(sheet, one, top)
        top += height
        sheet.rule(top)
    sheet.text(
        LEFT[0],
        top + 0.22,
        "Bars on the left add up to the model's own logit. A training digit is shown at the visit with its "
        "highest attention weight (key · query).",
        color=FAINT,
    )
    return sheet.figure


def _block(sheet: Sheet, one: Explained, top: float) -> None:
    mark = "right" if one.right else "wrong"
    sheet.text(LEFT[0], top + 0.30, f"Test digit {one.label}, answered {one.answer}", size=LARGE, weight="bold")
    sheet.text(
        LEFT[0] + 2.32,
        top + 0.30,
        mark,
        size=NORMAL,
        weight="bold",
        color=RIGHT_INK if one.right else WRONG_INK,
    )
    heads = top + 0.62
    style = {"size": NORMAL, "color": FAINT}
    sheet.text(MIDDLE[0], heads, "training digits with the highest attention weight: class, weight, step", **style)
    sheet.text(RIGHT[0] - 0.22, heads, "attention by class", **style)
    begin = top + 0.80
    _test_image(sheet, one, begin)
    tall = LAYER * len(one.layers)
    _logits(sheet, one, begin + 1.16, tall - 1.16)
    for number, layer in enumerate(one.layers):
        _layer(sheet, layer, begin + number * LAYER)


def _test_image(sheet: Sheet, one: Explained, top: float) -> None:
    sheet.picture(LEFT[0], top - 0.24, 1.0, one.image, colour_of(one.label), 3.0)
    for row, (what, label) in enumerate((("true class", one.label), ("answer", one.answer))):
        y = top + 0.06 + row * 0.34
        sheet.text(LEFT[0] + 1.16, y, what, color=FAINT, size=NORMAL)
        sheet.badge(LEFT[0] + 1.88, y, label, NORMAL + 1)


def _layer(sheet: Sheet, layer: LayerSources, top: float) -> None:
    sheet.text(
        MIDDLE[0] - 0.14,
        top + 0.24,
        f"layer {layer.layer}",
        rotation=90,
        ha="right",
        color=INK,
        weight="bold",
    )
    pitch = MIDDLE[1] / max(len(layer.top), 1)
    size = min(0.46, 0.88 * pitch)
    for place, source in enumerate(layer.top):
        _thumbnail(sheet, source, MIDDLE[0] + place * pitch, top, size)
    _totals(sheet, layer, top)


def _thumbnail(sheet: Sheet, source: Source, left: float, top: float, size: float) -> None:
    sheet.picture(left, top, size, source.image, colour_of(source.label), 2.0)
    sheet.badge(left + 0.045, top + size + 0.12, source.label, SMALL)
    sheet.text(left + size, top + size + 0.12, short(source.weight), ha="right")
    sheet.text(left + size, top + size + 0.26, f"step {source.step}", ha="right", color=FAINT)


def _totals(sheet: Sheet, layer: LayerSources, top: float) -> None:
    axes = sheet.axes(RIGHT[0], top + 0.02, RIGHT[1], 0.56)
    classes = range(len(layer.totals))
    axes.bar(classes, layer.totals, width=0.78, color=[colour_of(label) for label in classes])
    low, high = min(0.0, *layer.totals), max(0.0, *layer.totals)
    axes.set_ylim(low, high or 1.0)
    axes.axhline(0, color=INK, linewidth=0.6)
    axes.set_xticks(list(classes), [str(label) for label in classes], fontsize=SMALL, color=INK)
    axes.set_yticks([0.0, high or 1.0], ["0", short(high)], fontsize=SMALL, color=FAINT)
    axes.tick_params(length=0, pad=2)


def _logits(sheet: Sheet, one: Explained, top: float, height: float) -> None:
    """The split of the answer's logit and, beside it, of the true class's."""
    names = 0.42
    width = (LEFT[1] - names) / len(one.splits)
    parts = [part for split in one.splits for part in (split.initial, *split.parts)]
    limits = (min(0.0, *parts), max(0.0, *parts))
    for place, split in enumerate(one.splits):
        what = "answer" if split.unit == one.answer else "truth"
        left = LEFT[0] + names + place * width
        sheet.text(left + width - 0.06, top - 0.12, f"logit of {split.unit} ({what})", ha="right", color=FAINT)
        _logit(sheet, split, (left, top, width, height - 0.36), limits, named=place == 0)
        foot = top + height - 0.26
        for row, (word, number) in enumerate((("sum", split.total), ("logit", split.logit))):
            if place == 0:
                sheet.text(left - 0.05, foot + 0.14 * row, word, ha="right", weight="bold")
            sheet.text(left + width - 0.06, foot + 0.14 * row, signed(number, 4), ha="right", weight="bold")


def _logit(
    sheet: Sheet,
    split: LogitSplit,
    place: tuple[float, float, float, float],
    limits: tuple[float, float],
    *,
    named: bool,
) -> None:
    left, top, width, height = place
    numbers = 0.54
    axes = sheet.axes(left + 0.04, top, width - numbers - 0.06, height)
    parts = (split.initial, *split.parts)
    colours = [INITIAL, *(colour_of(label) for label in range(len(split.parts)))]
    axes.barh(range(len(parts)), parts, height=0.78, color=colours)
    axes.set(xlim=limits if limits[0] < limits[1] else (0, 1), ylim=(len(parts) - 0.5, -0.5))
    axes.axvline(0, color=INK, linewidth=0.6)
    if named:
        words = ["initial", *(str(label) for label in range(len(split.parts)))]
        axes.set_yticks(range(len(parts)), words, fontsize=SMALL, color=INK)
        axes.tick_params(length=0, pad=2)
    pitch = height / len(parts)
    for row, part in enumerate(parts):
        sheet.text(left + width - 0.06, top + (row + 0.5) * pitch, signed(part, 2), ha="right")
    sheet.figure.add_artist(
        Line2D(
            [(left + 0.04) / WIDTH, (left + width - 0.06) / WIDTH],
            [1 - (top + height + 0.02) / sheet.height] * 2,
            color=INK,
            linewidth=0.6,
        )
    )
