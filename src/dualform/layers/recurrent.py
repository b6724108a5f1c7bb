"""nn.LSTM, nn.GRU, nn.RNN and their cells: their layers, and the slots of a call, which is unrolled in time (layers/unroll.py)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dualform.layers.autocast import Autocast
from dualform.layers.layer import Layer, Use, joined
from dualform.layers.slot_source import Arguments, Errors, LayerSlots, Naming, SlotSource, first_argument
from dualform.layers.unroll import dropout_between_layers, names, outputs, shown_keys, unroll, weights_of


def layers(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    """Return a recorded layer for each layer and direction. Its key is the input and the previous hidden state, side by side."""
    suffixes = names(module)
    if len(suffixes) == 1:
        return [_recurrent_layer(module, name, named, suffixes[0])]
    return [_recurrent_layer(module, joined(name, suffix), named, suffix) for suffix in suffixes]


def _recurrent_layer(module: nn.Module, name: str, named: Naming, suffix: str) -> Layer:
    ending = f"_{suffix}" if suffix else ""
    d_gates, d_input = module.get_parameter(f"weight_ih{ending}").shape
    d_hidden = module.get_parameter(f"weight_hh{ending}").shape[1]
    d_in = d_input + d_hidden
    d_out = d_gates
    input_errors: tuple[int, ...] = ()
    hidden_errors: tuple[int, ...] = ()
    if isinstance(module, (nn.GRU, nn.GRUCell)):  # its two weights see different error signals; see `Unrolled`
        d_out = 4 * d_hidden
        input_errors = (0, 3 * d_hidden)
        hidden_errors = (0, 2 * d_hidden, 3 * d_hidden, d_out)
    uses = [
        Use(named(f"weight_ih{ending}"), "weight", keys=(0, d_input), errors=input_errors),
        Use(named(f"weight_hh{ending}"), "weight", keys=(d_input, d_in), errors=hidden_errors),
    ]
    if module.bias:
        uses.append(Use(named(f"bias_ih{ending}"), "bias", errors=input_errors))
        uses.append(Use(named(f"bias_hh{ending}"), "bias", errors=hidden_errors))
    return Layer(name, "recurrent", d_in, d_out, tuple(uses))


def begin(module: nn.Module) -> Tensor | None:
    """Return the random state that its dropout between layers will use; None if it has none."""
    has_dropout = float(getattr(module, "dropout", 0.0)) > 0
    return torch.get_rng_state() if module.training and has_dropout else None


def replay(module: nn.Module, arguments: Arguments, output: Any, begun: Any) -> SlotSource:
    """Return where the slots of a call come from: the call unrolled in time."""
    own_outputs = outputs(output)
    is_single = len(names(module)) == 1
    shown = own_outputs[0].detach()
    version = own_outputs[0]._version
    autocast = Autocast.now(shown.device.type)

    def slots(errors: Errors) -> list[LayerSlots]:
        is_intact = shown._version == version  # not so after a dropout in place
        if errors is None and is_intact:
            keys = shown_keys(module, arguments, shown)
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
            for unrolled in unroll(module, arguments, errors, begun, autocast)
        ]

    given = first_argument(arguments)
    key = given.data if isinstance(given, PackedSequence) else given
    return SlotSource(own_outputs, slots, key, keys=lambda: slots(None))


def why_left_out(module: nn.Module) -> str | None:
    """Return why a recurrent module cannot be recorded, beyond the reasons in rules.py; None if it can."""
    if getattr(module, "proj_size", 0):
        return "it projects its hidden states (proj_size), and the keys of weight_hr are not recorded"
    weights = itertools.chain(*weights_of(module))
    reasons = (_why_weight_is_left_out(weight, dropout_between_layers(module)) for weight in weights)
    return next(filter(None, reasons), None)


def _why_weight_is_left_out(weight: Tensor, dropout: float) -> str | None:
    if not isinstance(weight, nn.Parameter):
        return "one of its weights is no parameter (old-style weight normalisation)"
    if weight.dtype not in (torch.float32, torch.float64):
        dtype = str(weight.dtype).removeprefix("torch.")
        return f"its weights are {dtype}; float32 and float64 can be recorded"
    device = weight.device.type
    if device != "cpu" and dropout:
        return f"its dropout runs on {device}, and only masks drawn on the CPU can be drawn again"
    return None
