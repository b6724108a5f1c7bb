"""Inputs of a model: a tensor, or a dictionary of tensors by the name of the argument, as tokenizers give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Inputs = Tensor | dict[str, Tensor]


class NamedInputs:
    """Examples whose inputs are several tensors, by the name of the model's argument."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = dict(tensors)

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values()), ()))

    def __getitem__(self, places: int | Sequence[int]) -> dict[str, Tensor]:
        return {name: tensor[places] for name, tensor in self._tensors.items()}


def example(inputs: Inputs, place: int) -> Inputs:
    """Return one example, without its batch."""
    if isinstance(inputs, Tensor):
        return inputs[place]
    return {name: tensor[place] for name, tensor in inputs.items()}


def joined(parts: Sequence[Inputs]) -> Inputs:
    """Return the examples of all parts as one batch."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if tensors:
        return torch.cat(tensors)
    named = [part for part in parts if not isinstance(part, Tensor)]
    return {name: torch.cat([part[name] for part in named]) for name in named[0]}


def can_be_joined(one: Inputs, other: Inputs) -> bool:
    """Return whether two inputs have the same shapes and types."""
    return _form(one) == _form(other)


def _form(inputs: Inputs) -> list[tuple[str, torch.Size, torch.dtype]]:
    named = {"": inputs} if isinstance(inputs, Tensor) else inputs
    return [(name, tensor.shape, tensor.dtype) for name, tensor in named.items()]
