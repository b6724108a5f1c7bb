"""The table of layer types. A new type is one short function below (or in a file of its own) and one line in RULES.

A rule says which linear maps a module has (`layers`), which tensors of its forward pass are needed for its slots (`saved`), and how
these and the gradient of its output make keys and error signals (`slots`). Modules that hide their linear maps inside one operation
(attention, recurrent layers) are computed once more in the backward pass instead (`replay`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dualform.layers import attention, elementwise, embedding, embedding_adapter, recurrent
from dualform.layers.autocast import Autocast
from dualform.layers.keys import Patches
from dualform.layers.layer import Geometry, Layer, Use, joined
from dualform.layers.slot_source import Arguments, Errors, LayerSlots, Naming, SlotSource
from dualform.projection import norm_of_tensor, wide_enough


@dataclass(frozen=True)
class Rule:
    """How one type of module is read."""

    layers: Callable[[nn.Module, str, Naming], list[Layer]]
    """(module, its name, names of its parameters) → its linear maps."""
    saved: Callable[[nn.Module, Arguments], tuple[Tensor, ...]] | None = None
    """(module, the forward's arguments) → the tensors that its slots are computed from, the key first."""
    slots: Callable[[nn.Module, Sequence[Tensor], Errors], list[LayerSlots]] | None = None
    """(module, what was saved, the gradient of its output) → its slots."""
    replay: Callable[[nn.Module, Arguments, Any, Any], SlotSource] | None = None
    """Instead of `saved` and `slots`, for modules that are computed once more in the backward pass: (module, the forward's arguments,
    what it returned, what `begin` gave) → where its slots come from."""
    begin: Callable[[nn.Module], Any] | None = None
    """Called before the forward pass, if there is something to remember."""
    why_left_out: Callable[[nn.Module], str | None] = lambda module: None
    """Why a module of this type cannot be recorded, or None."""

    def slot_source(self, module: nn.Module, arguments: Arguments, output: Any, begun: Any) -> SlotSource:
        """Where the slots of a call come from, once the module has run.

        output: what it returned, or aliases of that, so that gradients are those of what is done with it outside the module.
        """
        if self.replay is not None:
            return self.replay(module, arguments, output, begun)
        assert self.saved is not None
        assert self.slots is not None
        saved = self.saved(module, arguments)
        slots = partial(self.slots, module, saved)
        return SlotSource([output], slots, saved[0])


def _first(arguments: Arguments, name: str = "input") -> Tensor:
    positional, named = arguments
    value: Tensor = positional[0] if positional else named[name]
    return value


def _save_input(module: nn.Module, arguments: Arguments) -> tuple[Tensor, ...]:
    return (_first(arguments),)


def _save_x(module: nn.Module, arguments: Arguments) -> tuple[Tensor, ...]:
    return (_first(arguments, "x"),)


def _input_and_error(module: nn.Module, saved: Sequence[Tensor], errors: Errors) -> list[LayerSlots]:
    """The key is the module's input; the error signal is the gradient of its output."""
    return [LayerSlots("", saved[0], _error_of_output(errors))]


def _error_of_output(errors: Errors) -> Tensor | None:
    """The gradient of a module's only output."""
    return None if errors is None else errors[0]


def _bias(module: nn.Module, named: Naming) -> tuple[Use, ...]:
    if getattr(module, "bias", None) is None:
        return ()
    return (Use(named("bias"), "bias"),)


# Linear maps


def _linear(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    assert isinstance(module, nn.Linear)
    weight = Use(named("weight"), "weight")
    uses = (weight, *_bias(module, named))
    return [Layer(name, "linear", module.in_features, module.out_features, uses)]


def _conv1d_of_transformers(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    d_in, d_out = module.get_parameter("weight").shape
    weight = Use(named("weight"), "table")
    uses = (weight, *_bias(module, named))
    return [Layer(name, "linear", int(d_in), int(d_out), uses)]


# Convolutions


def geometry_of(module: nn.modules.conv._ConvNd) -> Geometry:
    """How a convolution cuts its patches."""
    last_axis_first = module._reversed_padding_repeated_twice
    padding: tuple[int, ...] = ()
    for before, after in zip(last_axis_first[::2], last_axis_first[1::2], strict=True):
        padding = (int(before), int(after), *padding)
    return Geometry(
        module.in_channels, module.kernel_size, module.stride, padding, module.dilation, module.padding_mode
    )


def _convolution(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    assert isinstance(module, nn.modules.conv._ConvNd)
    geometry = geometry_of(module)
    d_out = module.out_channels
    weight = Use(named("weight"), "weight", groups=module.groups)
    uses = (weight, *_bias(module, named))
    return [Layer(name, "convolution", geometry.patch, d_out, uses, form="maps", geometry=geometry)]


def _convolution_slots(module: nn.Module, saved: Sequence[Tensor], errors: Errors) -> list[LayerSlots]:
    assert isinstance(module, nn.modules.conv._ConvNd)
    maps = saved[0]
    error = _error_of_output(errors)
    is_single = maps.dim() == len(module.kernel_size) + 1
    if is_single:
        maps = maps.unsqueeze(0)
    if error is not None:
        error = error.unsqueeze(0) if is_single else error
        error = error.flatten(2).transpose(1, 2)  # (maps, positions, channels)
    return [LayerSlots("", maps, error, lead=1)]


# Elementwise weights of normalisations


def _affine(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    weight = module.weight
    if not isinstance(weight, Tensor):
        return []
    size = weight.numel()
    uses = (Use(named("weight"), "scale"), *_bias(module, named))
    return [Layer(name, "elementwise", size, size, uses, form="parts")]


def _save_for_affine(module: nn.Module, arguments: Arguments) -> tuple[Tensor, ...]:
    name = "x" if isinstance(module, nn.RMSNorm) else "input"
    return (_first(arguments, name), *_running_statistics(module))


def _affine_slots(module: nn.Module, saved: Sequence[Tensor], errors: Errors) -> list[LayerSlots]:
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
        # PyTorch rounds the gradient of a weight of 16 bits, and in other layouts each partial sum
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
    """One slot for each row: the terms of all its positions are summed. error, normal: (rows, channels, …).

    is_rounded: whether the training rounds the sums to the type of the error signals; that of the sums says so to the audit.
    """
    by_position = error.to(normal.dtype).flatten(2) if error.dim() > 2 else error.to(normal.dtype).unsqueeze(2)
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
    """The running statistics that a batch normalisation in evaluation mode has just used."""
    if not isinstance(module, nn.modules.batchnorm._BatchNorm) or module.training:
        return ()
    if module.running_mean is None:
        return ()
    assert module.running_var is not None
    return module.running_mean.clone(), module.running_var.clone()


def _normalised(module: nn.Module, given: Tensor, statistics: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The normalised input before weight and bias, and its shift: mean / deviation, None if the mean is not subtracted.

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
    """What a batch normalisation does, with running statistics or those of the batch; several times as fast as PyTorch's operation."""
    by_position = given.flatten(2) if given.dim() > 2 else given.unsqueeze(2)
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
    """A tensor shaped like the input, viewed so that its last axis runs over what shares a mean."""
    if isinstance(module, nn.GroupNorm):
        return tensor.reshape(len(tensor), module.num_groups, -1)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return tensor.flatten(2) if tensor.dim() > 2 else tensor.unsqueeze(2)
    return tensor


def _size_of_shifts(module: nn.Module, error: Tensor, shift: Tensor | None) -> float:
    """How much larger the absolute terms of error × normalised input may be than their products, however PyTorch computes them.

    Some of its kernels compute error × input / deviation and error × mean / deviation separately and subtract. The difference may be far
    smaller than both (a deviation far below the mean) or zero (one channel in a group); its rounding is not.
    """
    if shift is None:
        return 0.0
    # |input| / deviation is at most |normalised input| + |mean| / deviation
    norms = torch.linalg.vector_norm(_by_mean(module, error), dim=-1, keepdim=True, dtype=shift.dtype)
    return 2 * norm_of_tensor(norms * shift)


# Recurrent layers


def _recurrent(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    """One layer for each layer and direction: the key is input and previous hidden state side by side."""
    suffixes = recurrent.names(module)
    if len(suffixes) == 1:
        return [_recurrent_layer(module, name, named, suffixes[0])]
    return [_recurrent_layer(module, joined(name, suffix), named, suffix) for suffix in suffixes]


def _recurrent_layer(module: nn.Module, name: str, named: Naming, suffix: str) -> Layer:
    ending = f"_{suffix}" if suffix else ""
    d_gates, d_input = module.get_parameter(f"weight_ih{ending}").shape
    d_hidden = module.get_parameter(f"weight_hh{ending}").shape[1]
    d_in = d_input + d_hidden
    d_out = d_gates
    of_input: tuple[int, ...] = ()
    of_hidden: tuple[int, ...] = ()
    if isinstance(
        module, (nn.GRU, nn.GRUCell)
    ):  # its two weights see different error signals; see `recurrent.Unrolled`
        d_out = 4 * d_hidden
        of_input = (0, 3 * d_hidden)
        of_hidden = (0, 2 * d_hidden, 3 * d_hidden, d_out)
    uses = [
        Use(named(f"weight_ih{ending}"), "weight", keys=(0, d_input), errors=of_input),
        Use(named(f"weight_hh{ending}"), "weight", keys=(d_input, d_in), errors=of_hidden),
    ]
    if module.bias:
        uses.append(Use(named(f"bias_ih{ending}"), "bias", errors=of_input))
        uses.append(Use(named(f"bias_hh{ending}"), "bias", errors=of_hidden))
    return Layer(name, "recurrent", d_in, d_out, tuple(uses))


def _begin_recurrent(module: nn.Module) -> Tensor | None:
    has_dropout = float(getattr(module, "dropout", 0.0)) > 0
    return torch.get_rng_state() if module.training and has_dropout else None


def _replay_recurrent(module: nn.Module, arguments: Arguments, output: Any, begun: Any) -> SlotSource:
    outputs = recurrent.outputs(output)
    is_single = len(recurrent.names(module)) == 1
    shown = outputs[0].detach()
    version = outputs[0]._version
    autocast = Autocast.now(shown.device.type)

    def slots(errors: Errors) -> list[LayerSlots]:
        is_intact = shown._version == version  # not so after a dropout in place
        if errors is None and is_intact:
            keys = recurrent.shown_keys(module, arguments, shown)
            if keys is not None:
                return [LayerSlots("", keys, None, axis=1)]
        return [
            LayerSlots(
                "" if is_single else unrolled.name,
                unrolled.keys,
                unrolled.errors,
                axis=1,
                partial_sums=len(unrolled.keys),  # one for each time
                rounded_inside=isinstance(module, nn.LSTM),  # one operation, which rounds inside
            )
            for unrolled in recurrent.unroll(module, arguments, errors, begun, autocast)
        ]

    given = _first(arguments)
    key = given.data if isinstance(given, nn.utils.rnn.PackedSequence) else given
    return SlotSource(outputs, slots, key, keys=lambda: slots(None))


_CONVOLUTION = Rule(_convolution, _save_input, _convolution_slots)
_AFFINE = Rule(_affine, _save_for_affine, _affine_slots)
_RECURRENT = Rule(_recurrent, replay=_replay_recurrent, begin=_begin_recurrent, why_left_out=recurrent.why_left_out)
RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule(_linear, _save_input, _input_and_error),
    nn.Embedding: Rule(embedding.layers, _save_input, embedding.slots, why_left_out=embedding.why_left_out),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.LayerNorm: _AFFINE,
    nn.RMSNorm: _AFFINE,
    nn.GroupNorm: _AFFINE,
    nn.BatchNorm1d: _AFFINE,
    nn.BatchNorm2d: _AFFINE,
    nn.BatchNorm3d: _AFFINE,
    nn.MultiheadAttention: Rule(attention.layers, replay=attention.replay, begin=attention.begin),
    nn.LSTM: _RECURRENT,
    nn.GRU: _RECURRENT,
    nn.RNN: _RECURRENT,
    nn.LSTMCell: _RECURRENT,
    nn.GRUCell: _RECURRENT,
    nn.RNNCell: _RECURRENT,
}
_CONV1D_OF_TRANSFORMERS = Rule(_conv1d_of_transformers, _save_x, _input_and_error)
_EMBEDDING_ADAPTER = Rule(
    embedding_adapter.layers, replay=embedding_adapter.replay, why_left_out=embedding_adapter.why_left_out
)
_ELEMENTWISE = Rule(elementwise.layers, elementwise.save_input, elementwise.slots)
RECORDED_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Of parameters."""


def rule_for(module: nn.Module) -> Rule | None:
    """The rule for a module, or None: it is of a type that no rule covers."""
    package, _, _ = type(module).__module__.partition(".")
    if type(module).__name__ == "Conv1D" and package == "transformers":
        return _CONV1D_OF_TRANSFORMERS
    for kind, rule in RULES.items():
        if isinstance(module, kind):
            return rule
    if embedding_adapter.is_adapter(module):
        return _EMBEDDING_ADAPTER
    return _ELEMENTWISE if elementwise.is_elementwise(module) else None


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Modules inside another one that its rule covers: their own forward never runs."""
    if isinstance(module, nn.MultiheadAttention):
        return [module.out_proj]
    return embedding_adapter.parts(module) if embedding_adapter.is_adapter(module) else []


def why_left_out(module: nn.Module) -> str | None:
    """Why a module that has a rule cannot be recorded all the same, or None."""
    reason = _why_weights_are_left_out(module)
    if reason is not None:
        return reason
    if any(isinstance(module, kind) and type(module).forward is not kind.forward for kind in RULES):
        return f"its type {type(module).__name__} has a forward of its own"
    for inner in parts_of(module):
        reason = why_left_out(inner)
        if reason is not None:
            return f"of its {type(inner).__name__}: {reason}"
    rule = rule_for(module)
    return None if rule is None else rule.why_left_out(module)


def _why_weights_are_left_out(module: nn.Module) -> str | None:
    if embedding_adapter.is_adapter(module):
        tables = [table for inner in parts_of(module) for table in inner.parameters()]
        return _why_types_are_left_out(tables)
    if parametrize.is_parametrized(module):
        return "its weight is parametrised: the trained parameter is another one"
    parameters = list(module.parameters(recurse=False))
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in parameters):
        return "its weight is not initialised yet (a lazy layer): run the model once before record()"
    if _has_computed_weight(module):
        return "its weight is no parameter (old-style weight normalisation)"
    return _why_types_are_left_out(parameters)


def _why_types_are_left_out(parameters: Sequence[nn.Parameter]) -> str | None:
    for parameter in parameters:
        if parameter.dtype not in RECORDED_TYPES:
            known = ", ".join(map(_name_of_type, RECORDED_TYPES))
            return f"its weight is {_name_of_type(parameter.dtype)}; these types can be recorded: {known}"
    return None


def _has_computed_weight(module: nn.Module) -> bool:
    """Whether a hook of old-style weight normalisation computes its weight from other parameters."""
    if any("weight_g" in name for name in module._parameters):
        return True
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and "weight" not in module._parameters


def _name_of_type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def queries_of(layer: Layer, keys: Tensor) -> Tensor:
    """Queries as attention weights need them: patches instead of feature maps, (maps, positions, d_in)."""
    if layer.geometry is None:
        return keys
    maps = Patches(keys, layer.geometry)
    positions = layer.geometry.positions(maps.size)
    return maps.vectors().reshape(len(keys), math.prod(positions), layer.d_in)
