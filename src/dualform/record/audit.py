"""The audit: do the recorded slots explain the gradient that the optimizer saw? (Freivalds' check.)

For a private random matrix R, grad @ R must equal Σ error_signal ⊗ (key · R): a matrix–vector product instead of a
matrix product. Between backward passes a gradient may be scaled, zeroed, clipped or averaged; one number for each
link of that chain is found by least squares, and what remains is the residual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Seen = np.ndarray[Any, np.dtype[np.float64]]
"""A parameter-shaped tensor seen through R: (d_out × k,)."""
Looked = np.ndarray[Any, np.dtype[np.floating[Any]]]
"""The same in the parameter's own type; may share its memory."""

EQUATIONS = 16
"""At least this many equations check a weight: R gets more columns if it has few outputs."""
SLACK = 64.0
"""How many unit roundoffs, relative to the sum of absolute terms, pass as rounding."""


@dataclass(slots=True)
class Link:
    """One backward pass, as seen through R: what was in .grad before it, and what its slots say was added."""

    before: Seen | None
    """grad @ R before this pass added to it; None: there was no gradient."""
    added: Seen
    """Σ error_signal ⊗ (key · R)."""
    scale: float
    """A bound on the sum of the absolute terms of `added`."""


@dataclass(slots=True)
class Verdict:
    """How the slots explain a gradient."""

    factors: list[float]
    """One for each backward pass; 0: its gradient was thrown away."""
    residual: float
    """‖gradient − explanation‖ / ‖gradient‖, seen through R (0 where there is nothing to explain)."""
    explained: bool
    """Whether what remains is rounding."""
    determined: bool
    """Whether the gradient is larger than its rounding, so that its factor means something."""


def random_columns(d_in: int, d_out: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """R: (d_in, k), entries ±1, from a generator of our own; column after column in memory, for fast products."""
    columns = max(1, min(d_in, math.ceil(EQUATIONS / max(d_out, 1))))
    signs = torch.randint(0, 2, (d_in, columns), generator=generator)
    return (2 * signs - 1).to(dtype).T.contiguous().T


def unaudited(links: Sequence[Link]) -> Verdict:
    """For slots without error signals: a pass counts unless its gradient was gone when a later one began."""
    gone = [n for n, link in enumerate(links) if link.before is None or not link.before.any()]
    return Verdict([float(n >= max(gone, default=0)) for n in range(len(links))], math.nan, True, True)


def explain(links: Sequence[Link], looked: Looked, roundoff: float) -> Verdict:
    """Find the factor of each backward pass. looked: the gradient at the step, @ R."""
    seen = looked.astype(np.float64, copy=False)
    with np.errstate(all="ignore"):  # what has diverged may overflow
        verdict = _chain(links, seen, roundoff)
        if not verdict.explained and 1 < len(links) <= seen.size // 2:
            free = _least_squares(links, seen, roundoff)
            if free.explained:
                return free
    return verdict


def _chain(links: Sequence[Link], seen: Seen, roundoff: float) -> Verdict:
    """One number for each link: .grad is scaled as a whole between backward passes."""
    expected, scale = (links[0].added, links[0].scale) if links else (np.zeros_like(seen), 0.0)
    factors = [1.0] * len(links[:1])  # what was in .grad before the first pass nobody explains
    for link in links[1:]:
        ratio = 0.0 if link.before is None else _ratio(link.before, expected, scale, roundoff)[0]
        factors = [f * ratio for f in factors] + [1.0]
        expected = _scaled(expected, ratio) + link.added
        scale = _scaled(scale, ratio) + link.scale
    ratio, determined = _ratio(seen, expected, scale, roundoff)
    factors = [f * ratio for f in factors]
    return _verdict(factors, seen, _scaled(expected, ratio), _scaled(scale, ratio), roundoff, determined)


S = TypeVar("S", Seen, float)


def _scaled(value: S, ratio: float) -> S:
    """value × ratio, where what was thrown away is gone even if it was not finite."""
    if isinstance(value, float):
        return value * abs(ratio) if ratio else 0.0
    return value * ratio if ratio else np.zeros_like(value)


def _least_squares(links: Sequence[Link], seen: Seen, roundoff: float) -> Verdict:
    """A free factor for each backward pass: gradients kept aside and put together again."""
    terms = np.stack([link.added for link in links], axis=1)
    if not np.isfinite(terms).all() or not np.isfinite(seen).all():
        return _verdict([0.0] * len(links), seen, np.zeros_like(seen), 0.0, roundoff, False)
    solution = np.linalg.lstsq(terms, seen, rcond=None)[0]
    factors: list[float] = solution.tolist()
    scale = sum(abs(f) * link.scale for f, link in zip(factors, links, strict=True))
    return _verdict(factors, seen, terms @ solution, scale, roundoff, True)


def _ratio(after: Seen, expected: Seen, scale: float, roundoff: float) -> tuple[float, bool]:
    """The number by which `expected` was multiplied, and whether it stands above the rounding."""
    square = float(expected @ expected)
    if not math.isfinite(square) or square == 0:
        return 1.0, False
    if not float(after @ after):
        return 0.0, True
    size, rounding = math.sqrt(square), SLACK * roundoff * scale
    if size <= rounding:
        return 1.0, False
    ratio = float(after @ expected) / square
    if abs(ratio - 1) <= 16 * roundoff:
        return 1.0, True
    if abs(ratio) * size <= rounding:
        return 0.0, True
    return ratio, math.isfinite(ratio)


def _verdict(
    factors: list[float], seen: Seen, expected: Seen, scale: float, roundoff: float, determined: bool
) -> Verdict:
    size = math.sqrt(float(seen @ seen))
    if not math.isfinite(size):  # non-finite gradients are recorded as they are; nothing can be proved about them
        return Verdict(factors, math.nan, True, False)
    rest = seen - expected
    left = math.sqrt(float(rest @ rest))
    explained = left <= SLACK * roundoff * max(scale, size)
    return Verdict(factors, left / size if size else 0.0, explained, determined)
