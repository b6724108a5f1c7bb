"""Weights that no optimizer changes: the base under adapters, a backbone under a new head.

They are no omissions, and they are not stored again and again. What lies under adapters, or is quantised, is not stored at all: the manifest
has a checksum of it, and questions take it from the user's model. Other frozen weights are in the first snapshot, since they may be
given to an optimizer later, and in each before which they have changed: a momentum encoder is changed by hand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

from dualform.record.optimizers import optimized_ids


def frozen(model: nn.Module, optimizers: Sequence[Optimizer], recorded: Collection[int]) -> dict[str, nn.Parameter]:
    """The parameters that need no gradient and are in no optimizer, by name.

    recorded: ids of the parameters of recorded layers: a frozen weight beside a bias that is trained is one.
    """
    optimized = optimized_ids(optimizers)
    return {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and id(parameter) not in optimized and id(parameter) not in recorded
    }


def base_of(model: nn.Module, optimizers: Sequence[Optimizer], recorded: Collection[int]) -> dict[str, nn.Parameter]:
    """The frozen parameters that are not stored: those of a model with adapters, and quantised ones."""
    has_adapters = any("base_layer" in module._modules for module in model.modules())
    return {
        name: parameter
        for name, parameter in frozen(model, optimizers, recorded).items()
        if has_adapters or not is_plain(parameter)
    }


def is_plain(parameter: nn.Parameter) -> bool:
    """Whether a parameter holds ordinary floating-point numbers, not the codes of a quantised weight."""
    return type(parameter) is nn.Parameter and parameter.is_floating_point()


def is_part_of(name: str, parameters: Iterable[str]) -> bool:
    """Whether an entry of a state_dict is one of these parameters, or describes one (quantised weights have such entries)."""
    return any(name == one or name.startswith(f"{one}.") for one in parameters)
