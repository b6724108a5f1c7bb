"""Recurrent layers, unrolled in time.

PyTorch runs nn.LSTM, nn.GRU and nn.RNN as one block and never shows the pre-activations of their gates. Here a call is
computed again, step by step, and a small autograd pass of its own gives their error signals. No parameter, no
`.grad` and no random state is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from dualform.layers.autocast import Autocast
from dualform.layers.slot_source import Arguments, Errors


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
    """Return the names of layers and directions in the order of `unroll`; "" for cells."""
    if not isinstance(module, nn.RNNBase):
        return [""]
    sides = ("", "_reverse") if module.bidirectional else ("",)
    return [f"l{layer}{side}" for layer in range(module.num_layers) for side in sides]


def outputs(value: Any) -> list[Tensor]:
    """List the tensors that a recurrent module returned: output (of a packed sequence its data), h_n, c_n; for cells h, c."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return [value.data]
    return [tensor for part in value for tensor in outputs(part)]


def dropout_between_layers(module: nn.Module) -> float:
    """Return the dropout between layers in training; 0 if there is one layer, or no dropout."""
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
    """Return keys and error signals of one call of a module, for each layer and direction, with rows in the caller's order.

    errors: the gradients of `outputs(module(*args, **kwargs))` by the use of each output outside the module (nn.LSTMCell computes h from
    the c that it returns); None is zero. An initial state counts as constant. rng: the CPU's random state just before the call, needed
    for dropout between layers. autocast: as it was during the call; error signals then have its 16-bit type.
    """
    is_cast = autocast is not None and autocast.is_on
    call = _Call(module, arguments, is_cast=is_cast)
    off = torch.autocast(call.x.device.type, enabled=False)
    context = off if autocast is None else autocast.again()
    with torch.set_grad_enabled(errors is not None), context:
        walks, output = _walk_layers(call, call.masks(rng))
        walk_errors: Sequence[Tensor | None] = [None] * len(walks)
        if errors is not None:
            walk_errors = _errors(call, walks, output, errors)
    by_walk = zip(names(module), walks, walk_errors, strict=True)
    return [Unrolled(name, walk.keys, error) for name, walk, error in by_walk]


def shown_keys(module: nn.Module, arguments: Arguments, output: Tensor) -> Tensor | None:
    """Return the keys of a call, (time, rows, d_input + d_hidden), if its output shows all hidden states; else None.

    It does for one layer in one direction. Nothing needs to be computed again then.
    """
    call = _Call(module, arguments)
    is_single = isinstance(module, nn.RNNBase) and len(call.weights) == 1
    if not is_single or call.packed is not None or not len(call.x):
        return None
    hidden = call.sequence(output)
    hidden_before = torch.cat([call.state[0], hidden[:-1]])
    return torch.cat([call.x, hidden_before], dim=-1)


def weights_of(module: nn.Module) -> list[list[Tensor]]:
    """Return [weight_ih, weight_hh] or [weight_ih, weight_hh, bias_ih, bias_hh] for each layer and direction."""
    if isinstance(module, nn.RNNBase):
        return [list(group) for group in module.all_weights]
    parts = [getattr(module, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    return [[part for part in parts if part is not None]]


class _Call:
    """One call of a module, as (time, rows, features) with the rows in the caller's order; a cell has one time."""

    def __init__(self, module: nn.Module, arguments: Arguments, *, is_cast: bool = False) -> None:
        """is_cast: it ran under autocast, and its input keeps its own type."""
        positional, named = arguments
        given = dict(zip(("input", "hx"), positional, strict=False)) | named
        entry = given["input"]
        state = given.get("hx")
        self.module = module
        self._is_cast = is_cast
        self.weights = [[weight.detach() for weight in group] for group in weights_of(module)]
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
        """Return the dropout masks of all layers but the last. PyTorch draws them with the time first, or for packed data."""
        module = self.module
        probability = dropout_between_layers(module)
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
        """Return the next state, by the same operations as PyTorch, since each of them rounds to 16 bits under autocast.

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
    """One layer and direction, computed step by step."""

    keys: Tensor
    pre: Tensor  # (time, rows, d_error): the input's part of the pre-activations, with the same gradients as the whole
    hidden: Tensor  # (time, rows, d_hidden): h after each time
    state: list[Tensor]  # the last h (and c)
    of_hidden: list[Tensor]  # at each time, what weight_hh makes of h, if its gradient is another one (GRU)


def _walk(call: _Call, x: Tensor, place: int) -> _Walk:
    """Compute one layer and direction step by step. Where a sequence has ended, or not yet begun, the state does not change."""
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
    """Compute all layers and directions; return the output of the last layer, too."""
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
    """Return a tensor that requires a gradient, if gradients are enabled."""
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
