"""A copy of a module that can be run without consequences: it shares the weights and nothing else that running it would change."""

from __future__ import annotations

import types
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_full_backward_hooks",
)


def runnable_copy(module: nn.Module, copies: dict[int, Any]) -> nn.Module:
    """Copy modules and the containers that they keep; everything else is shared, and buffers are cloned.

    A counter that a forward pass moves on, or a list that it appends to, is the copy's own. Hooks are left out, since they may have
    effects elsewhere, but for those that compute weights (torch.nn.utils). copies: gets the copy of each object, by the original's id.
    """
    copy: nn.Module = _copied(module, copies)
    return copy


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
        return _copied_module(value, copies)
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        return types.MethodType(value.__func__, _copied(value.__self__, copies))
    if type(value) in (dict, OrderedDict):
        found = copies[id(value)] = type(value)()
        found.update((key, _copied(inner, copies)) for key, inner in value.items())
        return found
    if type(value) is list:
        items: list[Any] = []
        copies[id(value)] = items
        items.extend(_copied(inner, copies) for inner in value)
        return items
    if type(value) is tuple:
        return tuple(_copied(inner, copies) for inner in value)
    if type(value) is set:
        return set(value)
    return value


def _copied_module(module: nn.Module, copies: dict[int, Any]) -> nn.Module:
    copy: nn.Module = object.__new__(type(module))
    copies[id(module)] = copy  # before its parts: they may refer to it
    for name, value in vars(module).items():
        if name in _HOOKS:
            kept = OrderedDict((key, hook) for key, hook in value.items() if _computes_weights(hook))
            vars(copy)[name] = kept
        elif name == "_buffers":
            buffers = {key: one.clone() if isinstance(one, Tensor) else one for key, one in value.items()}
            vars(copy)[name] = buffers
        else:
            vars(copy)[name] = _copied(value, copies)
    return copy


def _computes_weights(hook: Any) -> bool:
    """Whether a hook belongs to PyTorch's own weight normalisation, spectral normalisation or pruning."""
    return type(hook).__module__.startswith("torch.nn.utils")
