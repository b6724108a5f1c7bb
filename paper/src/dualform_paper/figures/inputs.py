"""The gallery of test examples that are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from dualform.figures.colours import FAINT, INK, RIGHT_INK, WRONG_INK, colour_of
from dualform.figures.lettering import LINE, NORMAL, wrapped
from dualform.figures.sheet import MARGIN, WIDTH, Sheet, titled, write
from dualform_paper.figures.grid import balanced
from dualform_paper.figures.partition import title_of
from dualform_paper.figures.results import Input

COLUMNS, FEWEST, GAP, LARGEST = 6, 3, 0.16, 1.24
"""Test examples in a row, at most; where fewer stand, as if there were so many; inches between them; inches that an image takes, at most."""
INDENT = 0.2
"""Inches that the badge takes."""


def save(inputs: Sequence[Input], title: str, stem: Path) -> list[Path]:
    """Draw and save `stem`.png and `stem`.svg."""
    return write(lambda: draw(inputs, title), stem)


def draw(inputs: Sequence[Input], title: str) -> Figure:
    """Rows of images, below each its class, the model's answer and its caption."""
    columns = balanced(len(inputs), COLUMNS)
    rows = [inputs[first : first + columns] for first in range(0, len(inputs), columns)]
    pitch = (WIDTH - 2 * MARGIN + GAP) / max(columns, FEWEST)
    size = min(LARGEST, pitch - GAP)
    heights = [size + 0.3 + LINE * max(len(_words(one, pitch - GAP)) for one in row) for row in rows]
    sheet, top = titled(title, sum(heights) + 0.1)
    for row, height in zip(rows, heights, strict=True):
        for place, one in enumerate(row):
            _input(sheet, one, MARGIN + place * pitch, top + 0.1, size, _words(one, pitch - GAP))
        top += height
    return sheet.figure


def _words(one: Input, width: float) -> list[tuple[float, str, str]]:
    """What stands below an image: indent, line, colour."""
    name = title_of(one.dataset) if one.name == str(one.label) else f"{one.name}, {title_of(one.dataset)}"
    mark, colour = ("✓", RIGHT_INK) if one.right else ("✗", WRONG_INK)
    return [
        *((INDENT, line, INK) for line in wrapped(name, width - INDENT)),
        *((0.0, line, colour) for line in wrapped(f"{mark} answered {one.answer}", width)),
        *((0.0, line, FAINT) for line in wrapped(one.caption, width)),
    ]


def _input(
    sheet: Sheet, one: Input, left: float, top: float, size: float, words: Sequence[tuple[float, str, str]]
) -> None:
    sheet.picture(left, top, size, one.image, colour_of(one.label), 2.5)
    below = top + size + 0.15
    sheet.badge(left + 0.06, below, one.label, NORMAL)
    for row, (indent, line, colour) in enumerate(words):
        sheet.text(left + indent, below + row * LINE, line, color=colour)
