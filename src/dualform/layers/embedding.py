"""Embeddings: the key of a slot is the number of a token, as a one-hot vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dualform.layers.layer import Layer, Use
from dualform.layers.slot_source import Errors, LayerSlots, Naming, error_of_output


def layers(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    """Return its only layer."""
    assert isinstance(module, nn.Embedding)
    uses = (Use(named("weight"), "table"),)
    return [Layer(name, "embedding", module.num_embeddings, module.embedding_dim, uses, form="numbers")]


def slots(module: nn.Module, saved: Sequence[Tensor], errors: Errors) -> list[LayerSlots]:
    """Return one slot per token."""
    assert isinstance(module, nn.Embedding)
    numbers = saved[0]
    error = error_of_output(errors)
    if error is not None:
        error = written(module, numbers, error)
    # In 16 bits, PyTorch adds the rows of a token in that type, and rounds after each
    return [LayerSlots("", numbers.unsqueeze(-1), error, rounded_inside=True)]


def written(module: nn.Embedding, numbers: Tensor, error: Tensor) -> Tensor:
    """Return the part of the gradient of an embedding's output (…, d) that reaches its table."""
    if module.padding_idx is not None:
        is_padding = numbers == module.padding_idx
        error = error.masked_fill(is_padding.unsqueeze(-1), 0)
    if module.scale_grad_by_freq:
        _, inverse, counts = torch.unique(numbers, return_inverse=True, return_counts=True)
        occurrences = counts[inverse]
        error = error / occurrences.unsqueeze(-1)
    return error


def why_left_out(module: nn.Module) -> str | None:
    """Return why it cannot be recorded, or None."""
    assert isinstance(module, nn.Embedding)
    if module.sparse:
        return "its gradient is sparse (sparse=True): the optimizers that take those are no linear recursion"
    if module.max_norm is not None:
        return "max_norm changes its weight during the forward pass, outside the optimizer"
    return None
