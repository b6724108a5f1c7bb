"""The table of layer types. A new type is one short function below (or in a file of its own) and one line in RULES.

A rule says which linear maps a module has (`layers`), which tensors of its forward pass its slots need (`saved`), and how keys and error
signals follow from these and the gradient of its output (`slots`). Modules that hide their linear maps inside one operation (attention,
recurrent layers) are computed again in the backward pass instead (`replay`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dualform.layers import (
    attention,
    convolution,
    elementwise,
    embedding,
    embedding_adapter,
    normalisation,
    recurrent,
)
from dualform.layers.keys import Patches
from dualform.layers.layer import Layer, Use
from dualform.layers.slot_source import (
    Arguments,
    Errors,
    LayerSlots,
    Naming,
    SlotSource,
    bias_uses,
    error_of_output,
    first_argument,
)


@dataclass(frozen=True)
class Rule:
    """How keys and error signals are read from one type of module."""

    layers: Callable[[nn.Module, str, Naming], list[Layer]]
    """(module, its name, names of its parameters) → its linear maps."""
    saved: Callable[[nn.Module, Arguments], tuple[Tensor, ...]] | None = None
    """(module, the forward's arguments) → the tensors that its slots are computed from, the key first."""
    slots: Callable[[nn.Module, Sequence[Tensor], Errors], list[LayerSlots]] | None = None
    """(module, what was saved, the gradient of its output) → its slots."""
    replay: Callable[[nn.Module, Arguments, Any, Any], SlotSource] | None = None
    """Instead of `saved` and `slots`, for modules that are computed again in the backward pass: (module, the forward's arguments, its
    output, what `begin` returned) → where its slots come from."""
    begin: Callable[[nn.Module], Any] | None = None
    """Called before the forward pass, e.g. to save a random state."""
    why_left_out: Callable[[nn.Module], str | None] = lambda module: None
    """Why a module of this type cannot be recorded, or None."""

    def slot_source(self, module: nn.Module, arguments: Arguments, output: Any, begun: Any) -> SlotSource:
        """Return where the slots of a call come from, once the module has run.

        output: what it returned, or aliases of that, so that gradients belong to its use outside the module.
        """
        if self.replay is not None:
            return self.replay(module, arguments, output, begun)
        assert self.saved is not None
        assert self.slots is not None
        saved = self.saved(module, arguments)
        slots = partial(self.slots, module, saved)
        return SlotSource([output], slots, saved[0])


def _save_input(module: nn.Module, arguments: Arguments) -> tuple[Tensor, ...]:
    return (first_argument(arguments),)


def _save_x(module: nn.Module, arguments: Arguments) -> tuple[Tensor, ...]:
    return (first_argument(arguments, "x"),)


def _input_and_error(module: nn.Module, saved: Sequence[Tensor], errors: Errors) -> list[LayerSlots]:
    """The key is the module's input; the error signal is the gradient of its output."""
    return [LayerSlots("", saved[0], error_of_output(errors))]


def _linear(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    assert isinstance(module, nn.Linear)
    weight = Use(named("weight"), "weight")
    uses = (weight, *bias_uses(module, named))
    return [Layer(name, "linear", module.in_features, module.out_features, uses)]


def _conv1d_of_transformers(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    d_in, d_out = module.get_parameter("weight").shape
    weight = Use(named("weight"), "table")
    uses = (weight, *bias_uses(module, named))
    return [Layer(name, "linear", int(d_in), int(d_out), uses)]


_CONVOLUTION = Rule(convolution.layers, _save_input, convolution.slots)
_NORMALISATION = Rule(normalisation.layers, normalisation.save, normalisation.slots)
_RECURRENT = Rule(recurrent.layers, replay=recurrent.replay, begin=recurrent.begin, why_left_out=recurrent.why_left_out)
RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule(_linear, _save_input, _input_and_error),
    nn.Embedding: Rule(embedding.layers, _save_input, embedding.slots, why_left_out=embedding.why_left_out),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.LayerNorm: _NORMALISATION,
    nn.RMSNorm: _NORMALISATION,
    nn.GroupNorm: _NORMALISATION,
    nn.BatchNorm1d: _NORMALISATION,
    nn.BatchNorm2d: _NORMALISATION,
    nn.BatchNorm3d: _NORMALISATION,
    nn.MultiheadAttention: Rule(attention.layers, replay=attention.replay, begin=attention.begin),
    nn.LSTM: _RECURRENT,
    nn.GRU: _RECURRENT,
    nn.RNN: _RECURRENT,
    nn.LSTMCell: _RECURRENT,
    nn.GRUCell: _RECURRENT,
    nn.RNNCell: _RECURRENT,
}
_CONV1D_OF_TRANSFORMERS = Rule(_conv1d_of_transformers, _save_x, _input_and_error)
_EMBEDDING_ADAPTER = Rule(
    embedding_adapter.layers, replay=embedding_adapter.replay, why_left_out=embedding_adapter.why_left_out
)
_ELEMENTWISE = Rule(elementwise.layers, elementwise.save_input, elementwise.slots)
RECORDED_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The types of parameters that can be recorded."""


def rule_for(module: nn.Module) -> Rule | None:
    """Return the rule for a module; None if no rule covers its type."""
    package, _, _ = type(module).__module__.partition(".")
    if type(module).__name__ == "Conv1D" and package == "transformers":
        return _CONV1D_OF_TRANSFORMERS
    for kind, rule in RULES.items():
        if isinstance(module, kind):
            return rule
    if embedding_adapter.is_adapter(module):
        return _EMBEDDING_ADAPTER
    return _ELEMENTWISE if elementwise.is_elementwise(module) else None


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside another one that its rule covers; their own forward never runs."""
    if isinstance(module, nn.MultiheadAttention):
        return [module.out_proj]
    return embedding_adapter.parts(module) if embedding_adapter.is_adapter(module) else []


def why_left_out(module: nn.Module) -> str | None:
    """Return why a module cannot be recorded although it has a rule, or None."""
    reason = _why_weights_are_left_out(module)
    if reason is not None:
        return reason
    if any(isinstance(module, kind) and type(module).forward is not kind.forward for kind in RULES):
        return f"its type {type(module).__name__} has a forward of its own"
    for inner in parts_of(module):
        reason = why_left_out(inner)
        if reason is not None:
            return f"of its {type(inner).__name__}: {reason}"
    rule = rule_for(module)
    return None if rule is None else rule.why_left_out(module)


def _why_weights_are_left_out(module: nn.Module) -> str | None:
    if embedding_adapter.is_adapter(module):
        tables = [table for inner in parts_of(module) for table in inner.parameters()]
        return _why_types_are_left_out(tables)
    if parametrize.is_parametrized(module):
        return "its weight is parametrised: the trained parameter is another one"
    parameters = list(module.parameters(recurse=False))
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in parameters):
        return "its weight is not initialised yet (a lazy layer): run the model once before record()"
    if _has_computed_weight(module):
        return "its weight is no parameter (old-style weight normalisation)"
    return _why_types_are_left_out(parameters)


def _why_types_are_left_out(parameters: Sequence[nn.Parameter]) -> str | None:
    for parameter in parameters:
        if parameter.dtype not in RECORDED_TYPES:
            allowed = ", ".join(map(_name_of_type, RECORDED_TYPES))
            return f"its weight is {_name_of_type(parameter.dtype)}; these types can be recorded: {allowed}"
    return None


def _has_computed_weight(module: nn.Module) -> bool:
    """Whether a hook of old-style weight normalisation computes its weight from other parameters."""
    if any("weight_g" in name for name in module._parameters):
        return True
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and "weight" not in module._parameters


def _name_of_type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def queries_of(layer: Layer, keys: Tensor) -> Tensor:
    """Return queries for attention weights: of feature maps their patches, (maps, positions, d_in)."""
    if layer.geometry is None:
        return keys
    maps = Patches(keys, layer.geometry)
    positions = layer.geometry.positions(maps.size)
    return maps.vectors().reshape(len(keys), math.prod(positions), layer.d_in)
