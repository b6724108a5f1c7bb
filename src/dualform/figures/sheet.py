"""The sheet on which figures are drawn, and how it becomes files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from dualform.figures.colours import GROUND, INK, RULE, colour_of, ink_on
from dualform.figures.lettering import FAMILY, LARGE, SMALL, wrapped

WIDTH, MARGIN = 9.0, 0.22
"""Inches: the width of every figure, and what stays free at its sides."""
TITLE = 0.21
"""Inches from one line of a title to the next."""
DPI = 200
FONT: Any = {"font.family": FAMILY, "svg.hashsalt": "dualform", "hatch.linewidth": 0.7}
"""The salt makes the same results give the same SVG."""


def write(draw: Callable[[], Figure], stem: Path) -> list[Path]:
    """Draw and save `stem`.png and `stem`.svg."""
    png, svg = (stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg"))
    with rc_context(FONT):
        figure = draw()
        figure.savefig(png, dpi=DPI)
        figure.savefig(svg, dpi=DPI, metadata={"Date": None})
    return [png, svg]


class Sheet:
    """A figure on which places are given in inches from the upper left corner."""

    def __init__(self, height: float):
        self.height = height
        self.figure = Figure(figsize=(WIDTH, height), facecolor=GROUND)
        FigureCanvasAgg(self.figure)

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        """Axes without frame or ticks."""
        axes = self.figure.add_axes(
            (left / WIDTH, 1 - (top + height) / self.height, width / WIDTH, height / self.height)
        )
        axes.set(xticks=[], yticks=[], facecolor="none")
        axes.spines[:].set_visible(False)
        return axes

    def text(self, left: float, top: float, content: str, **style: Any) -> Text:
        """Text whose middle line is at `top`."""
        style = {"size": SMALL, "color": INK, "va": "center", **style}
        return self.figure.text(left / WIDTH, 1 - top / self.height, content, **style)

    def rule(self, top: float, left: float = MARGIN) -> None:
        """A thin line across."""
        y = 1 - top / self.height
        ends = [left / WIDTH, 1 - MARGIN / WIDTH]
        self.figure.add_artist(Line2D(ends, [y, y], color=RULE, linewidth=0.8))

    def picture(self, left: float, top: float, size: float, image: Any, colour: str, border: float) -> None:
        """An image in a coloured frame; 0 is the ground."""
        axes = self.axes(left, top, size, size)
        axes.imshow(image, cmap="gray_r", vmin=0, interpolation="nearest")
        axes.spines[:].set(visible=True, color=colour, linewidth=border)

    def badge(self, left: float, top: float, label: int, size: float) -> None:
        """A class's number on its colour."""
        self.text(left, top, str(label), size=size, ha="center", **badge_style(label))


def badge_style(label: int) -> dict[str, Any]:
    """How the number of a class is written wherever it stands."""
    box = {"boxstyle": "round,pad=0.18,rounding_size=0.15", "facecolor": colour_of(label), "edgecolor": "none"}
    return {"weight": "bold", "color": ink_on(label), "bbox": box}


def titled(title: str, height: float) -> tuple[Sheet, float]:
    """A sheet with a title and `height` inches below it, and where these begin."""
    lines = wrapped(title, WIDTH - 2 * MARGIN, LARGE, bold=True)
    begin = 0.12 + TITLE * len(lines)
    sheet = Sheet(begin + height)
    for row, line in enumerate(lines):
        sheet.text(MARGIN, 0.22 + TITLE * row, line, size=LARGE, weight="bold")
    return sheet, begin
