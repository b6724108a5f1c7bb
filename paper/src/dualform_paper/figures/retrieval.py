"""Self-attention as two levels: the softmax over a prompt, and the training text that its tokens' vectors read from."""

from __future__ import annotations

import re
from bisect import bisect_left
from pathlib import Path

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from dualform.figures.colours import FAINT, GROUND, INK, SERIES
from dualform.figures.lettering import NORMAL, shortened, width_of
from dualform.figures.numerals import short
from dualform.figures.sheet import MARGIN, WIDTH, Sheet, titled, write
from dualform_paper.figures.results import Reading, Retrieval, Spot

ROW, LINE, GAP, HEAD = 0.16, 0.15, 0.09, 0.3
"""Inches: a head's row of the softmax, a line of text, what stays free between readings, and a heading."""
NAMES, TOKEN, END = 1.5, 4.55, 7.2
"""Inches from the left: where weights end, where the tokens that are read stand, and where the text after them ends."""


def save(found: Retrieval, title: str, stem: Path) -> list[Path]:
    """Draw and save `stem`.png and `stem`.svg."""
    return write(lambda: draw(found, title), stem)


def draw(found: Retrieval, title: str) -> Figure:
    """Above the softmax, one row for each head; below it what each vector reads, the tokens read in one column."""
    first = {place: found.attended[place] for place in sorted(found.attended, reverse=True)}
    blocks: list[tuple[str, list[Reading]]] = [
        ("First level: where the vectors of these tokens read from the training text (key · query)", [found.asked, *first.values()]),
        ("Both levels: where the vectors read from, mixed as each head's softmax shares", list(found.heads)),
    ]  # fmt: skip
    softmax = HEAD + ROW * (len(found.shares) + 1) + 0.22
    height = softmax + sum(HEAD + sum(map(_tall, readings)) for _, readings in blocks) + 0.1
    sheet, top = titled(title, height)
    _softmax(sheet, found, top)
    top += softmax
    for heading, readings in blocks:
        sheet.text(MARGIN, top + 0.1, heading, size=NORMAL, weight="bold")
        top += HEAD
        for reading in readings:
            _reading(sheet, reading, top)
            top += _tall(reading)
    return sheet.figure


def _softmax(sheet: Sheet, found: Retrieval, top: float) -> None:
    heading = "Second level: softmax over the prompt, a row for each head"
    sheet.text(MARGIN, top + 0.1, heading, size=NORMAL, weight="bold")
    left, count = MARGIN + 0.5, len(found.tokens)
    pitch = (WIDTH - MARGIN - left) / max(count, 1)
    axes = sheet.axes(left, top + HEAD + ROW, pitch * count, ROW * len(found.shares))
    blues = LinearSegmentedColormap.from_list("shares", [GROUND, SERIES[0]])
    axes.imshow(found.shares, cmap=blues, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.spines[:].set(visible=True, color=FAINT, linewidth=0.4)
    for place, token in enumerate(found.tokens):
        marked = place in found.attended or place == count - 1
        style = {"weight": "bold", "color": SERIES[5]} if marked else {"color": INK}
        sheet.text(left + (place + 0.5) * pitch, top + HEAD + ROW / 2, token, ha="center", **style)
    for head in range(len(found.shares)):
        sheet.text(left - 0.06, top + HEAD + ROW * (head + 1.5), f"head {head}", ha="right", color=FAINT)


def _reading(sheet: Sheet, reading: Reading, top: float) -> None:
    sheet.text(MARGIN, top + LINE / 2, reading.name, weight="bold")
    for row, spot in enumerate(reading.spots):
        _spot(sheet, spot, top + LINE * (row + 0.5))


def _spot(sheet: Sheet, spot: Spot, middle: float) -> None:
    sheet.text(NAMES, middle, short(spot.weight), ha="right", color=FAINT)
    half = width_of(spot.token, bold=True) / 2 + 0.02
    before, after = (re.sub(r"\s+", " ", part) for part in (spot.before, spot.after))
    sheet.text(TOKEN - half, middle, _fitting(before, TOKEN - half - NAMES - 0.15, from_end=True), ha="right")
    sheet.text(TOKEN, middle, spot.token, ha="center", weight="bold", color=SERIES[5])
    sheet.text(TOKEN + half, middle, _fitting(after, END - TOKEN - half, from_end=False))
    sheet.text(END + 0.12, middle, shortened(spot.title, WIDTH - MARGIN - END - 0.12), color=FAINT)


def _fitting(content: str, width: float, *, from_end: bool) -> str:
    """As much of it as fits, from its end or its beginning."""
    parts = range(len(content))
    kept = bisect_left(parts, True, key=lambda n: width_of(content[-n - 1 :] if from_end else content[: n + 1]) > width)
    return content[len(content) - kept :] if from_end else content[:kept]


def _tall(reading: Reading) -> float:
    return LINE * max(len(reading.spots), 1) + GAP
