"""The audit: do the recorded slots explain the gradient that the optimizer saw? (Freivalds' check.)

For a private random matrix R, grad @ R must equal Σ error_signal ⊗ (key · R): a matrix–vector product instead of a
matrix product. Between backward passes a gradient may be scaled, zeroed, clipped or averaged; one number for each
share of that chain is found by least squares, and what remains is the residual.

Every comparison is relative to the sizes of the terms, after they were scaled: a loss scale of 65,536 or a norm clipped to 1e-8 is ordinary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dualform.projection import SLACK, UNDERFLOW, Projected

COARSE_SLACK = 8.0
"""How many 16-bit roundoffs of its own norm a gradient may be off that was computed under autocast."""
SURE = 4.0
"""A factor within this many standard errors of 1 is 1."""
EVENLY_SPREAD = math.sqrt(3)
"""What is off by up to 1, evenly spread, is off by 1 / √3 as a rule."""
LARGEST_FACTOR = 1024.0
"""A gradient that is rounding alone may have been multiplied by up to this much after its backward pass, if no other gradient tells by what: by
the number of processes or of micro-batches, or by the inverse of a loss scale."""
MUCH_LEFT = 2.0
"""A gradient and its slots may be two different roundings of nothing: what remains is as large as both. More is a wrong factor."""
SAME_FACTOR = 1 / 64
"""Factors that differ by less than this part are one: 16 bits do not tell them apart."""
BETTER = 16.0
"""A gradient whose signal is this many times as large tells better by what both were scaled."""


@dataclass(slots=True)
class Share:
    """One backward pass, as seen through R: what was in .grad before it, and what its slots say was added."""

    before: Projected | None
    """grad @ R before this pass added to it; None: there was no gradient."""
    added: Projected
    """Σ error_signal ⊗ (key · R)."""
    scale: float
    """A bound on the sum of the absolute terms of `added`."""
    coarse: float = 0.0
    """A bound on what rounding to 16 bits did to this pass's gradient, seen through R (autocast); 0: it was not rounded so."""
    common: float = 0.0
    """The part of it that may be the same in all equations: keys or error signals that were rounded otherwise than in the training."""


@dataclass(slots=True)
class Verdict:
    """How the slots explain a gradient."""

    factors: list[float]
    """One for each backward pass; 0: its gradient was thrown away."""
    residual: float
    """‖gradient − explanation‖ / ‖gradient‖, seen through R (0 where there is nothing to explain)."""
    explained: bool
    """Whether what remains is rounding."""
    signal: float = math.inf
    """‖explanation‖ before the last scaling, relative to its own rounding. Below 1 it is noise, and the last factor means nothing."""
    size: float = 0.0
    """‖gradient @ R‖."""
    is_vague: bool = False
    """Whether its factor may be off by more than the residual tells, since all equations may share an error."""

    @property
    def determined(self) -> bool:
        """Whether the gradient is larger than its rounding, so that its factor means something."""
        return self.signal > 1


@dataclass(slots=True)
class _Sum:
    """What some passes should have left in .grad, and how far rounding may have moved it."""

    expected: Projected
    scale: float = 0.0
    coarse: float = 0.0
    common: float = 0.0

    def plus(self, share: Share) -> _Sum:
        return _Sum(
            expected=self.expected + share.added,
            scale=self.scale + share.scale,
            coarse=self.coarse + share.coarse,
            common=self.common + share.common,
        )

    @staticmethod
    def of(share: Share) -> _Sum:
        return _Sum(share.added, share.scale, share.coarse, share.common)

    def times(self, ratio: float) -> _Sum:
        if ratio == 1:
            return self
        if ratio == 0:  # thrown away: gone, even if it was not finite
            return _Sum(np.zeros_like(self.expected))
        size = abs(ratio)
        return _Sum(self.expected * ratio, self.scale * size, self.coarse * size, self.common * size)

    def rounding(self, roundoff: float) -> float:
        return SLACK * roundoff * self.scale + self.coarse

    def error_of_factor(self) -> float:
        """By which part of itself a factor may be off, as a rule, that was fitted to a gradient of 16 bits.

        Each entry was rounded on its own. Many entries tell a factor well; where one is nearly the whole gradient, the factor takes up its rounding,
        and no residual shows it.
        """
        squares = self.expected * self.expected
        whole = float(squares.sum())
        if not self.coarse or not math.isfinite(whole) or whole == 0:
            return 0.0
        of_one = (self.coarse - self.common) / COARSE_SLACK / math.sqrt(whole)
        return of_one / EVENLY_SPREAD * math.sqrt(float(squares @ squares)) / whole

    def signal(self, roundoff: float) -> float:
        """Its size relative to its rounding; 0 where nothing can be said."""
        size = math.sqrt(float(self.expected @ self.expected))
        rounding = self.rounding(roundoff)
        if not math.isfinite(size) or size == 0 or math.isnan(rounding):
            return 0.0
        return size / rounding if rounding > 0 else math.inf


