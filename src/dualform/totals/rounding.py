"""What rounding of gradients to 16 bits (autocast) does to them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

ROUNDED_WITHIN = "recurrent"
"""The kind of layers that round within a call: at each time, and an LSTM inside its one operation."""
ROUNDINGS_WITHIN = 12
"""How many operations round, one after the other, what such a layer computes at one time: its gates, its state, and the way back through them."""


def coarse_spread(squares: Iterable[Tensor], rest: float, unit: float, roundings: int = 1) -> Tensor:
    """The variance of each entry of a gradient that was rounded to 16 bits in parts, which may cancel.

    squares: of what each part added to the gradient: a call of a layer, or, where it rounds within a call, a slot. rest: how far the
    gradient is off in all, as a norm; unit: the unit roundoff of the 16-bit type; roundings: how often each part was rounded.
    """
    total = torch.zeros(())
    for part in squares:
        total = total + part
    norm = math.sqrt(float(total.sum()))
    # Numbers that are rounded are off by up to one unit, evenly spread. What was found may be more
    relative = max(unit * math.sqrt(roundings / 3), rest / norm if norm else 0.0)
    return total * relative**2
