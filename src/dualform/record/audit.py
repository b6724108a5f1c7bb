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

from dualform.projection import SLACK, Projected

COARSE_SLACK = 8.0
"""How many 16-bit roundoffs of its own norm a gradient may be off that was computed under autocast."""
UNDERFLOW = 1e-35
"""A rest this small is no reason to refuse a gradient: below 1e-38, float32 loses digits, and soon all of them."""
SURE = 4.0
"""A factor within this many standard errors of 1 is 1."""
LARGEST_FACTOR = 1024.0
"""A gradient that is rounding alone may have been multiplied by up to this much after its backward pass, if no other gradient tells by what: by
the number of processes or of micro-batches, or by the inverse of a loss scale."""
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

    @property
    def is_measured(self) -> bool:
        """Whether its last factor was measured from the gradient, up to a known error."""
        return self.explained and self.determined and math.isfinite(self.signal)


@dataclass(slots=True)
class _Sum:
    """What some passes should have left in .grad, and how far rounding may have moved it."""

    expected: Projected
    roundoff: float
    scale: float = 0.0
    coarse: float = 0.0
    common: float = 0.0
    """The last three: as Share has them."""

    def plus(self, other: _Sum) -> _Sum:
        return _Sum(
            expected=self.expected + other.expected,
            roundoff=self.roundoff,
            scale=self.scale + other.scale,
            coarse=self.coarse + other.coarse,
            common=self.common + other.common,
        )

    def times(self, factor: float) -> _Sum:
        if factor == 0:  # thrown away: gone, even if it was not finite
            return _Sum(np.zeros_like(self.expected), self.roundoff)
        size = abs(factor)
        return _Sum(
            expected=self.expected * factor,
            roundoff=self.roundoff,
            scale=self.scale * size,
            coarse=self.coarse * size,
            common=self.common * size,
        )

    @property
    def rounding(self) -> float:
        """How far rounding may have moved it."""
        return SLACK * self.roundoff * self.scale + self.coarse

    @property
    def signal(self) -> float:
        """Its size relative to its rounding; 0 where nothing can be said."""
        size = _norm(self.expected)
        rounding = self.rounding
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
    first = 0
    for number, share in enumerate(shares):
        if share.before is None or not share.before.any():
            first = number
    factors = [float(number >= first) for number in range(len(shares))]
    return Verdict(factors, math.nan, explained=True, size=math.nan)


def explain(
    shares: Sequence[Share], projected: Projected, roundoff: float, *, last_factor: float | None = None
) -> Verdict:
    """Find the factor of each backward pass.

    projected: the gradient at the step, @ R; roundoff: that of the parameter's type. last_factor: what the gradient, which is not zero, was
    multiplied by after the last pass, if that is known from other parameters.
    """
    with np.errstate(all="ignore"):  # what has diverged may overflow
        verdict = _chain(shares, projected, roundoff, last_factor)
        has_enough_equations = 1 < len(shares) <= projected.size // 2
        if has_enough_equations and not verdict.explained:
            free = _least_squares(shares, projected, roundoff)
            if free.explained:
                return free
    return verdict


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
    measured = [verdict for verdict in verdicts if verdict.is_measured]
    factors = np.array([verdict.factors[-1] for verdict in measured])
    signals = np.array([verdict.signal for verdict in measured])
    better = np.array([1.0 if verdict.is_vague else BETTER for verdict in measured])
    shared = shared_factors(factors, signals, better)
    for verdict, after in zip(measured, shared.tolist(), strict=True):
        before = verdict.factors[-1]
        if after != before:
            verdict.factors = [factor * after / before for factor in verdict.factors]


def likely_factors(verdicts: Sequence[Verdict]) -> list[float]:
    """What a gradient may have been multiplied by that does not tell it itself: what other gradients of the update were, the surest first, or 1.

    Clipping by norm may concern some parameters only.
    """
    # A signal below 1 / SLACK is smaller than a single rounding of its terms: its factor is random
    known = [verdict for verdict in verdicts if verdict.explained and 1 / SLACK < verdict.signal < math.inf]
    known.sort(key=lambda verdict: verdict.signal, reverse=True)
    factors = [verdict.factors[-1] for verdict in known]
    return list(dict.fromkeys([*factors, 1.0]))


