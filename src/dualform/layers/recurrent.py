"""Recurrent layers, taken apart in time.

torch runs nn.LSTM, nn.GRU and nn.RNN as one block and never shows the pre-activations of their gates. Here a call is
computed once more, step by step, and a small autograd pass of its own gives their error signals. No parameter, no
`.grad` and no random state is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from dualform.layers.autocast import Autocast

KINDS: tuple[type[nn.Module], ...] = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)


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


def why_left_out(module: nn.Module) -> str | None:
    """Why a module cannot be recorded, or None."""
    kind = next((kind for kind in KINDS if isinstance(module, kind)), None)
    if kind is None:
        return f"its type {type(module).__name__} is none of {', '.join(kind.__name__ for kind in KINDS)}"
    if type(module).forward is not kind.forward:
        return f"its type {type(module).__name__} has a forward of its own"
    if parametrize.is_parametrized(module):
        return "its weights are parametrised: the trained parameters are others"
    if getattr(module, "proj_size", 0):
        return "it projects its hidden states (proj_size), and the keys of weight_hr are not recorded"
    for weight in (weight for group in _weights(module) for weight in group):
        if not isinstance(weight, nn.Parameter):
            return "one of its weights is no parameter (old-style weight normalisation)"
        if weight.dtype not in (torch.float32, torch.float64):
            return f"its weights are {str(weight.dtype).removeprefix('torch.')}; float32 and float64 can be recorded"
        if weight.device.type != "cpu" and isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            return f"its dropout runs on {weight.device.type}, and only masks drawn on the CPU can be drawn again"
    return None


def unroll(
    module: nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    errors: Sequence[Tensor | None] | None = None,
    rng: Tensor | None = None,
    autocast: Autocast | None = None,
) -> list[Unrolled]:
    """Keys and error signals of one call of a module, for each layer and direction; rows in the caller's order.

    errors: the gradients of `outputs(module(*args, **kwargs))` by what is done with each of them outside the module (nn.LSTMCell
    computes h from the c that it returns); None is zero. An initial state counts as constant. rng: the CPU's random state just before the call, needed for dropout between layers. autocast: as it was
    during the call; then error signals have its 16-bit type.
    """
    is_cast = autocast is not None and autocast.is_on
    call = _Call(module, *arguments, is_cast=is_cast)
    walks: list[_Walk] = []
    x = call.x
    masks = call.masks(rng)
    context = autocast.again() if autocast is not None else torch.autocast(x.device.type, enabled=False)
    with torch.set_grad_enabled(errors is not None), context:
        for place in range(len(call.weights)):
            walks.append(_walk(call, x, place))
            if (place + 1) % call.sides == 0:
                x = torch.cat([walk.hidden for walk in walks[-call.sides :]], dim=-1)
                x = x * masks.pop(0).to(x.dtype) if masks else x
        found = [None] * len(walks) if errors is None else _errors(call, walks, x, errors)
    return [Unrolled(name, walk.keys, error) for name, walk, error in zip(names(module), walks, found, strict=True)]


def shown_keys(module: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]], output: Tensor) -> Tensor | None:
    """(time, rows, d_input + d_hidden): the keys of a call whose output shows all hidden states; None where it does not.

    It does for one layer in one direction, and then nothing needs to be computed.
    """
    call = _Call(module, *arguments)
    if not isinstance(module, nn.RNNBase) or len(call.weights) > 1 or call.packed is not None or not len(call.x):
        return None
    before = torch.cat([call.state[0], call.sequence(output)[:-1]])
    return torch.cat([call.x, before], dim=-1)


def _weights(module: nn.Module) -> list[list[Tensor]]:
    """[weight_ih, weight_hh] or [weight_ih, weight_hh, bias_ih, bias_hh] for each layer and direction."""
    if isinstance(module, nn.RNNBase):
        return [list(group) for group in module.all_weights]
    parts = [getattr(module, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    return [[part for part in parts if part is not None]]


class _Call:
    """One call of a module, as (time, rows, features) with the rows in the caller's order; a cell has one time."""

    def __init__(
        self, module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any], *, is_cast: bool = False
    ) -> None:
        """is_cast: it ran under autocast, and what came in keeps its own type."""
        given = dict(zip(("input", "hx"), positional, strict=False)) | named
        entry = given["input"]
        state = given.get("hx")
        self.module = module
        self._is_cast = is_cast
        self.weights = [[weight.detach() for weight in group] for group in _weights(module)]
        self.hidden = self.weights[0][1].shape[1]
        self.sides = 2 if isinstance(module, nn.RNNBase) and module.bidirectional else 1
        self.packed = entry if isinstance(entry, PackedSequence) else None
        self.x = self.sequence(outputs(entry)[0])
        self.alive = None if self.packed is None else self.sequence(torch.ones_like(self.packed.data[:, :1])) > 0
        zeros = self.x.new_zeros(len(self.weights), self.x.shape[1], self.hidden)
        start = [zeros, zeros] if isinstance(module, nn.LSTM | nn.LSTMCell) else [zeros]
        self.state = start if state is None else [self.stacked(part) for part in outputs(state)]

    def stacked(self, state: Tensor) -> Tensor:
        """An initial or final state → (layers × directions, rows, d_hidden)."""
        if isinstance(self.module, nn.RNNCellBase):
            state = state.reshape(1, -1, state.shape[-1])
        apart = (state if state.dim() == 3 else state.unsqueeze(1)).detach()
        return apart if self._is_cast else apart.to(self.weights[0][0])

    def sequence(self, values: Tensor) -> Tensor:
        """An input or output (of a packed sequence its data) → (time, rows, features), zero after a sequence's end."""
        if self.packed is not None:
            return self.stacked(pad_packed_sequence(PackedSequence(values, *self.packed[1:]))[0])
        turned = isinstance(self.module, nn.RNNBase) and self.module.batch_first and values.dim() == 3
        return self.stacked(values.transpose(0, 1) if turned else values)

    def masks(self, rng: Tensor | None) -> list[Tensor]:
        """What dropout multiplied the output of each layer but the last by; torch draws time first, or packed data."""
        module = self.module
        if not (isinstance(module, nn.RNNBase) and module.training and module.dropout and module.num_layers > 1):
            return []
        if rng is None or self.x.device.type != "cpu":
            raise RuntimeError("Dropout between layers needs rng, the CPU's random state just before the forward.")
        lead = self.x.shape[:2] if self.packed is None else self.packed.data.shape[:1]
        ones = self.x.new_ones(*lead, self.sides * self.hidden)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(rng)
            drawn = [dropout(ones, module.dropout) for _ in range(module.num_layers - 1)]
        return drawn if self.packed is None else [self.sequence(mask) for mask in drawn]

    def step(self, of_input: Tensor, of_hidden: Tensor, h: Tensor, c: Tensor | None = None) -> list[Tensor]:
        """The next state, in the order of PyTorch's own operations: under autocast, each of them rounds to 16 bits.

        of_input, of_hidden: what the weights make of the input and of the previous hidden state, each with its bias.
        """
        if c is not None:
            i, f, g, o = (of_hidden + of_input).chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            return [o.sigmoid() * c.tanh(), c]
        if isinstance(self.module, nn.GRU | nn.GRUCell):
            r_input, z_input, n_input = of_input.chunk(3, dim=-1)
            r_hidden, z_hidden, n_hidden = of_hidden.chunk(3, dim=-1)
            new = (n_input + n_hidden * (r_hidden + r_input).sigmoid()).tanh()
            return [(h - new) * (z_hidden + z_input).sigmoid() + new]
        pre = of_hidden + of_input
        return [pre.relu() if getattr(self.module, "nonlinearity", None) == "relu" else pre.tanh()]


