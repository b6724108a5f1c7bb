"""Several seeds as one: mean and deviation of every number."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any

MeanStd = tuple[float, float]


def over(seeds: Sequence[dict[str, Any]], *path: Any) -> MeanStd:
    """Mean and sample deviation of the number at a path, e.g. over(seeds, "datasets", "mnist", "accuracy"), over those that have it."""
    return mean_std(_found(seeds, path))


def lists_over(seeds: Sequence[dict[str, Any]], *path: Any) -> list[float]:
    """The mean of the lists at a path, entry by entry."""
    return [statistics.fmean(entries) for entries in zip(*_found(seeds, path), strict=True)]


def mean_std(numbers: Sequence[float]) -> MeanStd:
    """Of those that are numbers at all; one number has no deviation (nan)."""
    known = [n for n in numbers if not math.isnan(n)]
    if not known:
        return math.nan, math.nan
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else math.nan


def written(found: MeanStd, digits: int = 1, scale: float = 1.0) -> str:
    """12.3 ± 0.4, or 12.3 where there is no deviation."""
    if math.isnan(found[0]):
        return "–"
    if math.isnan(found[1]):
        return f"{found[0] * scale:.{digits}f}"
    return f"{found[0] * scale:.{digits}f} ± {found[1] * scale:.{digits}f}"


def _found(seeds: Sequence[dict[str, Any]], path: Sequence[Any]) -> list[Any]:
    found = []
    for value in seeds:
        with contextlib.suppress(KeyError):  # some things are measured on one seed only
            found.append(functools.reduce(lambda part, key: part[key], path, value))
    return found
