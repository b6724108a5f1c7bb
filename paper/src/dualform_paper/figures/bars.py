"""Bars side by side, with error bars: what was measured in several settings, or by several people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dualform.figures.colours import INK
from dualform.figures.lettering import LINE, LONGEST, SLANTED, SMALL, depth_of, shortened, width_of, wrapped
from dualform.figures.numerals import alike
from dualform.figures.sheet import write
from dualform_paper.figures.grid import PANEL, across, balanced, colours, grid
from dualform_paper.figures.results import Bars, Series
from dualform_paper.figures.scales import reach, ticks, y_label

COLUMNS, NARROWEST, FILLED = 3, 0.13, 0.82
"""Panels in a row, at most; inches of the narrowest bar; how much of its place a group fills."""


def save(panels: Sequence[Bars], title: str, stem: Path) -> list[Path]:
    """Draw and save `stem`.png and `stem`.svg."""
    return write(lambda: draw(panels, title), stem)


def draw(panels: Sequence[Bars], title: str) -> Figure:
    """One panel for each; a series has the same colour in all of them, and a unit the same axis."""
    palette = colours([(series.name, series.label) for panel in panels for series in panel.series])
    columns = _columns(panels)
    pitches = [across(columns) / max(len(panel.groups), 1) for panel in panels]
    foot = max((_depth(panel.groups, pitch) for panel, pitch in zip(panels, pitches, strict=True)), default=0.0)
    handles = {name: Patch(facecolor=colour) for name, colour in palette.items()}
    figure, drawn = grid([panel.title for panel in panels], columns, title, handles, foot)
    for axes, panel, pitch in zip(drawn, panels, pitches, strict=True):
        reach(axes, *_ends([other for other in panels if other.unit == panel.unit]), 0.14)
        _panel(axes, panel, palette, pitch)
    return figure


def _columns(panels: Sequence[Bars]) -> int:
    """As many as leave each bar and each word its width."""
    for columns in range(min(COLUMNS, len(panels)), 1, -1):
        if all(
            across(columns) / max(len(panel.groups), 1) >= max(NARROWEST * len(panel.series) / FILLED, _widest(panel))
            for panel in panels
        ):
            return balanced(len(panels), columns)
    return 1


def _widest(panel: Bars) -> float:
    return max((width_of(word) for group in panel.groups for word in group.split()), default=0.0) + 0.08


def _slanted(groups: Sequence[str], pitch: float) -> bool:
    return any(width_of(word) > pitch - 0.06 for group in groups for word in group.split())


def _depth(groups: Sequence[str], pitch: float) -> float:
    """Inches that the groups' names take."""
    if _slanted(groups, pitch):
        return depth_of(groups) + 0.1
    return LINE * max((len(wrapped(group, pitch - 0.06)) for group in groups), default=0) + 0.08


def _ends(panels: Sequence[Bars]) -> tuple[float, float]:
    """Where the lowest and the highest error bar end."""
    pairs = [pair for panel in panels for series in panel.series for pair in _pairs(series)]
    low = min((value - error for value, error in pairs), default=0.0)
    return low, max((value + error for value, error in pairs), default=0.0)


def _panel(axes: Any, panel: Bars, palette: dict[str, str], pitch: float) -> None:
    width = FILLED / max(len(panel.series), 1)
    for number, series in enumerate(panel.series):
        places = np.arange(len(series.values)) + (number - (len(panel.series) - 1) / 2) * width
        axes.bar(places, series.values, width=0.94 * width, color=palette[series.name])
        if series.errors is not None:
            style = {"ecolor": INK, "elinewidth": 0.9, "capsize": min(2.5, 18 * width * pitch)}
            axes.errorbar(places, series.values, yerr=series.errors, fmt="none", **style)
        _numbers(axes, series, places, width * pitch)
    axes.set_xlim(-0.5, max(len(panel.groups), 1) - 0.5)
    ticks(axes.yaxis)
    y_label(axes, panel.unit, PANEL)
    axes.tick_params(axis="x", length=0, pad=4)
    _names(axes, panel.groups, pitch)


def _names(axes: Any, groups: Sequence[str], pitch: float) -> None:
    if _slanted(groups, pitch):
        axes.set_xticks(range(len(groups)), [shortened(group, LONGEST) for group in groups], **SLANTED)
    else:
        axes.set_xticks(range(len(groups)), ["\n".join(wrapped(group, pitch - 0.06)) for group in groups])


def _numbers(axes: Any, series: Series, places: Any, wide: float) -> None:
    """Each value beyond its bar, where there is room for all of the series."""
    written = alike(series.values)
    if max(map(width_of, written), default=0.0) > wide + 0.02:
        return
    low, high = axes.get_ylim()
    beyond = 0.06 * (high - low) / PANEL
    for place, number, (value, error) in zip(places, written, _pairs(series), strict=True):
        height = value + error + beyond if value >= 0 else value - error - beyond
        axes.text(place, height, number, size=SMALL, color=INK, ha="center", va="bottom" if value >= 0 else "top")


def _pairs(series: Series) -> list[tuple[float, float]]:
    return list(zip(series.values, series.errors or [0.0] * len(series.values), strict=True))
