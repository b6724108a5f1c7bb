"""An axis partitioned by class: the classes of one dataset, then those of the next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dualform.figures.colours import FAINT, colour_of
from dualform.figures.lettering import LONGEST, SLANTED, SMALL, depth_of, shortened
from dualform.figures.sheet import Sheet, badge_style
from dualform_paper.figures.results import Group

DATASETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
"""How a dataset is written; others are written as they are."""
HATCHES = (None, "/////", ".....")
"""Of each dataset, in order; they repeat."""
BETWEEN, ENDS = 0.7, 0.6
"""In widths of a class: what stays free between two datasets, and from the middle of the outer classes to the ends."""


def title_of(dataset: str) -> str:
    """How a dataset is written."""
    return DATASETS.get(dataset, dataset)


def class_of(group: Group) -> str:
    """A class in words, so that nobody takes it for another dataset's."""
    number = "" if group.name == str(group.label) else f" ({group.label})"
    return f"{title_of(group.dataset)} {group.name}{number}"


class Partition:
    """Where each class stands on the axis, in widths of a class."""

    def __init__(self, groups: Iterable[Group]):
        distinct = tuple(dict.fromkeys(groups))
        self.datasets = tuple(dict.fromkeys(group.dataset for group in distinct))
        self.groups = tuple(group for dataset in self.datasets for group in distinct if group.dataset == dataset)
        self.places = {
            group: number + BETWEEN * self.datasets.index(group.dataset) for number, group in enumerate(self.groups)
        }
        self.limits = (-ENDS, max(self.places.values(), default=0.0) + ENDS)

    def style(self, group: Group) -> dict[str, Any]:
        """How a class's area is filled: its colour, hatched in the second dataset."""
        hatch = HATCHES[self.datasets.index(group.dataset) % len(HATCHES)]
        return {"facecolor": colour_of(group.label), "edgecolor": "white", "linewidth": 0.0, "hatch": hatch}

    @property
    def depth(self) -> float:
        """Inches that the slanted names take."""
        return depth_of([group.name for group in self._named()])

    def put_on(self, axes: Any) -> None:
        """Limits, the classes' numbers in their colours, and a line between datasets."""
        axes.set_xlim(*self.limits)
        axes.set_xticks([self.places[group] for group in self.groups], [str(group.label) for group in self.groups])
        axes.tick_params(axis="x", length=0, pad=5)
        for tick, group in zip(axes.get_xticklabels(), self.groups, strict=True):
            tick.set(size=SMALL, **badge_style(group.label))
        for dataset in self.datasets[1:]:
            first = min(self.places[group] for group in self.groups if group.dataset == dataset)
            axes.axvline(first - (1 + BETWEEN) / 2, color=FAINT, linewidth=0.8)

    def headers(self, sheet: Sheet, top: float, left: float, width: float) -> None:
        """The datasets, each above the middle of its classes."""
        for dataset in self.datasets:
            inside = [self.places[group] for group in self.groups if group.dataset == dataset]
            middle = (inside[0] + inside[-1]) / 2
            sheet.text(self._inches(middle, left, width), top, title_of(dataset), ha="center", weight="bold")

    def names(self, sheet: Sheet, top: float, left: float, width: float) -> None:
        """The classes' names, slanted, each ending below its class; a digit's name is its number."""
        for group in self._named():
            place = self._inches(self.places[group], left, width) + 0.05
            sheet.text(place, top, shortened(group.name, LONGEST), **SLANTED)

    def _named(self) -> list[Group]:
        return [group for group in self.groups if group.name != str(group.label)]

    def _inches(self, place: float, left: float, width: float) -> float:
        low, high = self.limits
        return left + (place - low) / (high - low) * width