def explain_rounding(shares: Sequence[Share], projected: Projected, roundoff: float) -> Verdict:
    """Explain a gradient as rounding that was multiplied by something, where no gradient of its update tells by what.

    Its factors are 0: without a factor, nothing is known of what a slot wrote. So this is for gradients that are stored themselves.
    """
    total = _nothing(projected, roundoff)
    for share in shares:
        total = total.plus(_sum_of(share, roundoff))
    size = _norm(projected)
    is_rounding = size <= LARGEST_FACTOR * total.rounding
    return Verdict([0.0] * len(shares), 1.0, is_rounding, total.signal, size)


def _chain(shares: Sequence[Share], projected: Projected, roundoff: float, last_factor: float | None) -> Verdict:
    """One number for each share: .grad is scaled as a whole between backward passes."""
    total = _nothing(projected, roundoff)
    factors: list[float] = []
    for share in shares:
        if factors:  # nothing explains what was in .grad before the first pass
            between = _factor_between(total, share)
            factors = [factor * between for factor in factors]
            total = total.times(between)
        factors.append(1.0)
        total = total.plus(_sum_of(share, roundoff))
    last = _ratio(projected, total) if last_factor is None else last_factor
    factors = [factor * last for factor in factors]
    return _verdict(factors, projected, total.times(last), total.signal)


def _least_squares(shares: Sequence[Share], projected: Projected, roundoff: float) -> Verdict:
    """A free factor for each backward pass: gradients kept aside and put together again."""
    total = _nothing(projected, roundoff)
    terms = np.stack([share.added for share in shares], axis=1)
    if not np.isfinite(terms).all() or not np.isfinite(projected).all():
        return _verdict([0.0] * len(shares), projected, total, signal=0.0)
    # Passes that nearly say the same thing are told apart by their rounding alone: huge factors that cancel would explain anything
    sums = [_sum_of(share, roundoff) for share in shares]
    rounding = math.hypot(*[of_pass.rounding for of_pass in sums])
    largest = float(np.linalg.norm(terms, 2))
    cutoff = rounding / largest if largest else None
    factors: list[float] = np.linalg.lstsq(terms, projected, rcond=cutoff)[0].tolist()
    for factor, of_pass in zip(factors, sums, strict=True):
        total = total.plus(of_pass.times(factor))
    return _verdict(factors, projected, total, signal=math.inf)


def _factor_between(total: _Sum, share: Share) -> float:
    """What the gradient of earlier passes was multiplied by before this one."""
    if share.before is None:
        return 0.0
    if not share.before.any():
        # A gradient that was zero from the beginning need not have been thrown away
        return 0.0 if total.expected.any() else 1.0
    ratio = _ratio(share.before, total)
    # A difference that rounding explains does not tell that a gradient was scaled
    is_rounding = abs(ratio - 1) * total.signal <= 1
    return 1.0 if is_rounding else ratio


def _ratio(after: Projected, total: _Sum) -> float:
    """The number that what was expected was multiplied by."""
    expected = total.expected
    square = float(expected @ expected)
    if not math.isfinite(square) or square == 0:
        return 1.0
    if not float(after @ after):
        return 0.0
    ratio = float(after @ expected) / square
    uncertainty = 16 * total.roundoff
    if total.coarse:
        # The factor of a gradient that was rounded to 16 bits is known up to its standard error only
        rest = after - ratio * expected
        uncertainty += SURE * _norm(expected * rest) / square
        uncertainty += total.common / math.sqrt(square)
    return 1.0 if abs(ratio - 1) <= uncertainty else ratio


def _verdict(factors: list[float], projected: Projected, total: _Sum, signal: float) -> Verdict:
    size = _norm(projected)
    if not math.isfinite(size):  # non-finite gradients are recorded as they are; nothing can be proved about them
        return Verdict(factors, math.nan, explained=True, signal=0.0, size=size)
    rest = _norm(projected - total.expected)
    is_explained = rest <= max(total.rounding, SLACK * total.roundoff * size, UNDERFLOW)
    residual = rest / size if size else 0.0
    return Verdict(factors, residual, is_explained, signal, size, is_vague=total.common > 0)


def _nothing(like: Projected, roundoff: float) -> _Sum:
    """The sum of no passes."""
    return _Sum(np.zeros_like(like), roundoff)


def _sum_of(share: Share, roundoff: float) -> _Sum:
    """The sum of a single pass."""
    return _Sum(share.added, roundoff, share.scale, share.coarse, share.common)


def _norm(vector: Projected) -> float:
    return math.sqrt(float(vector @ vector))
