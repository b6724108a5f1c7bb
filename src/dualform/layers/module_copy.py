"""Copies of modules and arguments that can be run without consequences for the training.

A copy shares the memory of the weights. Everything else that running a module may change is copied: buffers, tensors, counters, containers,
random generators, caches. What cannot be copied (open files, a trainer with its data) is shared.
"""

from __future__ import annotations

import copy
import functools
import io
import random
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

T = TypeVar("T")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_full_backward_hooks",
)
MOST_PARTS = 5000
"""An object with more parts than this, such as a trainer that a module refers to, is shared and not copied."""
_RUNNING = (threading.Thread, io.IOBase)
"""An object with such a part is shared, too: a copy of it would be a second owner."""


class Copier:
    """Copies objects. Those that refer to each other are copied once, so that their copies refer to each other."""

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}
        """By the original's id."""
        self._originals: list[Any] = []
        """Keeps the originals alive, since an id may be used again."""
        self.modules: dict[int, nn.Module] = {}
        """The copies of modules, by the original's id."""

    def copy(self, value: Any) -> Any:
        """Return a copy, or the value itself if it cannot change or cannot be copied."""
        earlier_copy = self._copies.get(id(value))
        if earlier_copy is not None:
            return earlier_copy
        copy_value = _COPIES.get(type(value))
        if copy_value is not None:
            return copy_value(self, value)
        if isinstance(value, torch.jit.ScriptModule):  # its parts are out of reach, so its weights are copied too
            return self._keep(value, copy.deepcopy(value))
        if isinstance(value, nn.Module):
            return self._copy_module(value)
        if isinstance(value, Tensor):
            return self._keep(value, _copy_tensor(value))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*self._copy_tuple(value))
        if _is_plain_object(value) and _can_be_copied(value):
            return self._copy_object(value)
        return value

    def _keep(self, original: Any, made: T) -> T:
        self._copies[id(original)] = made
        self._originals.append(original)
        return made

    def _copy_module(self, module: nn.Module) -> nn.Module:
        wrapped = getattr(module, "_orig_mod", None)
        if isinstance(wrapped, nn.Module):  # by torch.compile: a copy runs as the plain module does
            plain: nn.Module = self.copy(wrapped)
            return self._keep(module, plain)
        made: nn.Module = object.__new__(type(module))
        self._keep(module, made)  # before its parts: they may refer to it
        self.modules[id(module)] = made
        for name, value in vars(module).items():
            if name == "_compiled_call_impl":
                vars(made)[name] = None
            elif name in _HOOKS:
                # Hooks may have effects elsewhere, except those that compute a weight
                vars(made)[name] = OrderedDict((key, hook) for key, hook in value.items() if _computes_weight(hook))
            else:
                vars(made)[name] = self.copy(value)
        return made

    def _copy_object(self, value: Any) -> Any:
        made = self._keep(value, object.__new__(type(value)))
        for name, part in vars(value).items():
            vars(made)[name] = self.copy(part)
        return made

    def _copy_dictionary(self, value: dict[Any, Any]) -> dict[Any, Any]:
        made = self._keep(value, value.copy())
        for key, item in value.items():  # not update(), which adds up in a Counter
            made[key] = self.copy(item)
        return made

    def _copy_default_dictionary(self, value: defaultdict[Any, Any]) -> Any:
        made: Any = self._copy_dictionary(value)
        made.default_factory = self.copy(value.default_factory)
        return made

    def _copy_list(self, value: list[Any] | deque[Any]) -> list[Any] | deque[Any]:
        made = self._keep(value, value.copy())  # a deque keeps its longest length
        made.clear()
        made.extend(self.copy(item) for item in value)
        return made

    def _copy_tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self.copy(item) for item in value)

    def _copy_method(self, value: types.MethodType) -> types.MethodType:
        return types.MethodType(self.copy(value.__func__), self.copy(value.__self__))

    def _copy_partial(self, value: functools.partial[Any]) -> functools.partial[Any]:
        keywords = {name: self.copy(item) for name, item in value.keywords.items()}
        return functools.partial(self.copy(value.func), *self.copy(value.args), **keywords)

    def _copy_function(self, value: types.FunctionType) -> types.FunctionType:
        """A function may refer to modules by its closure: a forward that was replaced by a wrapper does."""
        if not value.__closure__:
            return value
        cells = [types.CellType() for _ in value.__closure__]
        made = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, closure=tuple(cells)
        )
        made.__kwdefaults__ = value.__kwdefaults__
        self._keep(value, made)
        for cell, original in zip(cells, value.__closure__, strict=True):
            if _is_filled(original):
                cell.cell_contents = self.copy(original.cell_contents)
        return made

    def _copy_generator(self, value: torch.Generator) -> torch.Generator:
        made = torch.Generator(value.device)
        made.set_state(value.get_state())
        return self._keep(value, made)

    def _copy_deeply(self, value: Any) -> Any:
        return self._keep(value, copy.deepcopy(value))


