"""Running the model on test inputs: the queries of every layer, and, if asked, the gradients of a target."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualform.errors import DualformError, QuestionError
from dualform.layers.layer import Layer, joined
from dualform.layers.row_arguments import tensors_in
from dualform.layers.row_proof import BatchAxes, Proof, Proofs, decision_of, prove, shape_class
from dualform.layers.rows import Layout, reading_by_length, shape_text
from dualform.layers.rules import Rule, parts_of, queries_of, rule_for
from dualform.layers.slot_source import Arguments, LayerSlots, SlotSource, map_tensors
from dualform.query.targets import TargetFunction


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


_ONE_MODEL_AT_A_TIME = RLock()
"""Hooks see every call of a module, whoever calls it; and models that draw random numbers share one random state."""
_PROOFS: WeakKeyDictionary[nn.Module, Proofs] = WeakKeyDictionary()
"""Where the examples are in the inputs of each model's layers."""


def run(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    rows: int | None,
    batch_axis: Mapping[str, int],
    target: TargetFunction | None = None,
) -> Run:
    """Run a model in evaluation mode. Threads wait for each other.

    batch_axis: what the recording was told of where rows are. target: whose gradients are wanted; None: queries alone.
    """
    with _ONE_MODEL_AT_A_TIME:
        count = count_rows(inputs, batch_axis) if rows is None else rows
        return _run(model, layers, inputs, count, batch_axis, target)


@dataclass
class _Call:
    """One call of a module that layers belong to."""

    module: str
    number: int
    source: SlotSource

    def is_among(self, nodes: set[Any]) -> bool:
        """Whether what it gave is among some nodes of the autograd graph."""
        return any(output.grad_fn in nodes for output in self.source.outputs)