def coarse_error(size: float, numel: int, dtype: torch.dtype, partial_sums: int = 1) -> float:
    """How far rounding to a 16-bit type may move a gradient, seen through R.

    size: ‖gradient @ R‖, which is about ‖gradient‖ since the entries of R are about 1. partial_sums: how many sums were each rounded
    before they were added up; a convolution may round once for each image.
    """
    info = torch.finfo(dtype)
    relative = info.eps / 2 * math.sqrt(max(1, partial_sums)) * size
    smallest = info.tiny * info.eps  # numbers below it vanish
    underflow = smallest * math.sqrt(numel)
    return COARSE_SLACK * (relative + underflow)


def coarse_error_of_terms(scale: float, dtype: torch.dtype) -> float:
    """How far a sum may move if its terms were rounded to a 16-bit type otherwise than in the training: each term twice, once there and once here.

    scale: a bound on the sum of the absolute terms.
    """
    return torch.finfo(dtype).eps * scale


def unaudited(shares: Sequence[Share]) -> Verdict:
    """For slots without error signals: a pass counts unless its gradient was gone when a later one began."""
    gone = [n for n, share in enumerate(shares) if share.before is None or not share.before.any()]
    factors = [float(n >= max(gone, default=0)) for n in range(len(shares))]
    return Verdict(factors, math.nan, explained=True, size=math.nan)


def explain(shares: Sequence[Share], seen: Projected, roundoff: float, *, last_factor: float | None = None) -> Verdict:
    """Find the factor of each backward pass.

    seen: the gradient at the step, @ R; roundoff: that of the parameter's type. last_factor: by what the gradient, which is not zero, was
    scaled after the last pass, if that is known from other parameters.
    """
    with np.errstate(all="ignore"):  # what has diverged may overflow
        verdict = _chain(shares, seen, roundoff, last_factor)
        return verdict if verdict.explained else _freely_or(verdict, shares, seen, roundoff)


def shared_factors(factors: Projected, signals: Projected, better: float | Projected = BETTER) -> Projected:
    """Let gradients of one update that tell their factor poorly take that of the gradient that tells it best.

    factors, signals: one for each gradient; all are determined. Clipping by norm and loss scaling multiply all gradients alike. A gradient that
    is little more than its rounding knows its own factor to within 1 / signal: it takes the other one if that is within its uncertainty.
    better: how many times as large the best signal must be.
    """
    if len(factors) < 2 or (factors == factors[0]).all():
        return factors
    best = np.argmax(signals)
    factor = factors[best]
    is_better = signals[best] >= better * signals
    agrees = np.abs(factors - factor) * signals <= abs(factor)
    return np.where(is_better & agrees, factor, factors)


def share_factors(verdicts: Sequence[Verdict]) -> None:
    """The same for gradients of any number of passes."""
    some = [one for one in verdicts if one.explained and one.determined and math.isfinite(one.signal)]
    last = np.array([one.factors[-1] for one in some])
    better = np.array([1.0 if one.is_vague else BETTER for one in some])
    shared = shared_factors(last, np.array([one.signal for one in some]), better)
    for one, before, after in zip(some, last.tolist(), shared.tolist(), strict=True):
        if after != before:
            one.factors = [factor * after / before for factor in one.factors]


def likely_factors(verdicts: Sequence[Verdict]) -> list[float]:
    """By what a gradient may have been scaled that does not tell it itself: as other gradients of the update were, the surest first, or not at all.

    Clipping by norm may concern some parameters only.
    """
    # A signal below 1 / SLACK is smaller than a single rounding of its terms: its factor is random
    known = [one for one in verdicts if one.explained and 1 / SLACK < one.signal < math.inf]
    known.sort(key=lambda one: one.signal, reverse=True)
    likely: list[float] = []
    for factor in (*(one.factors[-1] for one in known), 1.0):
        if not any(abs(factor - other) <= SAME_FACTOR * abs(other) for other in likely):
            likely.append(factor)
    return likely


def explain_by_others(shares: Sequence[Share], seen: Projected, roundoff: float, likely: Sequence[float]) -> Verdict:
    """Explain a gradient that is little more than rounding by what other gradients were scaled by (`likely_factors`).

    The surest factor is taken. But the bounds on rounding are wide: under one factor they may explain a gradient of which hundreds of times its
    own size remains, while another factor leaves nearly nothing.
    """
    tried = []
    with np.errstate(all="ignore"):
        for factor in likely:
            verdict = _chain(shares, seen, roundoff, factor)
            if verdict.explained and not verdict.residual > MUCH_LEFT:
                return verdict
            tried.append(verdict)
        best = min(tried, key=lambda one: (not one.explained, one.residual))
        return best if best.explained else _freely_or(best, shares, seen, roundoff)


