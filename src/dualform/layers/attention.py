"""nn.MultiheadAttention, whose projections are hidden in one function and therefore computed again.

PyTorch's own function runs again with identity projections, on queries, keys and values that we have projected: the gradients of these
are the error signals of the projections, and its output is the input of the last projection.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualform.layers.autocast import Autocast
from dualform.layers.layer import Layer, Use, joined
from dualform.layers.slot_source import Arguments, Errors, LayerSlots, Naming, SlotSource
from dualform.projection import has_float64

PARTS = ("q", "k", "v")
_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


def layers(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    """Return the projections of query, key and value, and that of the output."""
    assert isinstance(module, nn.MultiheadAttention)
    width = module.embed_dim
    widths_of_inputs = (width, module.kdim, module.vdim)
    recorded = []
    for place, part in enumerate(PARTS):
        rows = (place * width, (place + 1) * width)
        if module._qkv_same_embed_dim:
            uses = [Use(named("in_proj_weight"), "weight", rows=rows)]
        else:
            uses = [Use(named(f"{part}_proj_weight"), "weight")]
        if module.in_proj_bias is not None:
            uses.append(Use(named("in_proj_bias"), "bias", rows=rows))
        d_in = widths_of_inputs[place]
        recorded.append(Layer(joined(name, part), "attention", d_in, width, tuple(uses)))
    uses = [Use(named("out_proj.weight"), "weight")]
    if module.out_proj.bias is not None:
        uses.append(Use(named("out_proj.bias"), "bias"))
    recorded.append(Layer(joined(name, "out_proj"), "linear", width, width, tuple(uses)))
    return recorded


def begin(module: nn.Module) -> Tensor | None:
    """Return the random state that its dropout will use; None if it has no dropout."""
    assert isinstance(module, nn.MultiheadAttention)
    return torch.get_rng_state() if module.training and module.dropout > 0 else None


def replay(module: nn.Module, arguments: Arguments, output: Any, begun: Any) -> SlotSource:
    """Return where the slots of a call come from: its function, computed again."""
    assert isinstance(module, nn.MultiheadAttention)
    positional, named = arguments
    bound = _SIGNATURE.bind(module, *positional, **named)
    bound.apply_defaults()
    options = dict(bound.arguments)
    has_gradient = [tensor is not None and tensor.requires_grad for tensor in output]
    call = _Call(module, options, begun, has_gradient, module.training)
    query: Tensor = options["query"]
    autocast = Autocast.now(query.device.type)

    def slots(errors: Errors) -> list[LayerSlots]:
        with autocast.again():
            return call.slots(errors)

    return SlotSource(list(compress(output, has_gradient)), slots, query)


@dataclass(frozen=True)
class _Call:
    """One call of a module, to be computed again."""

    module: nn.MultiheadAttention
    options: dict[str, Any]
    """Its arguments by name."""
    random_state: Tensor | None
    """The random state that its dropout used, if it has dropout."""
    has_gradient: list[bool]
    """Whether its output, and its attention weights, have a gradient."""
    training: bool

    def slots(self, errors: Errors) -> list[LayerSlots]:
        """Return the slots of the projections of query, key and value, and of that of the output."""
        inputs = [self._with_rows(self.options[name]).detach() for name in ("query", "key", "value")]
        with torch.enable_grad():
            projected = self._project(inputs)
            context, weights = self._attend(projected)
        keys = [*inputs, self._swapped(context.detach())]
        names = (*PARTS, "out_proj")
        axis = 0 if self._is_batch_first else 1
        if errors is None:
            return [LayerSlots(name, key, None, axis) for name, key in zip(names, keys, strict=True)]
        of_output, of_weights = self._by_output(errors)
        of_output = torch.zeros_like(keys[-1]) if of_output is None else self._with_rows(of_output)
        targets = [context]
        slopes = [self._slope_of_context(of_output).to(context.dtype)]
        if of_weights is not None and weights is not None:
            targets.append(weights)
            slopes.append(of_weights.reshape(weights.shape).to(weights.dtype))
        of_projected = torch.autograd.grad(targets, projected, slopes)
        signals = [*map(self._swapped, of_projected), of_output]
        terms = [*self._sizes_of_terms(projected, slopes[0], of_weights), 0.0]
        by_layer = zip(names, keys, signals, terms, strict=True)
        return [LayerSlots(name, key, error, axis, error_terms=size) for name, key, error, size in by_layer]

    def _by_output(self, errors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of output and attention weights. errors: of those that have one."""
        remaining = iter(errors)
        return [next(remaining) if has_gradient else None for has_gradient in self.has_gradient]

    @property
    def _is_single(self) -> bool:
        """Whether its arguments are one sequence, without an axis of rows."""
        query: Tensor = self.options["query"]
        return query.dim() == 2

    @property
    def _is_batch_first(self) -> bool:
        return self.module.batch_first and not self._is_single

    def _with_rows(self, tensor: Tensor) -> Tensor:
        """Add an axis of rows to a single sequence."""
        return tensor.unsqueeze(1) if self._is_single else tensor

    def _swapped(self, tensor: Tensor) -> Tensor:
        """Convert from the module's order of axes to (time, rows, features), or back."""
        return tensor.transpose(0, 1) if self._is_batch_first else tensor

    def _project(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return the projected inputs, (time, rows, features), as leaves that require gradients."""
        pairs = zip(inputs, _projections(self.module), strict=True)
        results = [F.linear(self._swapped(given), *projection) for given, projection in pairs]
        return [result.detach().requires_grad_() for result in results]

    def _slope_of_context(self, of_output: Tensor) -> Tensor:
        """Return the gradient of the output of the heads."""
        error = self._swapped(of_output)
        weight = self.module.out_proj.weight.detach()
        return error @ weight.to(error.dtype)

    def _attend(self, projected: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Run PyTorch's own attention with identity projections and the same random numbers."""
        module = self.module
        options = self.options
        query, key, value = projected
        identity = torch.eye(module.embed_dim, dtype=query.dtype, device=query.device)
        padding = options["key_padding_mask"]
        if padding is not None and padding.dim() == 1:
            padding = padding.unsqueeze(0)
        with _random_state(self.random_state):
            context_and_weights: tuple[Tensor, Tensor | None] = F.multi_head_attention_forward(
                query,
                key,
                value,
                module.embed_dim,
                module.num_heads,
                None,
                None,
                None if module.bias_k is None else module.bias_k.detach(),
                None if module.bias_v is None else module.bias_v.detach(),
                module.add_zero_attn,
                module.dropout,
                identity,
                None,
                training=self.training,
                key_padding_mask=padding,
                need_weights=options["need_weights"],
                attn_mask=options["attn_mask"],
                use_separate_proj_weight=True,
                q_proj_weight=identity,
                k_proj_weight=identity,
                v_proj_weight=identity,
                average_attn_weights=options["average_attn_weights"],
                is_causal=options["is_causal"],
            )
        return context_and_weights

    def _sizes_of_terms(self, projected: list[Tensor], slope: Tensor, of_weights: Tensor | None) -> list[float]:
        """Return bounds on the norms of the absolute terms whose sums are the error signals of queries, keys and values.

        slope: the gradient dO of the output of the heads; of_weights: the gradient of the attention weights P, if they have one.

        If all keys that a query sees are equal, its error signal is zero, and what is computed is rounding. Its size follows from
        dV = Pᵀ dO; dP = dO Vᵀ; dS = P ⊙ (dP − rowsum(dP ⊙ P)); dQ = dS K / √d; dK = dSᵀ Q / √d. Rows of P sum to 1, so the terms of dS are at most
        2 P ‖dO‖ max ‖V‖.
        """
        module = self.module
        query, key, value, error = (_norms_of_heads(tensor, module.num_heads) for tensor in (*projected, slope))
        longest_key = torch.cat([key, _norms_of_bias(module.bias_k, key)]).amax(0)
        longest_value = torch.cat([value, _norms_of_bias(module.bias_v, value)]).amax(0)
        largest = error * longest_value
        if of_weights is not None and of_weights.numel():
            largest = largest + of_weights.abs().max()
        # Dropout scales the weights that it keeps
        kept = 1 - module.dropout if self.training and module.dropout < 1 else 1.0
        root_of_length = math.sqrt(len(error))
        scale = 2 / kept / math.sqrt(module.head_dim)
        of_queries = scale * _norm(largest * longest_key)
        of_keys = scale * root_of_length * _norm(largest * query)
        of_values = root_of_length / kept * _norm(error)
        return [of_queries, of_keys, of_values]


@contextmanager
def _random_state(state: Tensor | None) -> Iterator[None]:
    """Draw random numbers from this state, and restore the present one afterwards. None: nothing is drawn."""
    if state is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield


def _norms_of_heads(tensor: Tensor, heads: int) -> Tensor:
    """(time, rows, features) → (time, rows, heads)."""
    time, rows, features = tensor.shape
    by_head = tensor.detach().reshape(time, rows, heads, features // heads)
    wide = torch.float64 if has_float64(tensor.device.type) else None
    norms: Tensor = torch.linalg.vector_norm(by_head, dim=-1, dtype=wide)
    return norms


def _norms_of_bias(bias: Tensor | None, like: Tensor) -> Tensor:
    """Return the norms of the key or value that is appended for each row (bias_k, bias_v), (1, rows, heads); 0 if there is none."""
    zeros = like.new_zeros(1, *like.shape[1:])
    if bias is None:
        return zeros
    heads = like.shape[2]
    return zeros + _norms_of_heads(bias, heads)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _projections(module: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None]]:
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.detach().chunk(3)
    else:
        weights = tuple(getattr(module, f"{part}_proj_weight").detach() for part in PARTS)
    if module.in_proj_bias is None:
        return [(weight, None) for weight in weights]
    biases = module.in_proj_bias.detach().chunk(3)
    return list(zip(weights, biases, strict=True))
