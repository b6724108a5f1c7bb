"""Running the model on test inputs: the queries of every layer, and, if asked, the gradients of a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dualform.errors import QuestionError
from dualform.layers import axes
from dualform.layers.found import Watch
from dualform.layers.rules import Rule, parts_of, queries_of, rule_for
from dualform.layers.streams import Layer, joined


@dataclass(frozen=True)
class Captured:
    """One layer's queries, (examples, positions, d_in), and ∂target/∂output, (examples, positions, d_out).

    If a layer is called several times, its calls follow each other along the positions. Queries of an embedding are numbers,
    (examples, positions, 1); those of an elementwise weight are ∂target/∂weight for each position.
    """

    queries: Tensor
    gradients: Tensor | None


@dataclass(frozen=True)
class Run:
    """What a forward pass showed."""

    layers: dict[str, Captured]
    target: Tensor


_RUNNING: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
"""Hooks see every call of a module, whoever calls it."""


def run(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    rows: int | None,
    batch_axis: Mapping[str, int],
    target: int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None = None,
    gradients: bool = False,
) -> Run:
    """Run a model in evaluation mode. Threads that share it wait for each other."""
    with _RUNNING.setdefault(model, RLock()):
        return _run(model, layers, inputs, _rows(inputs) if rows is None else rows, batch_axis, target, gradients)


def _run(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    rows: int,
    batch_axis: Mapping[str, int],
    target: int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None,
    gradients: bool,
) -> Run:
    by_name = {layer.name: layer for layer in layers}
    seen: list[tuple[str, Watch]] = []
    flattened: dict[int, int] = {}
    handles = []

    def hook(name: str, rule: Rule) -> Callable[..., Any]:
        begun: list[Any] = []

        def before(module: nn.Module, args: Any) -> None:
            begun[:] = [rule.begin(module) if rule.begin else None]

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            for watch in rule.watch(module, (args, kwargs), output, begun.pop() if begun else None):
                key = watch.key
                if key.dim() == 2 and (axis := axes.flattened_from(key, rows)) is not None:
                    flattened[len(key)] = axis
                seen.append((name, watch))
            # An activation in place would change what we hold
            return output.clone() if gradients and isinstance(output, Tensor) else None

        handles.append(modules[name].register_forward_pre_hook(before))
        return note

    modules = dict(model.named_modules())
    inside = {id(inner) for module in modules.values() for inner in parts_of(module)}
    try:
        for name, module in modules.items():
            rule = rule_for(module)
            mine = [n for n in by_name if n == name or n.startswith(f"{name}." if name else "")]
            if rule is not None and mine and id(module) not in inside:
                handles.append(module.register_forward_hook(hook(name, rule), with_kwargs=True))
        with torch.enable_grad():  # without it, a flattened input does not tell where it comes from
            output = _call(model.requires_grad_(True), inputs)
    finally:
        for handle in handles:
            handle.remove()
    chosen = _target(output, target, rows) if gradients else torch.zeros(rows)
    slopes = _slopes(chosen, [watch for _, watch in seen]) if gradients else [None] * len(seen)
    queries: dict[str, list[Tensor]] = {}
    along: dict[str, list[Tensor]] = {}
    for (name, watch), slope in zip(seen, slopes, strict=True):
        for found in watch.slots(slope):
            layer = by_name.get(joined(name, found.layer))
            if layer is None:
                continue
            keys = found.keys.detach()
            lead = tuple(keys.shape[: keys.dim() - 1 if found.lead is None else found.lead])
            known = flattened.get(lead[0]) if len(lead) == 1 else None
            told = batch_axis.get(layer.name, batch_axis.get(name))
            if found.axis is not None:
                where = axes.module_layout(lead, rows, layer=layer.name, axis=found.axis, told=told)
            else:
                where = axes.layout(lead, rows, layer=layer.name, axis=told, evidence=() if known is None else (known,))
            keys = queries_of(layer, keys)
            positions = where.positions * math.prod(keys.shape[len(lead) : -1])
            keys = where.slots(keys.flatten(len(lead))).reshape(rows, positions, keys.shape[-1])
            queries.setdefault(layer.name, []).append(keys)
            if found.errors is not None:
                errors = where.slots(found.errors.flatten(len(lead)))
                along.setdefault(layer.name, []).append(errors.reshape(rows, positions, found.errors.shape[-1]))
    captured = {
        name: Captured(torch.cat(some, 1), torch.cat(along[name], 1) if name in along else None)
        for name, some in queries.items()
    }
    return Run({name: captured[name] for name in by_name if name in captured}, chosen.detach())


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
    return output.gather(1, _numbers(output, target, rows).unsqueeze(1))[:, 0]


def _numbers(output: Tensor, target: Any, rows: int) -> Tensor:
    """The unit of each example that a target means, (rows,)."""
    units = output.shape[1]
    numbers = output.detach().argmax(1) if target is None else torch.as_tensor(target)
    if numbers.is_floating_point() or numbers.dtype == torch.bool or numbers.shape not in ((), (rows,)):
        raise QuestionError(
            f"target={target!r}: expected a unit from 0 to {units - 1}, or one for each of {rows} examples."
        )
    if rows and not bool(((numbers >= 0) & (numbers < units)).all()):
        raise QuestionError(f"target={target!r}: the output has units 0 to {units - 1}.")
    return numbers.expand(rows)


def margin(
    model: nn.Module,
    inputs: Any,
    rows: int | None,
    target: int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None,
) -> Callable[[Any], Tensor]:
    """The margin of a class as a target: its logit less the logsumexp of all others, log(p / (1 − p)).

    target: the class, one for each example, or None: the one that this model chooses, wherever the margin is then taken. A
    function of the output stays as it is.
    """
    if callable(target):
        return target
    with torch.no_grad():
        output = _call(model, inputs)
    rows = _rows(inputs) if rows is None else rows
    _target(output, target, rows)  # says what is wrong, if anything is
    classes = _numbers(output, target, rows)

    def taken(output: Tensor) -> Tensor:
        chosen = torch.nn.functional.one_hot(classes.long(), output.shape[1]).bool()
        return output[chosen] - output.masked_fill(chosen, -math.inf).logsumexp(1)

    return taken


def _slopes(target: Tensor, watches: Sequence[Watch]) -> list[list[Tensor | None]]:
    """∂target/∂output for every call of every layer; 0 where the target does not depend on it."""
    outputs = [output for watch in watches for output in watch.outputs]
    needed = [output for output in outputs if output.requires_grad]
    found = iter(torch.autograd.grad(target.sum(), needed, allow_unused=True) if needed else ())
    slopes: list[list[Tensor | None]] = []
    for watch in watches:
        mine: list[Tensor | None] = []
        for output in watch.outputs:
            slope = next(found) if output.requires_grad else None
            mine.append(torch.zeros_like(output) if slope is None else slope)
        slopes.append(mine)
    return slopes
