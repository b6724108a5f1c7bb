"""Weights of normalisations, which multiply a normalised input entry by entry.

A slot's key is its own part of the weight's gradient, error × normalised input; its error signal is its part of the bias's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualform.layers.channel_sums import channel_sums
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
    given = given.detach().to(computed_in)
    if by_channel:
        # PyTorch rounds the gradient of a 16-bit weight; where tensors are not contiguous, it rounds each partial sum
        is_rounded = weight.dtype == error.dtype or not (given.is_contiguous() and error.is_contiguous())
        return [_slots_by_channel(error, _channels(module, given, statistics), is_rounded)]
    normal, shift = _normalised(module, given)
    parts = error * normal
    axes = weight.dim()
    size_of_shifts = 0.0
    if shift is not None:
        normalised_axes = tuple(range(-axes, 0))
        error_norms = torch.linalg.vector_norm(error, dim=normalised_axes, keepdim=True, dtype=shift.dtype)
        size_of_shifts = _size_of_shifts(error_norms, shift)
    slots = LayerSlots(
        "",
        parts.flatten(-axes),
        error.flatten(-axes),
        key_terms=norm_of_tensor(parts) + size_of_shifts,
        rounded_inside=isinstance(module, nn.LayerNorm),  # on the CPU, each partial sum is rounded
    )
    return [slots]


@dataclass(frozen=True)
class _Channels:
    """The input of a normalisation by channels: `centred` × `scale` is the normalised input."""

    centred: Tensor
    """(rows, channels, positions)."""
    norms: Tensor
    """Of `centred` over the positions, (rows, channels)."""
    scale: Tensor
    """For each channel, or 1."""
    shift: Tensor
    """Mean / deviation of the channels that share them, (groups, 1) or (rows, groups, 1)."""


def _slots_by_channel(error: Tensor, channels: _Channels, is_rounded: bool) -> LayerSlots:
    """Return one slot per row, the sum over its positions. error: (rows, channels, …).

    is_rounded: whether training rounds these sums to the type of the error signals; ours are then of that type too, which tells the audit.
    """
    by_position = _with_positions(error.to(channels.centred.dtype))
    error_norms = torch.linalg.vector_norm(by_position, dim=2)
    root_of_positions = math.sqrt(by_position.shape[2])
    # By Cauchy-Schwarz, the absolute terms of a slot sum to at most the product of these norms
    size_of_parts = norm_of_tensor(error_norms * channels.norms * channels.scale)
    groups = channels.shift.shape[-2]
    norms_by_group = torch.linalg.vector_norm(error_norms.unflatten(1, (groups, -1)), dim=2, keepdim=True)
    size_of_shifts = root_of_positions * _size_of_shifts(norms_by_group, channels.shift)
    products, sums = channel_sums(by_position, channels.centred)
    return LayerSlots(
        "",
        products * channels.scale,
        sums.to(error.dtype if is_rounded else sums.dtype),
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


def _normalised(module: nn.Module, given: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the normalised input before weight and bias, and its shift: mean / deviation, or None if no mean is subtracted."""
    if not given.numel():
        return given, None
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(given, module.normalized_shape, None, module.eps), None
    assert isinstance(module, nn.LayerNorm)
    normal, mean, scale = torch.native_layer_norm(given, module.normalized_shape, None, None, module.eps)
    return normal, mean * scale


def _channels(module: nn.Module, given: Tensor, statistics: Sequence[Tensor]) -> _Channels:
    """Centre the input of a batch or group normalisation. statistics: running ones, if those were used."""
    if isinstance(module, nn.GroupNorm):
        return _channels_in_groups(module, given)
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    by_position = _with_positions(given)
    if statistics:
        mean, variance = (statistic.to(given.dtype) for statistic in statistics)
        centred = by_position - mean.unsqueeze(1)
        norms = torch.linalg.vector_norm(centred, dim=2)
    else:
        # Several times as fast as PyTorch's operation
        count = max(1, by_position.shape[0] * by_position.shape[2])
        mean = by_position.sum(2).sum(0) / count
        centred = by_position - mean.unsqueeze(1)
        norms = torch.linalg.vector_norm(centred, dim=2)
        variance = norms.square().sum(0) / count
    scale = (variance + module.eps).rsqrt()
    return _Channels(centred, norms, scale, (mean * scale).unsqueeze(1))


def _channels_in_groups(module: nn.GroupNorm, given: Tensor) -> _Channels:
    rows, channels = given.shape[:2]
    if given.numel():
        positions = math.prod(given.shape[2:])
        normal, mean, scale = torch.native_group_norm(
            given.contiguous(), None, None, rows, channels, positions, module.num_groups, module.eps
        )
        shift = (mean * scale).unsqueeze(2)
    else:
        normal = given
        shift = given.new_zeros(rows, module.num_groups, 1)
    by_position = _with_positions(normal)
    norms = torch.linalg.vector_norm(by_position, dim=2)
    return _Channels(by_position, norms, given.new_ones(()), shift)


def _with_positions(tensor: Tensor) -> Tensor:
    """(rows, channels, …) → (rows, channels, positions); without further axes, one position."""
    return tensor.flatten(2) if tensor.dim() > 2 else tensor.unsqueeze(2)


def _size_of_shifts(error_norms: Tensor, shift: Tensor) -> float:
    """Return how much larger the terms that PyTorch rounds may be than error × normalised input.

    Some kernels compute error × input / deviation and error × mean / deviation separately, and subtract. The difference may be far
    smaller than both (a deviation far below the mean) or zero (one channel in a group); its rounding error is not.

    error_norms: of the error signals that share a mean, with a last axis of size 1 like the shift.
    """
    # |input| / deviation is at most |normalised input| + |mean| / deviation
    return 2 * norm_of_tensor(error_norms * shift)