class _Walk(NamedTuple):
    """One layer and direction, walked through in time."""

    keys: Tensor
    pre: Tensor  # (time, rows, d_error): the input's part of the pre-activations, with the same gradients as the whole
    hidden: Tensor  # (time, rows, d_hidden): h after each time
    state: list[Tensor]  # the last h (and c)
    of_hidden: list[Tensor]  # at each time, what weight_hh makes of h, if its gradient is another one (GRU)


def _walk(call: _Call, x: Tensor, place: int) -> _Walk:
    """Walk through time; where a sequence has ended, or not yet begun, the state stays as it is."""
    w_ih, w_hh, *biases = call.weights[place]
    b_ih, b_hh = biases or (None, None)
    pre = _watched(linear(x, w_ih, b_ih))
    steps = pre.unbind()
    state = [part[place] for part in call.state]
    before, after, of_hidden = [x] * len(x), [x] * len(x), [x] * len(x)
    for time in range(len(x))[:: -1 if place % call.sides else 1]:
        of_hidden[time] = _watched(linear(state[0], w_hh, b_hh))
        new = call.step(steps[time], of_hidden[time], *state)
        if call.alive is not None:
            new = [torch.where(call.alive[time], *pair) for pair in zip(new, state, strict=True)]
        before[time] = state[0]
        after[time] = new[0]
        state = new
    keys = torch.cat([x.detach(), torch.stack(before).detach()], dim=-1).to(w_ih.dtype)
    if call.alive is not None:
        keys = keys * call.alive
    is_gru = isinstance(call.module, nn.GRU | nn.GRUCell)
    return _Walk(keys, pre, torch.stack(after), state, of_hidden if is_gru else [])


def _watched(tensor: Tensor) -> Tensor:
    """A tensor whose gradient may be asked for, if gradients are on."""
    return tensor.requires_grad_() if torch.is_grad_enabled() and not tensor.requires_grad else tensor


def _errors(call: _Call, walks: list[_Walk], output: Tensor, errors: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """(time, rows, d_error) for each walk."""
    ends = [torch.stack(parts) for parts in zip(*(walk.state for walk in walks), strict=True)]
    values = ends if isinstance(call.module, nn.RNNCellBase) else [output, *ends]
    grads: list[Tensor] = []
    for value, error in zip(values, errors, strict=True):
        laid_out = call.sequence if value is output else call.stacked
        grads.append(torch.zeros_like(value) if error is None else laid_out(error).to(value.dtype))
    wanted = [tensor for walk in walks for tensor in (walk.pre, *walk.of_hidden)]
    found = iter(torch.autograd.grad(values, wanted, grads))
    return [_of_gates(next(found), [next(found) for _ in walk.of_hidden]) for walk in walks]


def _of_gates(of_input: Tensor, of_hidden: list[Tensor]) -> Tensor:
    """The gradients of pre-activations; those of a GRU's n_hidden, the last third of `of_hidden`, come last."""
    if not of_hidden:
        return of_input
    return torch.cat([of_input, torch.stack(of_hidden).chunk(3, dim=-1)[2]], dim=-1)
