"""What an optimizer makes of each gradient by the end: one recursion for each kind, walked backwards.

The parameter and its state are the vector of a linear recursion. If W_T = p·W + q·buffer + … at some step, then going
back through that step gives the coefficient of its gradient and the p, q before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Replayed:
    """X_T = a·W_0 + Σ b[name]·state_0[name] − Σ_s c_s·gradient_s, where X is the parameter or one of its state tensors."""

    a: float
    b: dict[str, float]
    c: Floats


def sgd(settings: dict[str, Floats], updates: int, of: str = "weight") -> Replayed:
    """torch.optim.SGD. settings: one number for each of the parameter's updates, in order. of: what X is."""
    c = np.zeros(updates)
    names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "fresh")
    columns = [settings[name].tolist() for name in names]
    p, q = (1.0, 0.0) if of == "weight" else (0.0, 1.0)
    for s in range(updates - 1, -1, -1):
        lr, momentum, dampening, decay, nesterov, maximize, fresh = (column[s] for column in columns)
        sign = -1.0 if maximize else 1.0
        if momentum == 0:
            # W ← W − lr·(g + decay·W)
            c[s] = p * lr * sign
            p = p * (1 - lr * decay)
            continue
        # buffer ← keep·buffer + take·(g + decay·W);  W ← W − lr·(direct·(g + decay·W) + through·buffer)
        keep, take = (0.0, 1.0) if fresh else (momentum, 1 - dampening)
        direct, through = (1.0, momentum) if nesterov else (0.0, 1.0)
        to_weight, to_buffer = -lr * (direct + through * take), take
        c[s] = -(p * to_weight + q * to_buffer) * sign
        p, q = p * (1 + to_weight * decay) + q * to_buffer * decay, (q - p * lr * through) * keep
    return Replayed(p, {"momentum_buffer": q}, c)


class Recursion(Protocol):
    """(settings, number of updates, what X is) → X as a sum."""

    def __call__(self, settings: dict[str, Floats], updates: int, of: str = "weight") -> Replayed:
        """Walk back through the updates."""


RECURSIONS: dict[str, Recursion] = {"sgd": sgd}
STATE: dict[str, tuple[str, ...]] = {"sgd": ("momentum_buffer",)}
"""The state tensors of each kind, in their order."""
