"""What rounding of gradients to 16 bits (autocast) does to them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def coarse_spread(calls: Iterable[Tensor], rest: float, unit: float) -> Tensor:
    """The variance of each entry of a gradient that was rounded to 16 bits, call by call; the calls may cancel.

    calls: what each of them added to the gradient; rest: how far it is off in all, as a norm; unit: the unit roundoff of the 16-bit type.
    """
    total = torch.zeros(())
    for call in calls:
        total = total + call.square()
    norm = math.sqrt(float(total.sum()))
    # Numbers that are rounded are off by up to one unit, evenly spread. What was found is more if sums within a call were rounded, too
    relative = max(unit / math.sqrt(3), rest / norm if norm else 0.0)
    return total * relative**2
