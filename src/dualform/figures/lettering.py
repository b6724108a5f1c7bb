"""How wide words are, known before anything is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

FAMILY = "DejaVu Sans"
"""Comes with Matplotlib."""
SMALL, NORMAL, LARGE = 7.0, 8.0, 11.0
"""Font sizes in points: the smallest is 10 pixels high where the figure is 900 pixels wide."""
LINE = 0.14
"""Inches from one line of small text to the next."""
POINTS = 72.0
SLANT, LONGEST = 35.0, 0.95
"""Of names too wide to stand beside each other: degrees, and inches that are written of each at most."""
SLANTED: Any = {"rotation": SLANT, "rotation_mode": "anchor", "ha": "right", "va": "top"}
"""The style of such a name: it ends below what it names."""


def width_of(content: str, size: float = SMALL, *, bold: bool = False) -> float:
    """Inches."""
    font = FontProperties(family=FAMILY, size=size, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(content, font, ismath=False)
    return float(width) / POINTS


def shortened(content: str, width: float, size: float = SMALL) -> str:
    """As much of it as fits, with … where something was left off."""
    if width_of(content, size) <= width:
        return content
    kept = content
    while kept and width_of(f"{kept}…", size) > width:
        kept = kept[:-1].rstrip()
    return f"{kept}…"


def wrapped(content: str, width: float, size: float = SMALL, *, bold: bool = False) -> list[str]:
    """Lines that fit, broken between words; a word that is wider stays whole."""
    lines: list[str] = []
    for word in content.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and width_of(longer, size, bold=bold) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def depth_of(names: Sequence[str]) -> float:
    """Inches from the upper to the lower end of slanted names."""
    longest = min(LONGEST, max(map(width_of, names), default=0.0))
    return longest * math.sin(math.radians(SLANT)) + 0.1 if names else 0.0
