"""What rules read from a module that has run: keys and error signals, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dualform.layers.layer import Use

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Naming = Callable[[str], str]
"""The full name of one of a module's own parameters."""
Errors = Sequence[Tensor | None] | None
"""The gradients of a source's outputs, in their order; None for an output without a gradient; None as a whole: only keys are wanted."""


@dataclass(slots=True)
class LayerSlots:
    """Keys and error signals of one of a module's layers, (*lead, …) each."""

    layer: str
    """The part of the layer's name after that of the module."""
    keys: Tensor
    errors: Tensor | None
    axis: int | None = None
    """The leading axis that holds the rows, if the module itself says so."""
    lead: int | None = None
    """How many leading axes there are; None: all axes but the last."""
    shown: Tensor | None = None
    """(*lead, …): the tensor that shows where the rows are, if keys may not; each key is computed from its entry at the same place."""
    key_terms: float = 0.0
    """If each key is itself a sum, which may cancel: a bound on the norm of the sums of absolute terms. The audit allows for the rounding
    errors of terms of this size (record/audit.py). 0: the norm of the keys is that bound."""
    error_terms: float = 0.0
    """The same for error signals that are sums or were computed again."""
    partial_sums: int = 1
    """Under autocast: into how many parts a weight's gradient was split that were each rounded to 16 bits before they were added."""
    rounded_inside: bool = False
    """Under autocast: whether a fused kernel of the training rounds error signals or partial sums that it does not show."""


@dataclass(slots=True)
class SlotSource:
    """Where the slots of a call will come from, once its outputs have gradients."""

    outputs: list[Tensor]
    """The tensors whose gradients are needed."""
    slots: Callable[[Errors], list[LayerSlots]]
    key: Tensor
    """The input of the call. Its shape says how it may hold the rows, and its history whether it comes from data."""
    keys: Callable[[], list[LayerSlots]] | None = None
    """Returns the keys alone, if error signals need a second computation; None: `slots` is as cheap."""


def first_argument(arguments: Arguments, name: str = "input") -> Tensor:
    """Return the first argument of a forward pass, given by position or by name."""
    positional, named = arguments
    value: Tensor = positional[0] if positional else named[name]
    return value


def bias_uses(module: nn.Module, named: Naming) -> tuple[Use, ...]:
    """Return the use of a module's bias, if it has one."""
    if getattr(module, "bias", None) is None:
        return ()
    return (Use(named("bias"), "bias"),)


def error_of_output(errors: Errors) -> Tensor | None:
    """Return the gradient of a module's only output."""
    return None if errors is None else errors[0]


def map_tensors(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return what a module returned, with `change` applied to each tensor."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, PackedSequence):
        return output._replace(data=change(output.data))
    if isinstance(output, tuple):
        return tuple(map_tensors(part, change) for part in output)
    return output