class _Listener:
    """Hooks on the modules of some layers, which note every call."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], copy_outputs: bool):
        """copy_outputs: an activation in place would change what is held."""
        self.calls: list[_Call] = []
        self.modules: dict[str, nn.Module] = {}
        self.owners: dict[str, str] = {}
        """The module of each layer."""
        self._copy_outputs = copy_outputs
        self._handles: list[RemovableHandle] = []
        self._hook_modules(model, layers)

    def _hook_modules(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        modules = dict(model.named_modules())
        inside = {id(inner) for module in modules.values() for inner in parts_of(module)}
        for name, module in modules.items():
            rule = rule_for(module)
            owned = [one.name for one in layers if _belongs(one.name, name)]
            if rule is None or not owned or id(module) in inside:
                continue
            self.modules[name] = module
            for layer in owned:
                self.owners[layer] = name
            self._hook(name, module, rule)

    def _hook(self, name: str, module: nn.Module, rule: Rule) -> None:
        begun: list[Any] = []

        def before(module: nn.Module, args: Any) -> None:
            begun[:] = [rule.begin(module) if rule.begin else None]

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if self._copy_outputs:  # their gradients are those of what is done with them outside the module
                output = map_tensors(output, Tensor.clone)
            source = rule.slot_source(module, (args, kwargs), output, begun.pop() if begun else None)
            number = sum(call.module == name for call in self.calls)
            self.calls.append(_Call(name, number, source))
            return map_tensors(output, Tensor.clone) if self._copy_outputs else None

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def __enter__(self) -> _Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def _run(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    rows: int,
    batch_axis: Mapping[str, int],
    target: TargetFunction | None,
) -> Run:
    for parameter in model.parameters():
        if parameter.is_floating_point():  # a quantised weight has no gradient
            parameter.requires_grad_(True)
    with _Listener(model, layers, copy_outputs=target is not None) as listener:
        with torch.enable_grad():  # the graph tells which calls the output depends on
            output = output_of(model, inputs)
        calls = _calls_behind(output, listener.calls)
        axes = BatchAxes(batch_axis, listener.owners, batch_axis.get(""))
        proof = _prove(model, inputs, calls, rows, axes, listener)

    def collected(number: Tensor | None) -> dict[str, Captured]:
        collector = _Collector(layers, rows, axes, proof, number)
        slopes: Sequence[Any] = [None] * len(calls)
        if number is not None:
            slopes = _slopes(number, [call.source for call in calls])
        for call, slope in zip(calls, slopes, strict=True):
            for found in call.source.slots(slope):
                collector.add(call, found)
        return collector.captured()

    if target is None:
        return Run(collected(None), torch.zeros(rows))
    numbers = target(output)
    if numbers.dim() == 1:
        return Run(collected(numbers), numbers.detach())
    # Several numbers for each example: one forward pass, and a backward pass for each of them
    return Run(_side_by_side([collected(number) for number in numbers.T]), numbers.detach().flatten())


def _side_by_side(parts: Sequence[dict[str, Captured]]) -> dict[str, Captured]:
    """Join what was captured for each number of an example: (examples × numbers, positions, …), example by example."""
    joined_parts = {}
    for name in parts[0]:
        queries = torch.stack([part[name].queries for part in parts], 1).flatten(0, 1)
        gradients = [part[name].gradients for part in parts]
        known = [gradient for gradient in gradients if gradient is not None]
        joined_parts[name] = Captured(queries, torch.stack(known, 1).flatten(0, 1) if known else None)
    return joined_parts


class _Collector:
    """Puts together what the calls of each layer showed, example by example."""

    def __init__(
        self,
        layers: Sequence[Layer],
        rows: int,
        axes: BatchAxes,
        proof: Proof,
        target: Tensor | None,
    ):
        """target: (rows,); None: gradients are not asked for."""
        self._layers = {layer.name: layer for layer in layers}
        self._rows = rows
        self._axes = axes
        self._proof = proof
        self._target = target
        self._queries: dict[str, list[Tensor]] = {}
        self._gradients: dict[str, list[Tensor]] = {}

    def add(self, call: _Call, found: LayerSlots) -> None:
        """Take in what one call showed of one layer."""
        layer = self._layers.get(joined(call.module, found.layer))
        if layer is None or (found.errors is None and self._target is not None):
            return
        leading = found.keys.dim() - 1 if found.lead is None else found.lead
        where = _layout(layer.name, call, found, leading, self._rows, self._axes, self._proof)
        keys = queries_of(layer, found.keys.detach())
        self._queries.setdefault(layer.name, []).append(_by_example(keys, leading, where, self._rows))
        if found.errors is not None and self._target is not None:
            gradients = self._gradients_of(call, found, found.errors, leading, where)
            self._gradients.setdefault(layer.name, []).append(gradients)

    def _gradients_of(
        self,
        call: _Call,
        found: LayerSlots,
        errors: Tensor,
        leading: int,
        where: Layout,
    ) -> Tensor:
        if not where.is_shared or self._target is None:
            return _by_example(errors, leading, where, self._rows)
        # One backward pass gives the sum over all examples: each needs its own
        by_example = [_errors_of(call.source, found.layer, example) for example in self._target]
        return torch.cat([_by_example(one, leading, where, 1) for one in by_example])

    def captured(self) -> dict[str, Captured]:
        """Return the queries and gradients of each layer that was called, in the order of the layers."""
        result = {}
        for name in self._layers:
            if name in self._queries:
                gradients = torch.cat(self._gradients[name], 1) if name in self._gradients else None
                result[name] = Captured(torch.cat(self._queries[name], 1), gradients)
        return result


def _belongs(layer: str, module: str) -> bool:
    """Return whether a layer is a module, or a part of it."""
    return not module or layer == module or layer.startswith(f"{module}.")


def _calls_behind(output: Any, calls: list[_Call]) -> list[_Call]:
    """Return the calls that an output depends on; all, if there is no graph that tells."""
    nodes = _nodes_behind(output)
    return [call for call in calls if call.is_among(nodes)] if nodes else calls


def _nodes_behind(output: Any) -> set[Any]:
    """The nodes of the autograd graph that an output depends on."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_in(output)]
    found: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def _prove(
    model: nn.Module,
    inputs: Any,
    calls: Sequence[_Call],
    rows: int,
    axes: BatchAxes,
    listener: _Listener,
) -> Proof:
    """Where the examples are in each call; nothing to prove for a single one."""
    if rows < 2:
        return Proof()
    shapes: dict[str, set[Hashable]] = {}
    for call in calls:
        shapes.setdefault(call.module, set()).add(shape_class(call.source.key, rows))
    arguments = _arguments(inputs)
    proofs = _PROOFS.setdefault(model, Proofs())
    proof, _ = proofs.get(
        model, arguments, shapes, rows, lambda: prove(model, arguments, rows, axes, listener.modules, shapes)
    )
    return proof


