"""Top matches: the training examples that each layer attends to most, for one test image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from dualform.figures.colours import FAINT, INK, colour_of
from dualform.figures.lettering import LINE, NORMAL, SMALL, shortened, width_of
from dualform.figures.numerals import short
from dualform.figures.results import Image
from dualform.figures.sheet import MARGIN, WIDTH, Sheet, titled, write
from dualform_paper.figures.partition import title_of
from dualform_paper.figures.results import LayerMatches, Match

TEST, LEFT = 1.2, 1.72
"""Inches: the size of the test image, and where the matches begin."""
HEAD, BELOW = 0.28, 0.14
"""Inches: the words above a row, and what stays free below it."""
WIDEST, LARGEST = 0.92, 0.6
"""Inches: the most that a match and its image take."""


def save(layers: Sequence[LayerMatches], test_image: Image, title: str, stem: Path) -> list[Path]:
    """Draw and save `stem`.png and `stem`.svg."""
    return write(lambda: draw(layers, test_image, title), stem)


def draw(layers: Sequence[LayerMatches], test_image: Image, title: str) -> Figure:
    """The test image at the left; of each layer the top slots and, below or beside them, the top images."""
    rows = [row for layer in layers for row in (layer.by_slot, layer.by_image)]
    plan = Plan(max(map(len, rows), default=0), any(_named(match) for row in rows for match in row))
    sheet, top = titled(title, max(plan.layer * len(layers), TEST + HEAD) + 0.1)
    sheet.text(MARGIN, top + 0.16, "test image", color=FAINT, size=NORMAL)
    sheet.picture(MARGIN, top + HEAD, TEST, test_image, INK, 1.5)
    for number, layer in enumerate(layers):
        begin = top + plan.layer * number
        if number:
            sheet.rule(begin, LEFT)
        sheet.text(LEFT, begin + 0.16, layer.layer, size=NORMAL, weight="bold")
        after = LEFT + width_of(layer.layer, NORMAL, bold=True) + 0.12
        sheet.text(after, begin + 0.16, "slots with the highest weight", color=FAINT, size=NORMAL)
        for place, match in enumerate(layer.by_slot):
            _match(sheet, match, f"step {match.step}", LEFT + place * plan.pitch, begin + HEAD, plan)
        left, below = LEFT + plan.across, begin + plan.down
        sheet.text(left, below + 0.16, "images with the highest sum over all visits", color=FAINT, size=NORMAL)
        for place, match in enumerate(layer.by_image):
            visits = f"{match.visits} visit{'' if match.visits == 1 else 's'}"
            _match(sheet, match, visits, left + place * plan.pitch, below + HEAD, plan)
    return sheet.figure


class Plan:
    """Inches: how far matches stand apart, and where the second row of a layer begins, seen from the first."""

    def __init__(self, most: int, named: bool):
        half = (WIDTH - LEFT - MARGIN) / 2
        beside = most * WIDEST <= half
        self.named = named
        self.pitch = WIDEST if beside else min(WIDEST, 2 * half / most)
        self.size = min(LARGEST, 0.86 * self.pitch)
        row = HEAD + self.size + (3 if named else 2) * LINE + BELOW
        self.across, self.down = (half, 0.0) if beside else (0.0, row)
        self.layer = row + self.down


def _match(sheet: Sheet, match: Match, when: str, left: float, top: float, plan: Plan) -> None:
    sheet.picture(left, top, plan.size, match.image, colour_of(match.label), 2.0)
    below = top + plan.size + 0.12
    sheet.badge(left + 0.055, below, match.label, SMALL)
    sheet.text(left + plan.size, below, short(match.weight), ha="right")
    if plan.named:
        name = match.name if _named(match) else title_of(match.dataset)
        sheet.text(left, below + LINE, shortened(name, plan.pitch - 0.05))
    sheet.text(left, below + (2 if plan.named else 1) * LINE, shortened(when, plan.pitch - 0.05), color=FAINT)


def _named(match: Match) -> bool:
    """Whether its class has a name beside its number."""
    return match.name != str(match.label)