def explain_rounding(shares: Sequence[Share], seen: Projected, roundoff: float) -> Verdict:
    """Explain a gradient as rounding that was scaled, where no gradient of its update tells by what.

    Its factors are 0: without a factor, nothing is known of what a slot wrote. So this is for gradients that are kept as they were.
    """
    total = _Sum(np.zeros_like(seen))
    for share in shares:
        total = total.plus(share)
    size = math.sqrt(float(seen @ seen))
    is_rounding = size <= LARGEST_FACTOR * total.rounding(roundoff)
    return Verdict([0.0] * len(shares), 1.0, is_rounding, total.signal(roundoff), size)


def _freely_or(verdict: Verdict, shares: Sequence[Share], seen: Projected, roundoff: float) -> Verdict:
    """Return the explanation with a free factor for each backward pass, if it is one, else this verdict."""
    if 1 < len(shares) <= seen.size // 2:
        free = _least_squares(shares, seen, roundoff)
        if free.explained:
            return free
    return verdict


def _chain(shares: Sequence[Share], seen: Projected, roundoff: float, last_factor: float | None) -> Verdict:
    """One number for each share: .grad is scaled as a whole between backward passes."""
    if not shares:
        return _verdict([], seen, _Sum(np.zeros_like(seen)), roundoff, signal=0.0)
    # What was in .grad before the first pass nothing explains
    total = _Sum.of(shares[0])
    factors = [1.0]
    for share in shares[1:]:
        between = _between(share, total, roundoff)
        factors = [factor * between for factor in factors]
        total = total.times(between).plus(share)
        factors.append(1.0)
    signal = total.signal(roundoff)
    ratio = _ratio(seen, total, roundoff) if last_factor is None else last_factor
    factors = [factor * ratio for factor in factors]
    is_fitted = last_factor is None and ratio not in (0.0, 1.0)
    swallowed = total.error_of_factor() if is_fitted else 0.0
    return _verdict(factors, seen, total.times(ratio), roundoff, signal, swallowed)


def _least_squares(shares: Sequence[Share], seen: Projected, roundoff: float) -> Verdict:
    """A free factor for each backward pass: gradients kept aside and put together again."""
    nothing = _Sum(np.zeros_like(seen))
    terms = np.stack([share.added for share in shares], axis=1)
    if not np.isfinite(terms).all() or not np.isfinite(seen).all():
        return _verdict([0.0] * len(shares), seen, nothing, roundoff, signal=0.0)
    # Passes that nearly say the same thing are told apart by their rounding alone: huge factors that cancel would explain anything
    rounding = math.hypot(*(_Sum(share.added, share.scale, share.coarse).rounding(roundoff) for share in shares))
    largest = float(np.linalg.norm(terms, 2))
    cutoff = rounding / largest if largest else None
    factors: list[float] = np.linalg.lstsq(terms, seen, rcond=cutoff)[0].tolist()
    total = nothing
    for factor, share in zip(factors, shares, strict=True):
        scaled = _Sum(share.added, share.scale, share.coarse).times(factor)
        total = _Sum(total.expected + scaled.expected, total.scale + scaled.scale, total.coarse + scaled.coarse)
    return _verdict(factors, seen, total, roundoff, signal=math.inf)


def _between(share: Share, total: _Sum, roundoff: float) -> float:
    """By what the gradient of earlier passes was multiplied before this one."""
    if share.before is None:
        return 0.0
    if not share.before.any():
        # A gradient that was zero from the beginning need not have been thrown away
        return 0.0 if total.expected.any() else 1.0
    ratio = _ratio(share.before, total, roundoff)
    # What rounding explains does not tell that a gradient was scaled
    return 1.0 if abs(ratio - 1) * total.signal(roundoff) <= 1 else ratio


def _ratio(after: Projected, total: _Sum, roundoff: float) -> float:
    """The number by which what was expected was multiplied."""
    expected = total.expected
    square = float(expected @ expected)
    if not math.isfinite(square) or square == 0:
        return 1.0
    if not float(after @ after):
        return 0.0
    ratio = float(after @ expected) / square
    uncertainty = 16 * roundoff
    if total.coarse:
        # Of a gradient that was rounded to 16 bits the factor is known up to its standard error only
        rest = after - ratio * expected
        measured = math.sqrt(float((expected * rest) @ (expected * rest))) / square
        uncertainty += SURE * max(measured, total.error_of_factor())
        uncertainty += total.common / math.sqrt(square)
    return 1.0 if abs(ratio - 1) <= uncertainty else ratio


def _verdict(
    factors: list[float], seen: Projected, total: _Sum, roundoff: float, signal: float, swallowed: float = 0.0
) -> Verdict:
    """swallowed: which part of the gradient may be rounding that a fitted factor has taken up."""
    size = math.sqrt(float(seen @ seen))
    if not math.isfinite(size):  # non-finite gradients are recorded as they are; nothing can be proved about them
        return Verdict(factors, math.nan, explained=True, signal=0.0, size=size)
    rest = seen - total.expected
    left = math.sqrt(float(rest @ rest))
    explained = left <= max(total.rounding(roundoff), SLACK * roundoff * size, UNDERFLOW)
    residual = math.hypot(left / size, swallowed) if size else 0.0
    return Verdict(factors, residual, explained, signal, size, is_vague=total.common > 0)
