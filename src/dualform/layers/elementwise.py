"""Modules that multiply their input, normalised or not, by one vector: the many versions of RMSNorm, LayerScale.

Every library of language models has its own RMSNorm. They are recognised by what they do, not by their names: the only parameter is a
vector, and each output depends linearly on the vector's entry at the same place and on no other entry.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dualform.layers.layer import Layer, Use
from dualform.layers.slot_source import Arguments, Errors, LayerSlots, Naming

TOLERANCE = 1e-3
"""How far a probe may be off, relative to its largest number: modules may compute in 16 bits."""
PROBED_ROWS = 2
PROBED_POSITIONS = 3


def is_elementwise(module: nn.Module) -> bool:
    """Whether a module of unknown type multiplies by its only parameter, entry by entry."""
    vector = _only_vector(module)
    if vector is None or vector.device.type == "meta":
        return False
    if "forward" in vars(module) or not _takes_one_tensor(module):
        return False
    without_autocast = torch.autocast(vector.device.type, enabled=False)
    with torch.random.fork_rng(devices=[]), without_autocast:
        torch.manual_seed(0)
        try:
            return _probe(module, vector)
        except Exception:  # it does not take such an input, so it is another kind of module
            return False


def name_of_vector(module: nn.Module) -> str:
    """Return the name of the module's only parameter."""
    [name] = [name for name, parameter in module._parameters.items() if parameter is not None]
    return name


def layers(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    """Return its only layer."""
    own_name = name_of_vector(module)
    size = module.get_parameter(own_name).numel()
    use = Use(named(own_name), "scale")
    return [Layer(name, "elementwise", size, size, (use,), form="parts")]


def save_input(module: nn.Module, arguments: Arguments) -> tuple[Tensor, ...]:
    """Return what slots are computed from: the input."""
    positional, named = arguments
    all_arguments = (*positional, *named.values())
    return (all_arguments[0],)


def slots(module: nn.Module, saved: Sequence[Tensor], errors: Errors) -> list[LayerSlots]:
    """Return one slot per row and position: its part of the vector's gradient."""
    given = saved[0].detach()
    if errors is None:  # there are no keys; this shows where the rows are
        return [LayerSlots("", given, None)]
    error = errors[0]
    if error is None:
        return []
    vector = module.get_parameter(name_of_vector(module))
    return [LayerSlots("", gradient_by_place(module, vector, given, error), error)]


def gradient_by_place(module: nn.Module, vector: Tensor, given: Tensor, error: Tensor) -> Tensor:
    """Return each place's part of the vector's gradient, rounded as the module itself rounds. given, error, result: (…, d)."""
    with torch.enable_grad(), _autograd_within_operators():
        # One copy of the vector for each place, so that autograd does not add up their gradients
        copies = vector.detach().expand(given.shape).requires_grad_()
        output = _forward(module, copies, given)
        [parts] = torch.autograd.grad(output, copies, error)
    return parts


def _autograd_within_operators() -> AbstractContextManager[Any]:
    """Let autograd work in the body of a custom operator, where PyTorch turns it off: compiled graphs call this from one."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)


def _forward(module: nn.Module, vector: Tensor, given: Tensor) -> Tensor:
    """Run the module, without its hooks, with another vector in the place of its parameter."""
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = {}
    twin.__dict__[name_of_vector(module)] = vector
    output: Tensor = twin.forward(given)
    return output


def _only_vector(module: nn.Module) -> nn.Parameter | None:
    """Return the module's parameter if it is a vector, and the module has nothing else."""
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    has_more = bool(module._modules) or any(buffer is not None for buffer in module._buffers.values())
    if has_more or len(parameters) != 1:
        return None
    [parameter] = parameters
    is_vector = parameter.dim() == 1 and parameter.is_floating_point()
    return parameter if is_vector else None


def _takes_one_tensor(module: nn.Module) -> bool:
    signature = inspect.signature(type(module).forward)
    required = 0
    for parameter in signature.parameters.values():
        has_default = parameter.default is not parameter.empty
        if not has_default and parameter.kind is not parameter.VAR_KEYWORD:
            required += 1
    return required == 2  # self and the input


def _probe(module: nn.Module, vector: nn.Parameter) -> bool:
    """Try the module on random numbers: is its output linear in the vector, entry by entry?"""
    given = _random_like(vector, PROBED_ROWS, PROBED_POSITIONS)
    one = _random_like(vector)
    other = _random_like(vector)
    vectors = [one, other, one + other, torch.zeros_like(one)]
    with torch.no_grad():
        outputs = [_forward(module, weights, given) for weights in vectors]
    if any(not isinstance(output, Tensor) or output.shape != given.shape for output in outputs):
        return False
    of_one, of_other, of_sum, of_zeros = outputs
    if not _is_close(of_one + of_other, of_sum + of_zeros):
        return False
    # The gradient at one place must come from the error signal of that place alone
    error = torch.zeros_like(of_one)
    error[0, 1, 0] = 1
    parts = gradient_by_place(module, one, given, error)
    return bool(parts[0, 1, 0] != 0) and int(parts.count_nonzero()) == 1


def _random_like(vector: Tensor, *lead: int) -> Tensor:
    random = torch.randn(*lead, vector.numel(), device=vector.device)
    return random.to(vector.dtype)


def _is_close(one: Tensor, other: Tensor) -> bool:
    scale = torch.maximum(one.abs().max(), other.abs().max())
    tolerance = max(TOLERANCE, 8 * torch.finfo(one.dtype).eps)
    difference = (one - other).abs().max()
    return float(difference) <= tolerance * float(scale)
