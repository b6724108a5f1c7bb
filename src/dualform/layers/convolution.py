"""Convolutions: the key of a slot is the patch that its output was computed from."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dualform.layers.layer import Geometry, Layer, Use
from dualform.layers.slot_source import Errors, LayerSlots, Naming, bias_uses, error_of_output


def geometry_of(module: nn.modules.conv._ConvNd) -> Geometry:
    """Return how a convolution cuts patches from its feature maps."""
    last_axis_first = module._reversed_padding_repeated_twice
    padding: tuple[int, ...] = ()
    for before, after in zip(last_axis_first[::2], last_axis_first[1::2], strict=True):
        padding = (int(before), int(after), *padding)
    return Geometry(
        module.in_channels, module.kernel_size, module.stride, padding, module.dilation, module.padding_mode
    )


def layers(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    """Return its only linear map, from a patch to the channels at one place."""
    assert isinstance(module, nn.modules.conv._ConvNd)
    geometry = geometry_of(module)
    d_out = module.out_channels
    weight = Use(named("weight"), "weight", groups=module.groups)
    uses = (weight, *bias_uses(module, named))
    return [Layer(name, "convolution", geometry.patch, d_out, uses, form="maps", geometry=geometry)]


def slots(module: nn.Module, saved: Sequence[Tensor], errors: Errors) -> list[LayerSlots]:
    """Return feature maps as keys, and error signals (maps, positions, channels)."""
    assert isinstance(module, nn.modules.conv._ConvNd)
    maps = saved[0]
    error = error_of_output(errors)
    has_batch_axis = maps.dim() == len(module.kernel_size) + 2
    if not has_batch_axis:
        maps = maps.unsqueeze(0)
        error = None if error is None else error.unsqueeze(0)
    if error is not None:
        error = error.flatten(2).transpose(1, 2)
    return [LayerSlots("", maps, error, lead=1)]
