"""A model that is used for a while and left as it was: flags, gradients, buffers, weights and the state of random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def left_as_it_was(model: nn.Module, *, weights: bool) -> Iterator[None]:
    """Within it, the model has no gradients; after it, everything is as before.

    weights: whether the weights that need a gradient may change, too. Frozen ones must not.
    """
    before = _Before(model, weights=weights)
    try:
        with random_state_kept():
            for parameter in before.gradients:
                parameter.grad = None
            yield
    finally:
        before.restore()


class _Before:
    """What a model was."""

    def __init__(self, model: nn.Module, *, weights: bool):
        self._flags = {module: module.training for module in model.modules()}
        self.gradients = {parameter: parameter.grad for parameter in model.parameters()}
        self._buffers = [(module, name, _Kept(value)) for module in model.modules() for name, value in _buffers(module)]
        changing = [parameter for parameter in self.gradients if weights and parameter.requires_grad]
        self._weights = [_Kept(parameter) for parameter in changing]

    def restore(self) -> None:
        for module, flag in self._flags.items():
            module.training = flag
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer.put_back()
        for weight in self._weights:
            weight.put_back()


class _Kept:
    """A tensor, with a copy of what it held."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor
        self._copy = tensor.detach().clone()

    def put_back(self) -> Tensor:
        with torch.no_grad():
            self._tensor.data.copy_(self._copy)
        return self._tensor


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in module._buffers.items():
        if value is not None and not nn.parameter.is_lazy(value):
            yield name, value


@contextmanager
def random_state_kept() -> Iterator[None]:
    """What is drawn within it is drawn again after it: by PyTorch, NumPy and Python, which data loaders draw from."""
    plain = random.getstate()
    numbers = np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(numbers)
