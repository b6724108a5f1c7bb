"""What is read from an optimizer at each step. Its mathematics is in recursions.py, under the same name.

A new optimizer is one function and one line in OPTIMIZERS here, and one recursion there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from dualform.errors import OptimizerError


@dataclass(frozen=True)
class Replay:
    """How an optimizer is written down: the settings of a step, and the state tensors it carries."""

    kind: str
    settings: Callable[[dict[str, Any], dict[str, Any]], dict[str, float]]
    """(the parameter's group, its state before the step) → numbers."""
    state: tuple[str, ...]
    """The state tensors that belong to the initial part."""


def _sgd(group: dict[str, Any], state: dict[str, Any]) -> dict[str, float]:
    return {
        "lr": float(group["lr"]),
        "momentum": float(group["momentum"]),
        "dampening": float(group["dampening"]),
        "weight_decay": float(group["weight_decay"]),
        "nesterov": float(group["nesterov"]),
        "maximize": float(group["maximize"]),
        "fresh": float(state.get("momentum_buffer") is None),
    }


OPTIMIZERS: dict[type[Optimizer], Replay] = {
    torch.optim.SGD: Replay("sgd", _sgd, ("momentum_buffer",)),
}


def replay_for(optimizer: Optimizer) -> Replay | None:
    """The replay of an optimizer, or None: its update is not known to be a linear recursion."""
    for kind, replay in OPTIMIZERS.items():
        if type(optimizer) is kind or (isinstance(optimizer, kind) and _inherits_update(type(optimizer), kind)):
            return replay
    return None


def _inherits_update(subclass: type[Optimizer], kind: type[Optimizer]) -> bool:
    own = {name for parent in subclass.__mro__[: subclass.__mro__.index(kind)] for name in vars(parent)}
    return not own & {"step", "_init_group"}


def listed(given: object) -> list[Optimizer]:
    """One optimizer or several, as a list."""
    several: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in several:
        if not isinstance(one, Optimizer):
            raise OptimizerError(
                f"record() got {type(one).__name__!r} where it expected a torch.optim.Optimizer or a list of them."
            )
    if not several:
        raise OptimizerError("record() got no optimizer: expected a torch.optim.Optimizer or a list of them.")
    return several


def require_replay(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that cannot be replayed."""
    known = ", ".join(kind.__name__ for kind in OPTIMIZERS)
    for optimizer in optimizers:
        if replay_for(optimizer) is None:
            raise OptimizerError(
                f"{type(optimizer).__name__} cannot be replayed, so error signals would get no coefficient. Optimizers "
                f'that can: {known}. Or record(…, keep="keys"): attention weights need no coefficients.'
            )
