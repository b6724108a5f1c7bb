"""Weights of normalisations, which multiply a normalised input entry by entry.

A slot's key is its own part of the weight's gradient, error × normalised input; its error signal is its part of the bias's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualform.layers.layer import Layer, Use
from dualform.layers.slot_source import Arguments, Errors, LayerSlots, Naming, bias_uses, first_argument
from dualform.projection import norm_of_tensor, wide_enough


def layers(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    """Return its weight as an elementwise layer; none if it has no weight."""
    weight = module.weight
    if not isinstance(weight, Tensor):
        return []
    size = weight.numel()
    uses = (Use(named("weight"), "scale"), *bias_uses(module, named))
    return [Layer(name, "elementwise", size, size, uses, form="parts")]


def save(module: nn.Module, arguments: Arguments) -> tuple[Tensor, ...]:
    """Return the input, and the running statistics if the module has just used them."""
    name = "x" if isinstance(module, nn.RMSNorm) else "input"
    return (first_argument(arguments, name), *_running_statistics(module))


def slots(module: nn.Module, saved: Sequence[Tensor], errors: Errors) -> list[LayerSlots]:
    """Return each row's parts of the gradients of weight and bias; for layer and RMS normalisation, each position's."""
    given, *statistics = saved
    weight = module.get_parameter("weight")
    by_channel = not isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    if errors is None:  # there are no keys; this shows where the rows are
        return [LayerSlots("", given, None, lead=1 if by_channel else given.dim() - weight.dim())]
    error = errors[0]
    if error is None:
        return []
    # PyTorch's kernels convert 16-bit inputs to float32 before they multiply
    computed_in = wide_enough(torch.promote_types(given.dtype, weight.dtype))
    normal, shift = _normalised(module, given.detach().to(computed_in), statistics)
    if by_channel:
        # PyTorch rounds the gradient of a 16-bit weight; where tensors are not contiguous, it rounds each partial sum
        is_rounded = weight.dtype == error.dtype or not (given.is_contiguous() and error.is_contiguous())
        return [_slots_by_channel(module, error, normal, shift, is_rounded)]
    parts = error * normal
    axes = weight.dim()
    slots = LayerSlots(
        "",
        parts.flatten(-axes),
        error.flatten(-axes),
        key_terms=norm_of_tensor(parts) + _size_of_shifts(module, error, shift),
        rounded_inside=isinstance(module, nn.LayerNorm),  # on the CPU, each partial sum is rounded
    )
    return [slots]


def _slots_by_channel(
    module: nn.Module, error: Tensor, normal: Tensor, shift: Tensor | None, is_rounded: bool
) -> LayerSlots:
    """Return one slot per row, the sum over its positions. error, normal: (rows, channels, …).

    is_rounded: whether training rounds these sums to the type of the error signals; ours are then of that type too, which tells the audit.
    """
    by_position = _with_positions(error.to(normal.dtype))
    normal_by_position = normal.reshape(by_position.shape)
    error_norms = torch.linalg.vector_norm(by_position, dim=2)
    normal_norms = torch.linalg.vector_norm(normal_by_position, dim=2)
    root_of_positions = math.sqrt(by_position.shape[2])
    # By Cauchy-Schwarz, the absolute terms of a slot sum to at most the product of these norms
    size_of_parts = norm_of_tensor(error_norms * normal_norms)
    size_of_shifts = root_of_positions * _size_of_shifts(module, error, shift)
    return LayerSlots(
        "",
        torch.linalg.vecdot(by_position, normal_by_position),
        by_position.sum(2).to(error.dtype if is_rounded else normal.dtype),
        key_terms=size_of_parts + size_of_shifts,
        error_terms=root_of_positions * norm_of_tensor(error_norms),
        rounded_inside=is_rounded,
    )


def _running_statistics(module: nn.Module) -> tuple[Tensor, ...]:
    """Return the running statistics that a batch normalisation in evaluation mode has just used."""
    if not isinstance(module, nn.modules.batchnorm._BatchNorm) or module.training:
        return ()
    if module.running_mean is None:
        return ()
    assert module.running_var is not None
    return module.running_mean.clone(), module.running_var.clone()


def _normalised(module: nn.Module, given: Tensor, statistics: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the normalised input before weight and bias, and its shift: mean / deviation, or None if no mean is subtracted.

    The shift has a last axis of size 1, to be broadcast over what shares a mean (`_by_mean`).
    """
    if not given.numel():
        return given, None
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(given, module.normalized_shape, None, module.eps), None
    if isinstance(module, nn.LayerNorm):
        normal, mean, scale = torch.native_layer_norm(given, module.normalized_shape, None, None, module.eps)
        return normal, mean * scale
    if isinstance(module, nn.GroupNorm):
        rows, channels = given.shape[:2]
        positions = math.prod(given.shape[2:])
        normal, mean, scale = torch.native_group_norm(
            given.contiguous(), None, None, rows, channels, positions, module.num_groups, module.eps
        )
        return normal, (mean * scale).unsqueeze(2)
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    return _normalised_by_channel(given, statistics, module.eps)


def _normalised_by_channel(given: Tensor, statistics: Sequence[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    """Normalise like a batch normalisation, with running statistics or those of the batch; several times as fast as PyTorch's operation."""
    by_position = _with_positions(given)
    if statistics:
        mean, variance = (statistic.to(given.dtype) for statistic in statistics)
        centred = by_position - mean.unsqueeze(1)
    else:
        count = by_position.shape[0] * by_position.shape[2]
        mean = by_position.sum(2).sum(0) / count
        centred = by_position - mean.unsqueeze(1)
        deviations = torch.linalg.vector_norm(centred, dim=2)
        variance = deviations.square().sum(0) / count
    scale = (variance + eps).rsqrt().unsqueeze(1)
    return centred.mul_(scale).reshape(given.shape), mean.unsqueeze(1) * scale


def _by_mean(module: nn.Module, tensor: Tensor) -> Tensor:
    """View a tensor shaped like the input so that its last axis runs over the entries that share a mean."""
    if isinstance(module, nn.GroupNorm):
        return tensor.reshape(len(tensor), module.num_groups, -1)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _with_positions(tensor)
    return tensor


def _with_positions(tensor: Tensor) -> Tensor:
    """(rows, channels, …) → (rows, channels, positions); without further axes, one position."""
    return tensor.flatten(2) if tensor.dim() > 2 else tensor.unsqueeze(2)


def _size_of_shifts(module: nn.Module, error: Tensor, shift: Tensor | None) -> float:
    """Return how much larger the terms that PyTorch rounds may be than error × normalised input.

    Some kernels compute error × input / deviation and error × mean / deviation separately, and subtract. The difference may be far
    smaller than both (a deviation far below the mean) or zero (one channel in a group); its rounding error is not.
    """
    if shift is None:
        return 0.0
    # |input| / deviation is at most |normalised input| + |mean| / deviation
    norms = torch.linalg.vector_norm(_by_mean(module, error), dim=-1, keepdim=True, dtype=shift.dtype)
    return 2 * norm_of_tensor(norms * shift)
