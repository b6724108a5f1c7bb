"""Running the model on test inputs: the queries of every layer, and, if asked, the gradients of a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import QuestionError
from dualform.layers import axes
from dualform.layers.rules import RULES


@dataclass(frozen=True)
class Captured:
    """One layer's queries, (examples, positions, d_in), and ∂target/∂output, (examples, positions, d_out).

    If a layer is called several times, its calls follow each other along the positions.
    """

    queries: Tensor
    gradients: Tensor | None


@dataclass(frozen=True)
class Run:
    """What a forward pass showed."""

    layers: dict[str, Captured]
    target: Tensor


def run(
    model: nn.Module,
    layers: Mapping[str, str],
    inputs: Any,
    rows: int | None,
    batch_axis: Mapping[str, int],
    target: int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None = None,
    gradients: bool = False,
) -> Run:
    """Run a model in evaluation mode. layers: the kinds of the recorded layers by name."""
    rules = {rule.kind: rule for rule in RULES.values()}
    rows = _rows(inputs) if rows is None else rows
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    flattened: dict[int, int] = {}

    def hook(name: str, kind: str) -> Callable[..., Tensor | None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            key = rules[kind].key((args, kwargs))
            if key.dim() == 2 and (axis := axes.flattened_from(key, rows)) is not None:
                flattened[len(key)] = axis
            seen.setdefault(name, []).append((key, output))
            return output.clone() if gradients else None  # an activation in place would change what we hold

        return note

    modules = dict(model.named_modules())
    handles = [modules[n].register_forward_hook(hook(n, kind), with_kwargs=True) for n, kind in layers.items()]
    try:
        with torch.enable_grad():  # without it, a flattened input does not tell where it comes from
            output = _call(model.requires_grad_(True), inputs)
    finally:
        for handle in handles:
            handle.remove()
    chosen = _target(output, target, rows) if gradients else torch.zeros(rows)
    slopes = _slopes(chosen, seen) if gradients else {}
    found = {}
    for name, calls in seen.items():
        queries, along = [], []
        for number, (key, _) in enumerate(calls):
            known = flattened.get(len(key)) if key.dim() == 2 else None
            lead, told = tuple(key.shape[:-1]), batch_axis.get(name)
            where = axes.layout(lead, rows, layer=name, axis=told, evidence=() if known is None else (known,))
            queries.append(where.slots(key.detach()).reshape(rows, where.positions, key.shape[-1]))
            if gradients:
                slope = slopes[name][number]
                along.append(where.slots(slope).reshape(rows, where.positions, slope.shape[-1]))
        found[name] = Captured(torch.cat(queries, 1), torch.cat(along, 1) if gradients else None)
    return Run({name: found[name] for name in layers if name in found}, chosen.detach())


def _rows(inputs: Any) -> int:
    tensors = axes.tensors_in(inputs)
    if not tensors or not tensors[0].dim():
        raise QuestionError(
            f"the inputs are {type(inputs).__name__}; expected a tensor, a tuple of the model's arguments, or a "
            f"dictionary of them, with at least one tensor that has an entry for each example."
        )
    return tensors[0].shape[0]


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


def _target(output: Any, target: Any, rows: int) -> Tensor:
    if callable(target):
        chosen = target(output)
        if not isinstance(chosen, Tensor) or chosen.shape != (rows,):
            came = tuple(chosen.shape) if isinstance(chosen, Tensor) else type(chosen).__name__
            raise QuestionError(
                f"target(output) gave {came}; expected a tensor with one number for each of {rows} examples."
            )
        return chosen
    if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[0] != rows:
        came = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise QuestionError(
            f"the model's output is {came}, not ({rows}, units). Say what the target is: a function of the output that "
            f"gives one number for each example, e.g. target=lambda output: output[:, -1, 7]."
        )
    units = output.shape[1]
    numbers = output.detach().argmax(1) if target is None else torch.as_tensor(target)
    if numbers.is_floating_point() or numbers.dtype == torch.bool or numbers.shape not in ((), (rows,)):
        raise QuestionError(
            f"target={target!r}: expected a unit from 0 to {units - 1}, or one for each of {rows} examples."
        )
    if rows and not bool(((numbers >= 0) & (numbers < units)).all()):
        raise QuestionError(f"target={target!r}: the output has units 0 to {units - 1}.")
    return output.gather(1, numbers.expand(rows).unsqueeze(1))[:, 0]


def _slopes(target: Tensor, seen: dict[str, list[tuple[Tensor, Tensor]]]) -> dict[str, list[Tensor]]:
    """∂target/∂output for every call of every layer; 0 where the target does not depend on it."""
    outputs = [output for calls in seen.values() for _, output in calls]
    found = iter(torch.autograd.grad(target.sum(), outputs, allow_unused=True))
    return {
        name: [torch.zeros_like(output) if (slope := next(found)) is None else slope for _, output in calls]
        for name, calls in seen.items()
    }
