"""Axes with numbers: a quiet frame, few ticks, round numbers in one unit."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from dualform.figures.colours import FAINT, INK, RULE
from dualform.figures.lettering import SMALL, wrapped
from dualform.figures.numerals import together

ROUND = (1, 2, 2.5, 5, 10)
TICKS = 6


def frame(axes: Any) -> None:
    """A line at the left and below, faint lines across."""
    axes.spines[["left", "bottom"]].set(visible=True, color=FAINT, linewidth=0.6)
    axes.grid(visible=True, axis="y", color=RULE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(length=2, pad=2, width=0.6, color=FAINT, labelsize=SMALL, labelcolor=INK)


def ticks(axis: Any, *, whole: bool = False) -> None:
    """Ticks at round numbers within the limits. whole: at whole ones only."""
    low, high = sorted(axis.get_view_interval())
    slack = 1e-9 * (high - low)
    places = MaxNLocator(TICKS, steps=ROUND, integer=whole).tick_values(low, high)
    inside = [place for place in places if low - slack <= place <= high + slack]
    axis.set_ticks(inside, together(inside))


def log_ticks(axis: Any) -> None:
    """Ticks at powers of ten, or also at their doubles and fives where these are few."""
    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low)
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    if decades >= 3:
        axis.set_major_locator(LogLocator(numticks=TICKS))
        return
    tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = [digit * 10.0**ten for ten in tens for digit in (1, 2, 5) if low <= digit * 10.0**ten <= high]
    axis.set_ticks(inside, [f"{place:g}" for place in inside])


def reach(axes: Any, low: float, high: float, room: float) -> None:
    """Limits from the lowest to the highest value, zero among them, with room beyond for what is written there."""
    low, high = min(0.0, low), max(0.0, high)
    span = (high - low) or 1.0
    axes.set_ylim(low - room * span if low < 0 else 0.0, (high or (1.0 if low == 0 else 0.0)) + room * span)
    if low < 0:
        axes.axhline(0, color=INK, linewidth=0.6)


def y_label(axes: Any, words: str, height: float) -> None:
    """What the numbers are, in lines of at most `height` inches."""
    lines = [line for part in words.split("\n") for line in wrapped(part, height)]
    axes.set_ylabel("\n".join(lines), fontsize=SMALL, color=INK)
