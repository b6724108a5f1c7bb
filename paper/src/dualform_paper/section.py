"""A section of a report: a heading, what was found, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Section:
    """What a report takes."""

    title: str
    text: str
    """Markdown without the heading."""
    data: dict[str, Any] = field(default_factory=dict)
    """Plain data. "curves": what can be drawn, each with "x" and "y" (lists), by the name of a line; "axes": their labels, and "log_y"."""

    @property
    def markdown(self) -> str:
        """The whole section, with its heading."""
        return f"## {self.title}\n\n{self.text}\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A Markdown table; the first columns (so many) are words, the others are numbers."""
    rule = [*["---"] * words, *["--:"] * (len(header) - words)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def percent(share: float) -> str:
    """0.948 as 94.8 %."""
    return f"{100 * share:.1f} %"
