"""Numbers as a figure writes them."""

from __future__ import annotations

from collections.abc import Sequence

UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def signed(number: float, digits: int) -> str:
    """With its sign, and so many digits after the point."""
    return f"{number:+.{digits}f}".replace("-", "−")


def short(number: float) -> str:
    """At most four characters and a sign."""
    for limit, unit in UNITS:
        if abs(number) >= limit:
            scaled = number / limit
            written = f"{scaled:.1f}{unit}" if abs(scaled) < 9.95 else f"{scaled:.0f}{unit}"
            return written.replace("-", "−")
    return (f"{number:.1f}" if abs(number) < 99.95 else f"{number:.0f}").replace("-", "−")


def together(numbers: Sequence[float]) -> list[str]:
    """The numbers of an axis, all in the unit that fits the largest."""
    largest = max((abs(number) for number in numbers), default=0.0)
    scale, unit = next(((limit, unit) for limit, unit in UNITS if largest >= limit), (1.0, ""))
    return [f"{number / scale:.6g}{unit}".replace("-", "−") if number else "0" for number in numbers]


def alike(numbers: Sequence[float]) -> list[str]:
    """Numbers side by side: one digit after the point, or two where all are smaller than one."""
    digits = 1 if max((abs(number) for number in numbers), default=0.0) >= 1 else 2
    return [f"{round(number, digits) + 0.0:.{digits}f}".replace("-", "−") for number in numbers]
