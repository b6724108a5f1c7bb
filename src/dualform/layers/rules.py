"""The table of layer types. A new type is one function below and one line in RULES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Rule:
    """How one type of layer is read: grad of its weight = Σ error signal ⊗ key, grad of its bias = Σ error signal."""

    kind: str
    """The name of the type in a store."""
    key: Callable[[Arguments], Tensor]
    """The forward's arguments → the keys, (*lead, d_in)."""


def _linear_key(arguments: Arguments) -> Tensor:
    positional, named = arguments
    key: Tensor = positional[0] if positional else named["input"]
    return key


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule("linear", _linear_key),
}


def rule_for(module: nn.Module) -> Rule | None:
    """The rule for a module, or None: it is of a type that no rule covers."""
    for kind, rule in RULES.items():
        if isinstance(module, kind):
            return rule
    return None


def refusal(module: nn.Module) -> str | None:
    """Why a module that has a rule cannot be recorded all the same, or None."""
    if parametrize.is_parametrized(module):
        return "its weight is parametrised: the trained parameter is another one"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter):
        return "its weight is no parameter (old-style weight normalisation, or a lazy layer not yet run)"
    if nn.parameter.is_lazy(weight):
        return "its weight is not initialised yet (a lazy layer): run the model once before record()"
    if weight.dtype not in (torch.float32, torch.float64):
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}; float32 and float64 can be recorded"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention uses its weight without ever calling it"
    for kind in RULES:
        if isinstance(module, kind) and type(module).forward is not kind.forward:
            return f"its type {type(module).__name__} has a forward of its own"
    return None