def rebind_forwards(model: nn.Module, made: nn.Module) -> None:
    """Have the forward methods of a deep copy that were replaced by functions call the copy: the closures of those are the original's."""
    pairs = list(zip(model.modules(), made.modules(), strict=True))
    copier = Copier()
    for original, copied in pairs:
        copier._keep(original, copied)
    for original, copied in pairs:
        if "forward" in vars(original):
            vars(copied)["forward"] = copier.copy(vars(original)["forward"])


_COPIES: dict[type, Callable[[Copier, Any], Any]] = {
    dict: Copier._copy_dictionary,
    OrderedDict: Copier._copy_dictionary,
    Counter: Copier._copy_dictionary,
    defaultdict: Copier._copy_default_dictionary,
    list: Copier._copy_list,
    tuple: Copier._copy_tuple,
    deque: Copier._copy_list,
    set: lambda self, value: self._keep(value, set(value)),
    bytearray: Copier._copy_deeply,
    np.ndarray: lambda self, value: self._keep(value, value.copy()),
    random.Random: Copier._copy_deeply,
    np.random.RandomState: Copier._copy_deeply,
    np.random.Generator: Copier._copy_deeply,
    torch.Generator: Copier._copy_generator,
    types.MethodType: Copier._copy_method,
    types.FunctionType: Copier._copy_function,
    functools.partial: Copier._copy_partial,
    # Proxies claim to be of the type that they refer to
    weakref.ProxyType: lambda self, value: value,
    weakref.CallableProxyType: lambda self, value: value,
}
"""How values of these types are copied."""


def _copy_tensor(tensor: Tensor) -> Tensor:
    if type(tensor) is nn.Parameter:
        # Shares the memory, but not what is assigned to its .data or .grad
        alias = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
        alias.__dict__.update(tensor.__dict__)
        return alias
    if isinstance(tensor, nn.Parameter):
        return tensor
    with torch.no_grad():
        return tensor.clone()


def _is_plain_object(value: Any) -> bool:
    """Whether all that a value knows is in its attributes."""
    kind: Any = type(value)
    if isinstance(value, (type, types.ModuleType)) or not hasattr(value, "__dict__"):
        return False
    is_ordinary = kind.__new__ is object.__new__ and kind.__reduce_ex__ is object.__reduce_ex__
    return is_ordinary and kind.__reduce__ is object.__reduce__


def _can_be_copied(value: Any) -> bool:
    """Whether an object has at most MOST_PARTS parts, and nothing in it runs or is open."""
    seen: set[int] = set()
    waiting = [value]
    while waiting and len(seen) <= MOST_PARTS:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if type(part) in weakref.ProxyTypes or isinstance(part, (Tensor, nn.Module)):
            continue
        if isinstance(part, _RUNNING):
            return False
        if isinstance(part, dict):
            waiting.extend(part.values())
        elif isinstance(part, (list, tuple, set, deque)):
            waiting.extend(part)
        elif _is_plain_object(part):
            waiting.extend(vars(part).values())
    return len(seen) <= MOST_PARTS


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises)
    except ValueError:
        return False
    return True


def _computes_weight(hook: Any) -> bool:
    """Whether a hook belongs to PyTorch's own weight normalisation, spectral normalisation or pruning."""
    return type(hook).__module__.startswith("torch.nn.utils")
