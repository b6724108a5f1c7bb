"""nn.MultiheadAttention: its projections are computed inside one function, so they are computed once more, locally.

PyTorch's own function runs again, with projections that change nothing, on queries, keys and values of ours: their gradients
are the error signals of the projections, and what it gives is the input of the last one.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualform.layers.autocast import Autocast
from dualform.layers.slot_source import Arguments, Errors, LayerSlots, Naming, SlotSource
from dualform.layers.streams import Layer, Use, joined

PARTS = ("q", "k", "v")
_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


def layers(module: nn.Module, name: str, named: Naming) -> list[Layer]:
    """Three projections of what comes in, and the one of what goes out."""
    assert isinstance(module, nn.MultiheadAttention)
    width, found = module.embed_dim, []
    for place, part in enumerate(PARTS):
        rows = (place * width, (place + 1) * width)
        if module._qkv_same_embed_dim:
            uses = [Use(named("in_proj_weight"), "weight", rows=rows)]
        else:
            uses = [Use(named(f"{part}_proj_weight"), "weight")]
        if module.in_proj_bias is not None:
            uses.append(Use(named("in_proj_bias"), "bias", rows=rows))
        d_in = (width, module.kdim, module.vdim)[place]
        found.append(Layer(joined(name, part), "attention", d_in, width, tuple(uses)))
    uses = [Use(named("out_proj.weight"), "weight")]
    if module.out_proj.bias is not None:
        uses.append(Use(named("out_proj.bias"), "bias"))
    found.append(Layer(joined(name, "out_proj"), "linear", width, width, tuple(uses)))
    return found


def begin(module: nn.Module) -> Tensor | None:
    """The random numbers that its dropout will use."""
    assert isinstance(module, nn.MultiheadAttention)
    return torch.get_rng_state() if module.training and module.dropout > 0 else None


def replay(module: nn.Module, arguments: Arguments, output: Any, begun: Any) -> SlotSource:
    """Where the slots of a call come from: its own function, once more."""
    assert isinstance(module, nn.MultiheadAttention)
    given = _SIGNATURE.bind(module, *arguments[0], **arguments[1])
    given.apply_defaults()
    options = dict(given.arguments)
    inputs: list[Tensor] = [options["query"], options["key"], options["value"]]
    training = module.training
    outputs = [tensor for tensor in output if tensor is not None and tensor.requires_grad]

    there = [t is not None and t.requires_grad for t in output]
    autocast = Autocast.now(inputs[0].device.type)

    def slots(errors: Errors) -> list[LayerSlots]:
        with autocast.again():
            return _slots(module, inputs, options, begun, training, errors, there)

    return SlotSource(outputs, slots, inputs[0])


def _slots(
    module: nn.MultiheadAttention,
    inputs: list[Tensor],
    options: dict[str, Any],
    state: Tensor | None,
    training: bool,
    errors: Errors,
    there: list[bool],
) -> list[LayerSlots]:
    single = inputs[0].dim() == 2
    inputs = [t.detach().unsqueeze(1) if single else t.detach() for t in inputs]
    swapped = module.batch_first and not single
    first = [t.transpose(0, 1) if swapped else t for t in inputs]  # (time, rows, features)
    with torch.enable_grad():
        projected = [
            F.linear(t, *p).detach().requires_grad_() for t, p in zip(first, _projections(module), strict=True)
        ]
        context, weights = _attend(module, projected, options, state, training)
    axis = 0 if swapped else 1
    turned = [context.detach().transpose(0, 1) if swapped else context.detach()]
    keys = [*inputs, *turned]
    if errors is None:
        return [LayerSlots(name, key, None, axis) for name, key in zip((*PARTS, "out_proj"), keys, strict=True)]
    left = list(errors)
    of_output = left.pop(0) if there[0] else None
    of_weights = left.pop(0) if len(there) > 1 and there[1] else None
    targets, slopes = [], []
    if of_output is None:
        of_output = torch.zeros_like(keys[-1])
    elif single:
        of_output = of_output.unsqueeze(1)
    turned_error = of_output.transpose(0, 1) if swapped else of_output
    targets.append(context)
    weight = module.out_proj.weight.detach()
    slopes.append((turned_error @ weight.to(turned_error.dtype)).to(context.dtype))
    if of_weights is not None and weights is not None:
        targets.append(weights)
        slopes.append(of_weights.reshape(weights.shape).to(weights.dtype))
    found = torch.autograd.grad(targets, projected, slopes)
    back = [error.transpose(0, 1) if swapped else error for error in found]
    terms = [*_sizes_of_terms(module, projected, slopes[0], of_weights, training), 0.0]
    every = zip((*PARTS, "out_proj"), keys, (*back, of_output), terms, strict=True)
    return [LayerSlots(name, key, error, axis, error_terms=size) for name, key, error, size in every]


def _sizes_of_terms(
    module: nn.MultiheadAttention, projected: list[Tensor], slope: Tensor, of_weights: Tensor | None, training: bool
) -> list[float]:
    """Bounds on the norms of the absolute terms that the error signals of queries, keys and values are sums of.

    slope: the gradient dO of what the heads give; of_weights: the gradient of the attention weights P, if they have one.

    If all keys that a query sees are equal, its error signal is zero, and what is computed is rounding. How large that may be:
    dV = Pᵀ dO; dP = dO Vᵀ; dS = P ⊙ (dP − rowsum(dP ⊙ P)); dQ = dS K / √d; dK = dSᵀ Q / √d. Rows of P sum to 1, so the terms of dS are at most
    2 P ‖dO‖ max ‖V‖.
    """
    heads = module.num_heads
    query, key, value, error = (_norms_of_heads(tensor, heads) for tensor in (*projected, slope))
    longest_key = torch.cat([key, _norms_of_bias(module.bias_k, key)]).amax(0)
    longest_value = torch.cat([value, _norms_of_bias(module.bias_v, value)]).amax(0)
    largest = error * longest_value
    if of_weights is not None and of_weights.numel():
        largest = largest + of_weights.abs().max()
    # Dropout scales the weights that it keeps
    kept = 1 - module.dropout if training and module.dropout < 1 else 1.0
    root_of_length = math.sqrt(len(error))
    of_queries = 2 / kept / math.sqrt(module.head_dim) * _norm(largest * longest_key)
    of_keys = 2 / kept / math.sqrt(module.head_dim) * root_of_length * _norm(largest * query)
    of_values = root_of_length / kept * _norm(error)
    return [of_queries, of_keys, of_values]


def _norms_of_heads(tensor: Tensor, heads: int) -> Tensor:
    """(time, rows, features) → (time, rows, heads)."""
    apart = tensor.detach().reshape(*tensor.shape[:2], heads, tensor.shape[2] // heads)
    norms: Tensor = torch.linalg.vector_norm(apart, dim=-1, dtype=torch.float64)
    return norms


def _norms_of_bias(bias: Tensor | None, like: Tensor) -> Tensor:
    """The norms of a key or value that each row gets beside its own, (1, rows, heads) like those of the others; 0 if there is none."""
    zeros = like.new_zeros(1, *like.shape[1:])
    return zeros if bias is None else zeros + _norms_of_heads(bias, like.shape[2])


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _with_rows(mask: Tensor | None) -> Tensor | None:
    """A single sequence is a batch of one here."""
    return mask.unsqueeze(0) if mask is not None and mask.dim() == 1 else mask


def _projections(module: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None]]:
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.detach().chunk(3)
    else:
        weights = tuple(getattr(module, f"{part}_proj_weight").detach() for part in PARTS)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.detach().chunk(3)
    return list(zip(weights, biases, strict=True))


def _attend(
    module: nn.MultiheadAttention,
    projected: list[Tensor],
    options: dict[str, Any],
    state: Tensor | None,
    training: bool,
) -> tuple[Tensor, Tensor | None]:
    """PyTorch's own attention with projections that change nothing; same random numbers, which are then put back."""
    same = torch.eye(module.embed_dim, dtype=projected[0].dtype, device=projected[0].device)
    now = torch.get_rng_state() if state is not None else None
    try:
        if state is not None:
            torch.set_rng_state(state)
        query, key, value = projected
        found: tuple[Tensor, Tensor | None] = F.multi_head_attention_forward(
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
            same,
            None,
            training=training,
            key_padding_mask=_with_rows(options["key_padding_mask"]),
            need_weights=options["need_weights"],
            attn_mask=options["attn_mask"],
            use_separate_proj_weight=True,
            q_proj_weight=same,
            k_proj_weight=same,
            v_proj_weight=same,
            average_attn_weights=options["average_attn_weights"],
            is_causal=options["is_causal"],
        )
        return found
    finally:
        if now is not None:
            torch.set_rng_state(now)
