"""Lines with bands: how something goes with time, depth or rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dualform.figures.colours import FAINT, INK
from dualform.figures.lettering import SMALL
from dualform.figures.sheet import write
from dualform_paper.figures.grid import PANEL, balanced, colours, grid
from dualform_paper.figures.results import Line, Lines
from dualform_paper.figures.scales import log_ticks, ticks, y_label

COLUMNS, FOOT, FEW = 3, 0.36, 20
"""Panels in a row, at most; inches for numbers and label below; up to so many points are marked, each."""
SHAPES = ("o", "s", "^", "D", "v", "P", "X")
"""Beside the colours, so that lines are told apart without them."""
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))


def save(panels: Sequence[Lines], title: str, stem: Path) -> list[Path]:
    """Draw and save `stem`.png and `stem`.svg."""
    return write(lambda: draw(panels, title), stem)


def draw(panels: Sequence[Lines], title: str) -> Figure:
    """One panel for each; a name has the same line in all of them."""
    styles = _styles([line for panel in panels for line in panel.series])
    handles = {name: Line2D([], [], **style) for name, style in styles.items()}
    columns = balanced(len(panels), COLUMNS)
    figure, drawn = grid([panel.title for panel in panels], columns, title, handles, FOOT)
    for axes, panel in zip(drawn, panels, strict=True):
        _panel(axes, panel, styles)
    return figure


def _styles(lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    compared = [line for line in lines if not line.reference]
    palette = colours([(line.name, line.label) for line in compared])
    most = max((len(line.x) for line in compared), default=0)
    styles: dict[str, dict[str, Any]] = {
        name: {
            "color": colour,
            "linewidth": 1.4,
            "linestyle": DASHES[number % len(DASHES)],
            "marker": SHAPES[number % len(SHAPES)] if most <= FEW else "",
            "markersize": 3.5,
        }
        for number, (name, colour) in enumerate(palette.items())
    }
    stand_back = {"color": FAINT, "linewidth": 1.0, "linestyle": (0, (3, 2))}
    return styles | {line.name: stand_back for line in lines if line.reference}


def _panel(axes: Any, panel: Lines, styles: dict[str, dict[str, Any]]) -> None:
    axes.set(xscale="log" if panel.log_x else "linear", yscale="log" if panel.log_y else "linear")
    for line in panel.series:
        style = styles[line.name]
        axes.plot(line.x, line.y, **style)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=style["color"], alpha=0.2, linewidth=0)
    if panel.log_x:
        log_ticks(axes.xaxis)
    else:
        ticks(axes.xaxis, whole=all(float(x).is_integer() for line in panel.series for x in line.x))
    (log_ticks if panel.log_y else ticks)(axes.yaxis)
    axes.set_xlabel(panel.x_label, fontsize=SMALL, color=INK, labelpad=3)
    y_label(axes, panel.y_label, PANEL)
