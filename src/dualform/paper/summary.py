"""Several seeds as one: mean and deviation of every number."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

MeanStd = tuple[float, float]


def over(seeds: Sequence[dict[str, Any]], *path: Any) -> MeanStd:
    """Mean and sample deviation (0 for one seed) of the number at a path, e.g. over(seeds, "datasets", "mnist", "accuracy")."""
    return mean_std([_at(one, path) for one in seeds])


def lists_over(seeds: Sequence[dict[str, Any]], *path: Any) -> list[float]:
    """The mean of the lists at a path, entry by entry."""
    found = [_at(one, path) for one in seeds]
    return [statistics.fmean(entries) for entries in zip(*found, strict=True)]


def mean_std(numbers: Sequence[float]) -> MeanStd:
    """Of those that are numbers at all."""
    known = [n for n in numbers if not math.isnan(n)]
    if not known:
        return math.nan, math.nan
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0


def written(found: MeanStd, digits: int = 1, scale: float = 1.0) -> str:
    """12.3 ± 0.4."""
    if math.isnan(found[0]):
        return "–"
    return f"{found[0] * scale:.{digits}f} ± {found[1] * scale:.{digits}f}"


def _at(value: Any, path: Sequence[Any]) -> Any:
    for key in path:
        value = value[key]
    return value
