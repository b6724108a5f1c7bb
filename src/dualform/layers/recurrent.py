"""Recurrent layers, unrolled in time.

PyTorch runs nn.LSTM, nn.GRU and nn.RNN as one block and never shows the pre-activations of their gates. Here a call is
computed again, step by step, and a small autograd pass of its own gives their error signals. No parameter, no
`.grad` and no random state is changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from dualform.layers.autocast import Autocast
from dualform.layers.layer import Layer, Use, joined
from dualform.layers.slot_source import Arguments, Errors, LayerSlots, Naming, SlotSource, first_argument


@dataclass(frozen=True)
class Unrolled:
    """One layer and direction of a recurrent module, unrolled in time."""

    name: str
    """As its weights are called: "l0", "l0_reverse", "l1" …; "" for cells."""
    keys: Tensor
    """(time, rows, d_input + d_hidden): input and previous hidden state; zero where a packed sequence has ended."""
    errors: Tensor | None
    """(time, rows, d_error): error signals of the pre-activations, likewise; None if no errors were given.

    LSTM: of the gates i, f, g, o. GRU: r, z, n_input, n_hidden, where n = tanh(n_input + r · n_hidden); the first three
    belong to weight_ih, and r, z, n_hidden to weight_hh. RNN: of its one pre-activation.
    """


def names(module: nn.Module) -> list[str]:
    """The layers and directions in the order of `unroll`; "" for cells."""
    if not isinstance(module, nn.RNNBase):
        return [""]
    sides = ("", "_reverse") if module.bidirectional else ("",)
    return [f"l{layer}{side}" for layer in range(module.num_layers) for side in sides]


def outputs(value: Any) -> list[Tensor]:
    """What a recurrent module returned: output (of a packed sequence its data), h_n, c_n; for cells h, c."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return [value.data]
    return [tensor for part in value for tensor in outputs(part)]


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
    weights = itertools.chain(*_weights(module))
    reasons = (_why_weight_is_left_out(weight, _dropout_between_layers(module)) for weight in weights)
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


def _dropout_between_layers(module: nn.Module) -> float:
    """The dropout of a module in training; 0 if it has one layer, or no dropout at all."""
    if not isinstance(module, nn.RNNBase) or module.num_layers == 1:
        return 0.0
    return float(module.dropout)


def unroll(
    module: nn.Module,
    arguments: Arguments,
    errors: Errors = None,
    rng: Tensor | None = None,
    autocast: Autocast | None = None,
) -> list[Unrolled]:
    """Keys and error signals of one call of a module, for each layer and direction; rows in the caller's order.

    errors: the gradients of `outputs(module(*args, **kwargs))` by what is done with each of them outside the module (nn.LSTMCell
    computes h from the c that it returns); None is zero. An initial state counts as constant. rng: the CPU's random state just before the call, needed for dropout between layers. autocast: as it was
    during the call; then error signals have its 16-bit type.
    """
    is_cast = autocast is not None and autocast.is_on
    call = _Call(module, arguments, is_cast=is_cast)
    off = torch.autocast(call.x.device.type, enabled=False)
    context = off if autocast is None else autocast.again()
    with torch.set_grad_enabled(errors is not None), context:
        walks, output = _walk_layers(call, call.masks(rng))
        found: Sequence[Tensor | None] = [None] * len(walks)
        if errors is not None:
            found = _errors(call, walks, output, errors)
    named = zip(names(module), walks, found, strict=True)
    return [Unrolled(name, walk.keys, error) for name, walk, error in named]


def shown_keys(module: nn.Module, arguments: Arguments, output: Tensor) -> Tensor | None:
    """(time, rows, d_input + d_hidden): the keys of a call whose output shows all hidden states; None where it does not.

    It does for one layer in one direction, and then nothing needs to be computed.
    """
    call = _Call(module, arguments)
    is_single = isinstance(module, nn.RNNBase) and len(call.weights) == 1
    if not is_single or call.packed is not None or not len(call.x):
        return None
    hidden = call.sequence(output)
    hidden_before = torch.cat([call.state[0], hidden[:-1]])
    return torch.cat([call.x, hidden_before], dim=-1)


