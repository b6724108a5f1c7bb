"""PEFT's LoRA on an embedding: output + scaling · B (A one_hot(token)), with A (r, tokens) and B (d, r).

A and B are parameters in dictionaries, used by functions, so there are no modules to hook. They are computed again in the backward pass.
PEFT is not imported; its modules are recognised by their attributes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualform.layers import embedding
from dualform.layers.autocast import Autocast
from dualform.layers.layer import Layer, Use, joined
from dualform.layers.slot_source import (
    Arguments,
    Errors,
    LayerSlots,
    Naming,
    SlotSource,
    error_of_output,
    first_argument,
)
from dualform.projection import norm_of_tensor

A = "lora_embedding_A"
B = "lora_embedding_B"
ATTRIBUTES = ("active_adapters", "disable_adapters", "merged", "scaling", "get_base_layer")


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is an embedding with such adapters."""
    tables = (getattr(module, name, None) for name in (A, B))
    return all(isinstance(table, nn.ParameterDict) and len(table) for table in tables)


def parts(module: nn.Module) -> list[nn.Module]:
    """The dictionaries of its parameters."""
    return [module.get_submodule(A), module.get_submodule(B)]


def layers(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    """Return two layers for each adapter."""
    recorded = []
    for adapter in _names(module):
        of_a = f"{A}.{adapter}"
        of_b = f"{B}.{adapter}"
        rank, tokens = module.get_parameter(of_a).shape
        width = module.get_parameter(of_b).shape[0]
        use_a = Use(named(of_a), "weight")
        use_b = Use(named(of_b), "weight")
        recorded.append(Layer(joined(name, of_a), "embedding", tokens, rank, (use_a,), form="numbers"))
        recorded.append(Layer(joined(name, of_b), "linear", rank, width, (use_b,)))
    return recorded


def why_left_out(module: nn.Module) -> str | None:
    """Why it cannot be recorded, or None."""
    if not all(hasattr(module, name) for name in ATTRIBUTES):
        return "its adapters are not like those of PEFT"
    base = _base(module)
    if not isinstance(base, nn.Embedding):
        return f"its adapters are on a {type(base).__name__}; expected an embedding"
    if getattr(module, "lora_variant", None):
        return "an adapter of an embedding is recorded without variants (use_dora=True, MiCA)"
    return embedding.why_left_out(base)


def replay(module: nn.Module, arguments: Arguments, output: Any, begun: Any) -> SlotSource:
    """Return where the slots of a call come from: the active adapters, computed again."""
    tokens = first_argument(arguments, "x")
    calls = [_Call.of(module, adapter, tokens) for adapter in _in_use(module)]
    autocast = Autocast.now(tokens.device.type)

    def slots(errors: Errors) -> list[LayerSlots]:
        return [found for call in calls for found in call.slots(errors, autocast)]

    return SlotSource([output], slots, tokens)


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.get_submodule(A).named_parameters()]


def _in_use(module: Any) -> list[str]:
    """Return the adapters that the module has just added to its output."""
    if module.disable_adapters or module.merged:
        return []
    adapters = _names(module)
    return [name for name in module.active_adapters if name in adapters]


def _base(module: Any) -> Any:
    return module.get_base_layer()


@dataclass(frozen=True)
class _Call:
    """One adapter in one call of its module."""

    adapter: str
    base: nn.Embedding
    table: Tensor
    """A, (r, tokens)"""
    outward: Tensor
    """B, (d, r)"""
    scales: list[float]
    """What is added to the output is multiplied by these, one after the other."""
    tokens: Tensor

    @classmethod
    def of(cls, module: Any, adapter: str, tokens: Tensor) -> _Call:
        """Take the module's present state."""
        scales = [float(module.scaling[adapter])]
        # Some embeddings multiply their output by a number, and so do adapters on them
        of_base = module._get_embed_scale() if hasattr(module, "_get_embed_scale") else None
        if of_base is not None:
            scales.append(float(of_base))
        return cls(
            adapter,
            _base(module),
            module.get_parameter(f"{A}.{adapter}").detach(),
            module.get_parameter(f"{B}.{adapter}").detach(),
            scales,
            tokens,
        )

    def slots(self, errors: Errors, autocast: Autocast) -> list[LayerSlots]:
        """Of A: token numbers, and what comes back through B. Of B: what A gives, and the scaled gradient of the output."""
        inner = F.embedding(self.tokens, self.table.T)
        numbers = self.tokens.unsqueeze(-1)
        of_a = LayerSlots(f"{A}.{self.adapter}", numbers, None)
        # PEFT initialises A with zeros, so that its output is the same for every row
        of_b = LayerSlots(f"{B}.{self.adapter}", inner, None, shown=numbers)
        error = error_of_output(errors)
        if error is None:
            return [of_a, of_b]
        # In the types of the training: autocast multiplies by B in 16 bits
        is_cast = autocast.is_on and inner.dtype != torch.float64
        of_b.errors = error.to(autocast.dtype if is_cast else inner.dtype)
        for scale in reversed(self.scales):
            of_b.errors = of_b.errors * scale
        with autocast.again():
            of_inner = of_b.errors @ self.outward
        of_a.errors = embedding.written(self.base, self.tokens, of_inner.to(inner.dtype))
        of_a.error_terms = norm_of_tensor(of_b.errors) * norm_of_tensor(self.outward)
        of_a.rounded_inside = True
        return [of_a, of_b]
