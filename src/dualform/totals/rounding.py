"""What rounding of gradients to 16 bits (autocast) does to them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

ROUNDED_WITHIN = "recurrent"
"""The kind of layers that round within a call, at each time step; an LSTM does so inside its one operation."""
ROUNDINGS_WITHIN = 12
"""How many operations of such a layer round, one after the other, in a time step: gates, state, and the way back through them."""


def coarse_spread(squares: Iterable[Tensor], rest: float, unit: float, roundings: int = 1) -> Tensor:
    """Return the variance of each entry of a gradient whose parts were rounded to 16 bits, and may cancel.

    squares: of what each part added to the gradient; a part is a call of a layer or, if it rounds within a call, a slot. rest: the norm of
    the gradient's whole error; unit: the unit roundoff of the 16-bit type; roundings: how often each part was rounded.
    """
    total = torch.zeros(())
    for part in squares:
        total = total + part
    norm = math.sqrt(float(total.sum()))
    # Rounding errors are spread evenly up to one unit. The measured error may be larger
    relative = max(unit * math.sqrt(roundings / 3), rest / norm if norm else 0.0)
    return total * relative**2