def _weights(module: nn.Module) -> list[list[Tensor]]:
    """[weight_ih, weight_hh] or [weight_ih, weight_hh, bias_ih, bias_hh] for each layer and direction."""
    if isinstance(module, nn.RNNBase):
        return [list(group) for group in module.all_weights]
    parts = [getattr(module, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    return [[part for part in parts if part is not None]]


class _Call:
    """One call of a module, as (time, rows, features) with the rows in the caller's order; a cell has one time."""

    def __init__(self, module: nn.Module, arguments: Arguments, *, is_cast: bool = False) -> None:
        """is_cast: it ran under autocast, and what came in keeps its own type."""
        positional, named = arguments
        given = dict(zip(("input", "hx"), positional, strict=False)) | named
        entry = given["input"]
        state = given.get("hx")
        self.module = module
        self._is_cast = is_cast
        self.weights = [[weight.detach() for weight in group] for group in _weights(module)]
        self.hidden = self.weights[0][1].shape[1]
        self.sides = 2 if isinstance(module, nn.RNNBase) and module.bidirectional else 1
        self.layers = len(self.weights) // self.sides
        self.packed = entry if isinstance(entry, PackedSequence) else None
        self.x = self.sequence(outputs(entry)[0])
        self.alive: Tensor | None = None  # (time, rows, 1): before the end of each sequence
        if self.packed is not None:
            ones = torch.ones_like(self.packed.data[:, :1])
            self.alive = self.sequence(ones) > 0
        if state is not None:
            self.state = [self.stacked(part) for part in outputs(state)]
        else:
            rows = self.x.shape[1]
            zeros = self.x.new_zeros(len(self.weights), rows, self.hidden)
            has_cell_state = isinstance(module, nn.LSTM | nn.LSTMCell)
            self.state = [zeros, zeros] if has_cell_state else [zeros]

    def stacked(self, state: Tensor) -> Tensor:
        """An initial or final state → (layers × directions, rows, d_hidden)."""
        if isinstance(self.module, nn.RNNCellBase):
            state = state.reshape(1, -1, state.shape[-1])
        state = state.detach()
        if state.dim() != 3:
            state = state.unsqueeze(1)
        if self._is_cast:
            return state
        return state.to(self.weights[0][0])

    def sequence(self, values: Tensor) -> Tensor:
        """An input or output (of a packed sequence its data) → (time, rows, features), zero after a sequence's end."""
        if self.packed is not None:
            padded, _ = pad_packed_sequence(PackedSequence(values, *self.packed[1:]))
            return self.stacked(padded)
        is_batch_first = isinstance(self.module, nn.RNNBase) and self.module.batch_first
        if is_batch_first and values.dim() == 3:
            values = values.transpose(0, 1)
        return self.stacked(values)

    def masks(self, rng: Tensor | None) -> list[Tensor]:
        """What dropout multiplied the output of each layer but the last by; torch draws time first, or packed data."""
        module = self.module
        probability = _dropout_between_layers(module)
        if not module.training or not probability:
            return []
        if rng is None or self.x.device.type != "cpu":
            raise RuntimeError("Dropout between layers needs rng, the CPU's random state just before the forward.")
        width = self.sides * self.hidden
        lead = self.x.shape[:2]
        if self.packed is not None:
            lead = self.packed.data.shape[:1]
        ones = self.x.new_ones(*lead, width)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(rng)
            drawn = [dropout(ones, probability) for _ in range(self.layers - 1)]
        if self.packed is None:
            return drawn
        return [self.sequence(mask) for mask in drawn]

    def step(self, of_input: Tensor, of_hidden: Tensor, h: Tensor, c: Tensor | None = None) -> list[Tensor]:
        """The next state, in the order of PyTorch's own operations: under autocast, each of them rounds to 16 bits.

        of_input, of_hidden: what the weights make of the input and of the previous hidden state, each with its bias.
        """
        if c is not None:
            pre = of_hidden + of_input
            i, f, g, o = pre.chunk(4, dim=-1)
            kept = f.sigmoid() * c
            added = i.sigmoid() * g.tanh()
            c = kept + added
            return [o.sigmoid() * c.tanh(), c]
        if isinstance(self.module, nn.GRU | nn.GRUCell):
            r_input, z_input, n_input = of_input.chunk(3, dim=-1)
            r_hidden, z_hidden, n_hidden = of_hidden.chunk(3, dim=-1)
            r = (r_hidden + r_input).sigmoid()
            z = (z_hidden + z_input).sigmoid()
            new = (n_input + n_hidden * r).tanh()
            return [(h - new) * z + new]
        pre = of_hidden + of_input
        is_relu = getattr(self.module, "nonlinearity", None) == "relu"
        return [pre.relu() if is_relu else pre.tanh()]


class _Walk(NamedTuple):
    """One layer and direction, walked through in time."""

    keys: Tensor
    pre: Tensor  # (time, rows, d_error): the input's part of the pre-activations, with the same gradients as the whole
    hidden: Tensor  # (time, rows, d_hidden): h after each time
    state: list[Tensor]  # the last h (and c)
    of_hidden: list[Tensor]  # at each time, what weight_hh makes of h, if its gradient is another one (GRU)


def _walk(call: _Call, x: Tensor, place: int) -> _Walk:
    """Walk through one layer and direction; where a sequence has ended, or not yet begun, the state stays as it is."""
    w_ih, w_hh, *biases = call.weights[place]
    b_ih, b_hh = biases or (None, None)
    pre = _watched(linear(x, w_ih, b_ih))
    steps = pre.unbind()
    state = [part[place] for part in call.state]
    # One for each time; all are replaced below
    before = [x] * len(x)
    after = before.copy()
    of_hidden = before.copy()
    is_reverse = place % call.sides == 1
    times = range(len(x))
    for time in reversed(times) if is_reverse else times:
        of_hidden[time] = _watched(linear(state[0], w_hh, b_hh))
        new = call.step(steps[time], of_hidden[time], *state)
        if call.alive is not None:
            is_alive = call.alive[time]
            new = [torch.where(is_alive, *pair) for pair in zip(new, state, strict=True)]
        before[time] = state[0]
        after[time] = new[0]
        state = new
    hidden_before = torch.stack(before).detach()
    keys = torch.cat([x.detach(), hidden_before], dim=-1)
    keys = keys.to(w_ih.dtype)
    if call.alive is not None:
        keys = keys * call.alive
    if not isinstance(call.module, nn.GRU | nn.GRUCell):
        of_hidden = []  # they have the gradients of `pre`
    return _Walk(keys, pre, torch.stack(after), state, of_hidden)


def _walk_layers(call: _Call, masks: Sequence[Tensor]) -> tuple[list[_Walk], Tensor]:
    """Walk through all layers and directions; return the output of the last layer too."""
    walks: list[_Walk] = []
    x = call.x
    for layer in range(call.layers):
        first = layer * call.sides
        of_layer = [_walk(call, x, place) for place in range(first, first + call.sides)]
        walks += of_layer
        x = torch.cat([walk.hidden for walk in of_layer], dim=-1)
        if layer < len(masks):
            x = x * masks[layer].to(x.dtype)
    return walks, x


def _watched(tensor: Tensor) -> Tensor:
    """A tensor whose gradient may be asked for, if gradients are on."""
    needs_mark = torch.is_grad_enabled() and not tensor.requires_grad
    return tensor.requires_grad_() if needs_mark else tensor


def _errors(call: _Call, walks: list[_Walk], output: Tensor, errors: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """(time, rows, d_error) for each walk."""
    parts_of_states = zip(*(walk.state for walk in walks), strict=True)
    values = [torch.stack(parts) for parts in parts_of_states]
    if not isinstance(call.module, nn.RNNCellBase):
        values.insert(0, output)
    slopes: list[Tensor] = []
    for value, error in zip(values, errors, strict=True):
        if error is None:
            slopes.append(torch.zeros_like(value))
            continue
        laid_out = call.sequence(error) if value is output else call.stacked(error)
        slopes.append(laid_out.to(value.dtype))
    wanted = [tensor for walk in walks for tensor in (walk.pre, *walk.of_hidden)]
    gradients = iter(torch.autograd.grad(values, wanted, slopes))
    return [_errors_of_walk(walk, gradients) for walk in walks]


def _errors_of_walk(walk: _Walk, gradients: Iterator[Tensor]) -> Tensor:
    """The next gradients: those of pre-activations, then those of a GRU's n_hidden, the last third of `of_hidden`."""
    of_input = next(gradients)
    if not walk.of_hidden:
        return of_input
    of_hidden = torch.stack([next(gradients) for _ in walk.of_hidden])
    of_n_hidden = of_hidden.chunk(3, dim=-1)[2]
    return torch.cat([of_input, of_n_hidden], dim=-1)
