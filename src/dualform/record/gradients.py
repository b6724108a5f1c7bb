"""The gradients that an optimizer is about to use, each explained by the slots of backward passes.

What a gradient was multiplied by after a backward pass (clipping, loss scaling) is found for each gradient by itself (`audit.py`). A
gradient that tells it poorly, since it is little more than rounding, takes it from the other gradients of the same update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dualform.arrays import Array
from dualform.projection import Projected, wide_enough
from dualform.record import audit
from dualform.record.edits import OptimizerWatch
from dualform.record.exchange import Exchange
from dualform.record.optimizers import Numbers
from dualform.record.parameters import PassShare, RecordedParameter

NO_VERDICT = audit.Verdict([], math.nan, explained=False)
"""Of a gradient that is yet to be compared."""


@dataclass(slots=True)
class ExplainedGradient:
    """A gradient, and how the slots explain it."""

    parameter: RecordedParameter
    tensor: Tensor
    projected: Projected
    """The gradient, seen through R."""
    shares: list[PassShare]
    """The backward passes that have added to it."""
    verdict: audit.Verdict
    settings: Numbers
    """The numbers by which the optimizer updates the parameter."""
    unscaled: float
    """What the optimizer multiplies the gradient by before it uses it."""
    ranks: int = 1
    """Over how many ranks `projected` and `shares` are sums; the gradient is the mean."""

    @property
    def is_rounding(self) -> bool:
        """Whether it is not zero, but no larger than the rounding of its terms."""
        return not self.verdict.determined and any(share.scale for share in self.shares)

    @property
    def size(self) -> float:
        """About the norm of the gradient as the optimizer uses it."""
        return self.verdict.size * self.unscaled / self.ranks / math.sqrt(self.parameter.columns)

    def factors(self) -> dict[int, float]:
        """By backward pass: what its part of the gradient is multiplied by. Passes that take no part are left out."""
        factors = {}
        for share, factor in zip(self.shares, self.verdict.factors, strict=True):
            if factor != 0:
                factors[share.task] = factor * self.unscaled / self.ranks
        return factors

    def copy(self) -> Array:
        """The gradient as the optimizer uses it."""
        tensor = self.tensor.detach().cpu()
        copy: Array = tensor.to(wide_enough(tensor.dtype), copy=True).numpy()
        return copy if self.unscaled == 1 else copy * self.unscaled


def explain_gradients(watch: OptimizerWatch, exchange: Exchange | None = None) -> list[ExplainedGradient]:
    """Explain the gradient of each recorded parameter of an optimizer that has one. exchange: with the other ranks, if there are any."""
    gradients = []
    unscaled = watch.unscaled()
    for parameter, settings in zip(watch.recorded, watch.settings(), strict=True):
        gradient = parameter.tensor.grad
        if gradient is not None:
            gradients.append(_seen(parameter, gradient, settings, unscaled))
    if exchange is not None:
        exchange.sum_over_ranks(watch, gradients)
    for one in gradients:
        one.verdict = _verdict(one)
    _share_factors(gradients)
    return gradients


def _seen(parameter: RecordedParameter, gradient: Tensor, settings: Numbers, unscaled: float) -> ExplainedGradient:
    """A gradient and the passes that have added to it, before they are compared."""
    projected = parameter.project(gradient)
    shares = [share for share in parameter.shares if share.counted]
    coarse = [share for share in shares if share.coarse_dtype is not None]
    if coarse:
        hidden = parameter.hidden_part(gradient, projected)
        roundoffs = [parameter.bound_coarse_error(share, hidden) for share in coarse]
        settings = {**settings, "autocast": max(roundoffs)}
    return ExplainedGradient(parameter, gradient, projected, shares, NO_VERDICT, settings, unscaled)


def _verdict(gradient: ExplainedGradient) -> audit.Verdict:
    if all(share.audited for share in gradient.shares):
        return audit.explain(gradient.shares, gradient.projected, gradient.parameter.roundoff)
    return audit.unaudited(gradient.shares)


def _share_factors(gradients: Sequence[ExplainedGradient]) -> None:
    """Let gradients that tell their factors poorly take those of gradients that tell them well."""
    verdicts = [gradient.verdict for gradient in gradients]
    audit.share_factors(verdicts)
    likely = audit.likely_factors(verdicts)
    is_any_determined = any(verdict.determined for verdict in verdicts)
    for gradient in gradients:
        if gradient.verdict.determined or not gradient.shares:
            continue
        if not gradient.tensor.detach().any():
            continue
        # It is nothing but rounding, like the gradient of a bias before a normalisation
        roundoff = gradient.parameter.roundoff
        gradient.verdict = audit.explain_by_others(gradient.shares, gradient.projected, roundoff, likely)
        if gradient.verdict.explained or is_any_determined:
            continue
        is_kept = not gradient.parameter.is_matrix
        if is_kept:
            gradient.verdict = audit.explain_rounding(gradient.shares, gradient.projected, roundoff)
