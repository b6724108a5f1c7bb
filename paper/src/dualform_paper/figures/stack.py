"""Panels below each other, one for each layer, over one axis partitioned by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from dualform.figures.colours import INK
from dualform.figures.lettering import NORMAL, SMALL
from dualform.figures.sheet import MARGIN, WIDTH, titled
from dualform_paper.figures.partition import Partition
from dualform_paper.figures.scales import frame

LEFT, ACROSS = 0.92, WIDTH - 0.92 - MARGIN
"""Inches: where the panels begin, and their width."""
HEADER, NAME, PANEL, BADGES, FOOT = 0.26, 0.24, 1.15, 0.26, 0.24
"""Inches, from above: the datasets; of each layer its name, its panel and the numbers of the classes; the axis' label."""


def stack(
    layers: Sequence[str], partition: Partition, title: str, x_label: str, *, note: str = ""
) -> tuple[Figure, list[Any]]:
    """The figure, and the axes of each layer, empty but for the classes."""
    each = NAME + PANEL + BADGES
    line = 0.2 if note else 0.0
    sheet, top = titled(title, line + HEADER + each * len(layers) + partition.depth + FOOT + 0.06)
    if note:
        sheet.text(MARGIN, top + 0.08, note, size=NORMAL)
    partition.headers(sheet, top + line + HEADER / 2, LEFT, ACROSS)
    drawn = []
    for number, layer in enumerate(layers):
        begin = top + line + HEADER + number * each
        sheet.text(MARGIN, begin + 0.10, layer, size=NORMAL, weight="bold")
        axes = sheet.axes(LEFT, begin + NAME, ACROSS, PANEL)
        frame(axes)
        partition.put_on(axes)
        axes.yaxis.set_label_coords(-0.48 / ACROSS, 0.5)
        drawn.append(axes)
    if drawn:
        partition.names(sheet, top + line + HEADER + each * len(layers), LEFT, ACROSS)
        drawn[-1].set_xlabel(x_label, fontsize=SMALL, color=INK)
        drawn[-1].xaxis.set_label_coords(0.5, -(BADGES + partition.depth + 0.04) / PANEL)
    return sheet.figure, drawn
