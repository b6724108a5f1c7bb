"""Panels in rows, with one legend above them: one name, one colour in the whole figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from dualform.figures.colours import INK, SERIES, colour_of
from dualform.figures.lettering import LINE, NORMAL, SMALL, width_of, wrapped
from dualform.figures.sheet import MARGIN, WIDTH, titled
from dualform_paper.figures.scales import frame

SIDE, GAP, PANEL, BELOW = 0.58, 0.12, 1.7, 0.14
"""Inches: numbers and label left of a panel; what stays free at its right; its height; what stays free below a row."""
SWATCH, LEGEND = 0.55, 0.19
"""Inches: what a name of the legend takes beside its letters, and the height of its line."""


def colours(names: Sequence[tuple[str, int | None]]) -> dict[str, str]:
    """A colour for each name, by first appearance; a class has its own."""
    distinct = dict(names)
    free = [name for name, label in distinct.items() if label is None]
    return {
        name: SERIES[free.index(name) % len(SERIES)] if label is None else colour_of(label)
        for name, label in distinct.items()
    }


def across(columns: int) -> float:
    """Inches that a panel is wide where so many stand beside each other."""
    return (WIDTH - 2 * MARGIN + GAP) / columns - SIDE - GAP


def balanced(panels: int, columns: int) -> int:
    """As few columns as the same number of rows needs."""
    return math.ceil(panels / max(math.ceil(panels / columns), 1)) or 1


def grid(
    titles: Sequence[str], columns: int, title: str, handles: dict[str, Any], foot: float
) -> tuple[Figure, list[Any]]:
    """The figure and the axes of each panel, empty. foot: inches below a panel for its axis."""
    rows = math.ceil(len(titles) / columns)
    names = list(handles)
    beside = int((WIDTH - 2 * MARGIN) // (max(map(width_of, names), default=0.0) * NORMAL / SMALL + SWATCH)) or 1
    beside = balanced(len(names), beside)
    legend = LEGEND * math.ceil(len(names) / beside) + 0.1
    wide = across(columns)
    heads = [wrapped(words, wide, NORMAL, bold=True) for words in titles]
    head = LINE * max(map(len, heads), default=0) + 0.12
    each = head + PANEL + foot + BELOW
    sheet, top = titled(title, legend + each * rows)
    if names:
        sheet.figure.legend(
            handles=list(handles.values()),
            labels=names,
            loc="upper left",
            bbox_to_anchor=(MARGIN / WIDTH, 1 - (top + 0.06) / sheet.height),
            ncols=beside,
            fontsize=NORMAL,
            labelcolor=INK,
            frameon=False,
            borderpad=0.0,
            borderaxespad=0.0,
            handlelength=2.2,
            columnspacing=1.4,
            labelspacing=0.4,
        )
    drawn = []
    for number, lines in enumerate(heads):
        row, column = divmod(number, columns)
        left, begin = MARGIN + SIDE + column * (wide + SIDE + GAP), top + legend + row * each + head
        for line, words in enumerate(reversed(lines)):
            sheet.text(left, begin - 0.12 - LINE * line, words, size=NORMAL, weight="bold")
        axes = sheet.axes(left, begin, wide, PANEL)
        frame(axes)
        axes.yaxis.set_label_coords(-(SIDE - 0.12) / wide, 0.5)
        drawn.append(axes)
    return sheet.figure, drawn