def _layout(
    layer: str,
    call: _Call,
    found: LayerSlots,
    leading: int,
    rows: int,
    axes: BatchAxes,
    proof: Proof,
) -> Layout:
    lead = tuple(found.keys.shape[:leading])
    where = axes.reading(layer, lead, rows, found.axis)
    if where is None:
        where = decision_of(proof.decisions.get(layer, []), call.number).where
    if where is None and (rows < 2 or not proof.decisions):
        where = reading_by_length(lead, rows, found.axis)
    layout = None if where is None else where.layout(lead, rows)
    if layout is None:
        raise QuestionError(
            f"layer {layer!r} gets an input of shape {shape_text(lead)}, and it is not clear which of its vectors belong to which of "
            f"the {rows} examples. Ask one example at a time, or say how many there are: rows=."
        )
    return layout


def _by_example(tensor: Tensor, leading: int, where: Layout, rows: int) -> Tensor:
    """(*lead, …, features) → (examples, positions, features). What all examples share is repeated for each."""
    features = tensor.shape[-1]
    positions = where.positions * math.prod(tensor.shape[leading:-1])
    slots = where.slots(tensor.flatten(leading))
    if where.is_shared:
        return slots.reshape(1, positions, features).expand(rows, -1, -1)
    return slots.reshape(rows, positions, features)


def _errors_of(source: SlotSource, layer: str, example: Tensor) -> Tensor:
    """The error signals that one example's target gives a layer."""
    [slopes] = _slopes(example, [source])
    for found in source.slots(slopes):
        if found.layer == layer and found.errors is not None:
            return found.errors
    raise QuestionError(f"layer {layer!r} has no error signals for this target.")


def count_rows(inputs: Any, batch_axis: Mapping[str, int]) -> int:
    """Return how many examples there are: the length of the first tensor, along the axis that the recording was told of."""
    tensors = tensors_in(inputs)
    place = batch_axis.get("") or 0
    if not tensors or tensors[0].dim() <= place:
        raise QuestionError(
            f"the inputs are {type(inputs).__name__}; expected a tensor, a tuple of the model's arguments, or a "
            f"dictionary of them, with at least one tensor that has an entry for each example. A tokenizer gives tensors with "
            f'return_tensors="pt".'
        )
    return tensors[0].shape[place]


def _arguments(inputs: Any) -> Arguments:
    """The positional and named arguments of the model that inputs stand for."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def output_of(model: nn.Module, inputs: Any) -> Any:
    """Return a model's output for a tensor, a tuple of arguments, or a dictionary of them (a BatchEncoding, too).

    Tensors on the CPU, where files and tokenizers put them, are moved to the device of the model.
    """
    positional, named = _arguments(inputs)
    device = _device_of(model)
    if device is not None and device.type != "cpu":
        positional = _moved(positional, device)
        named = _moved(named, device)
    try:
        return model(*positional, **named)
    except DualformError:
        raise
    except Exception as error:
        raise QuestionError(
            f"the model's forward pass failed on these inputs: {type(error).__name__}: {error}. Give it inputs as in training, and the "
            f"architecture that was recorded."
        ) from error


def _device_of(model: nn.Module) -> torch.device | None:
    """Return where a model's parameters are; None if it has none, or if they are in several places."""
    devices = {parameter.device for parameter in model.parameters()}
    return devices.pop() if len(devices) == 1 else None


def _moved(value: Any, device: torch.device) -> Any:
    """Return arguments with their tensors of the CPU on another device, those in tuples, lists and dictionaries too."""
    if isinstance(value, Tensor):
        return value.to(device) if value.device.type == "cpu" else value
    if type(value) is dict:
        return {name: _moved(inner, device) for name, inner in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_moved(inner, device) for inner in value)
    return value


def _slopes(target: Tensor, sources: Sequence[SlotSource]) -> list[list[Tensor | None]]:
    """∂target/∂output for every call of every layer; 0 where the target does not depend on it."""
    outputs = [output for source in sources for output in source.outputs]
    needed = [output for output in outputs if output.requires_grad]
    found = iter(torch.autograd.grad(target.sum(), needed, retain_graph=True, allow_unused=True) if needed else ())
    slopes: list[list[Tensor | None]] = []
    for source in sources:
        mine: list[Tensor | None] = []
        for output in source.outputs:
            slope = next(found) if output.requires_grad else None
            mine.append(torch.zeros_like(output) if slope is None else slope)
        slopes.append(mine)
    return slopes
