"""The names proof: does each slot belong to the row whose name it carries?

Sums cannot show that: a swap of two names leaves every sum right. So the model runs again, without gradients, with the rows of its batch
permuted, and the input of each layer must be permuted in the same way along the axis that is taken for the rows. Where the forward pass
draws random numbers, which stay in their places, some rows are replaced instead, and only their vectors may change.

Nothing of the training changes: a copy of the modules runs that shares their weights only, and random states are put back.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dualform.layers.found import Arguments, Found
from dualform.layers.module_copy import runnable_copy
from dualform.layers.rows import (
    SHARED,
    Decision,
    Experiment,
    Fingerprints,
    Lead,
    RowAxis,
    RowMap,
    decide,
    fingerprints,
    readings,
    tensors_in,
    told_of_module,
    told_reading,
)
from dualform.layers.rules import Rule, rule_for
from dualform.layers.streams import joined


@dataclass(frozen=True)
class Input:
    """What one call of a layer was given in an experiment."""

    lead: Lead
    axis: int | None
    """The leading axis of the rows, if the module itself names it."""
    numbers: Fingerprints


@dataclass
class Calls:
    """The inputs of all layers in one run of the model, by layer, in the order of their calls."""

    by_layer: dict[str, list[Input]] = field(default_factory=dict)

    def add(self, layer: str, found: Found) -> None:
        """A layer was called."""
        lead = found.keys.dim() - 1 if found.lead is None else found.lead
        one = Input(tuple(found.keys.shape[:lead]), found.axis, fingerprints(found.keys, lead))
        self.by_layer.setdefault(layer, []).append(one)


@dataclass(frozen=True)
class Told:
    """What the user says in batch_axis=: axes by the names of layers and modules, which may be patterns."""

    axes: Mapping[str, int] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    """The module of each layer."""
    inputs: int | None = None
    """The axis of the model's arguments that holds the rows."""

    def reading(self, layer: str, lead: Lead, rows: int, axis: int | None) -> RowAxis | None:
        """How the user says that a layer's input is read; None: nothing is said. axis: what the module says itself."""
        patterns = self._patterns(layer)
        if not patterns:
            return None
        named = self.axes[patterns[0]]
        return told_reading(lead, rows, named, layer) if axis is None else told_of_module(lead, rows, axis, named)

    def _patterns(self, layer: str) -> list[str]:
        """The keys of batch_axis that name a layer or its module, exact names first."""
        names = dict.fromkeys((layer, self.modules.get(layer, layer)))
        exact = [name for name in names if name in self.axes]
        return exact + [pattern for pattern in self.axes if any(fnmatchcase(name, pattern) for name in names)]

    def names(self, layer: str) -> bool:
        """Whether the user says anything of a layer."""
        return bool(self._patterns(layer))

    def layers(self, module: str) -> list[str]:
        """The layers of a module."""
        return [layer for layer, owner in self.modules.items() if owner == module]

    def with_inputs(self, axis: int | None) -> Told:
        """The same, for a module whose arguments have their rows along this axis."""
        return replace(self, inputs=axis)


@dataclass(frozen=True)
class Placement:
    """Along which axis each tensor of the arguments holds the rows, in the order of `tensors_in`; None: it holds none."""

    axes: tuple[int | None, ...]

    @property
    def is_first(self) -> bool:
        """Whether rows are a first axis only."""
        return all(axis in (None, 0) for axis in self.axes)


def placements(tensors: Sequence[Tensor], rows: int, told: int | None) -> list[Placement]:
    """How the rows may lie in the model's arguments, the likeliest first. told: the axis that the user names.

    A tensor holds them along its first axis, or else along the only one of that length (the state of a recurrent layer). Sequence-first
    models have them along the second.
    """
    if told is not None:
        return [Placement(tuple(told if _length(t, told) == rows else _axis_of_rows(t, rows) for t in tensors))]
    first = Placement(tuple(_axis_of_rows(t, rows) for t in tensors))
    second = Placement(tuple(1 if _length(t, 1) == rows else _axis_of_rows(t, rows) for t in tensors))
    # A square tensor (a mask over positions) may only look as if it held rows
    square = [t.dim() == 2 and t.shape[0] == t.shape[1] == rows and n > 0 for n, t in enumerate(tensors)]
    without = Placement(tuple(None if skip else axis for axis, skip in zip(first.axes, square, strict=True)))
    found = [first, without, second]
    return [one for n, one in enumerate(found) if any(a is not None for a in one.axes) and one not in found[:n]]


def _length(tensor: Tensor, axis: int) -> int:
    return tensor.shape[axis] if axis < tensor.dim() else -1


def _axis_of_rows(tensor: Tensor, rows: int) -> int | None:
    fits = [axis for axis, length in enumerate(tensor.shape) if length == rows]
    return fits[0] if fits and (fits[0] == 0 or len(fits) == 1) else None


def move_rows(value: Any, placement: Iterator[int | None], rows: RowMap) -> Any:
    """The arguments of a forward pass with their rows moved. placement: the axis of each tensor, in the order of `tensors_in`."""
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        for _ in tensors_in(value):
            next(placement)
        order = torch.from_numpy(rows)
        return pack_padded_sequence(padded[order], lengths[order], batch_first=True, enforce_sorted=False)
    if isinstance(value, Tensor):
        axis = next(placement)
        return value if axis is None else value.index_select(axis, torch.from_numpy(rows).to(value.device))
    if isinstance(value, Mapping):
        moved = {name: move_rows(inner, placement, rows) for name, inner in value.items()}
        return moved if type(value) is dict else type(value)(moved)  # type: ignore[call-arg]
    if isinstance(value, (tuple, list)):
        items = [move_rows(inner, placement, rows) for inner in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


@dataclass
class Proof:
    """What experiments have shown of a forward pass."""

    decisions: dict[str, list[Decision]] = field(default_factory=dict)
    """By layer: where the rows are in each of its calls."""
    problem: str = ""
    """Why nothing could be shown."""
    rows_differ: bool = False
    """Whether the model was given another number of rows than batch() announced."""
    is_confirmed: bool = False
    """Whether the rows are where the user says in some layer, or where a module itself says (a recurrent layer, attention)."""

    def is_complete(self, told: Told, called: Collection[str]) -> bool:
        """Whether every call is decided, of every layer of the modules that were called."""
        seen = {told.modules.get(layer, layer) for layer in self.decisions}
        return seen.issuperset(called) and all(one.is_proved for calls in self.decisions.values() for one in calls)

    def score(self) -> int:
        """How many calls are decided."""
        return sum(one.where is not None for calls in self.decisions.values() for one in calls)


def prove(
    module: nn.Module,
    arguments: Arguments,
    rows: int,
    told: Told,
    recorded: Mapping[str, nn.Module],
    called: Collection[str],
) -> Proof:
    """Find the rows in the input of every layer that a forward pass of this module calls.

    recorded: modules by name; called: the names of those that the forward pass has called.
    """
    tensors = tensors_in(arguments)
    if not tensors:
        return Proof(problem="the model is given no tensors whose rows could be permuted")
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4])
    best = Proof(
        problem=f"the model was given tensors of shapes {shapes}",
        rows_differ=all(_length(tensor, 0) != rows for tensor in tensors),
    )
    subject = _Subject(module, recorded)
    for placement in placements(tensors, rows, told.inputs):
        attempt = _attempt(subject, arguments, rows, placement, told, called)
        # An axis other than the first is never taken by its length alone
        is_trusted = told.inputs is not None or placement.is_first or attempt.is_confirmed
        if is_trusted and (attempt.score() > best.score() or not best.decisions):
            best = attempt
        if best.is_complete(told, called):
            break
    return best


def shape_class(tensor: Tensor, rows: int) -> Hashable:
    """What a shape says of the rows: which axes are as long as the batch, and whether the first is a multiple of it.

    Sequences of other lengths are of the same class, so that few experiments do for all batches.
    """
    shape = tensor.shape
    is_multiple = bool(shape) and rows > 0 and shape[0] % rows == 0
    return tensor.dtype.is_floating_point, is_multiple, tuple(length == rows for length in shape)


class Proofs:
    """The proofs of a model's forward passes: one for each kind of them."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Proof] = {}

    def get(
        self,
        module: nn.Module,
        arguments: Arguments,
        shapes: Mapping[str, AbstractSet[Hashable]],
        rows: int,
        find: Callable[[], Proof],
    ) -> tuple[Proof, bool]:
        """The proof for a forward pass, made by `find` if there is none yet; and whether it is new.

        shapes: by module, the classes of the inputs it was given in the pass.
        """
        inputs = tuple(shape_class(tensor, rows) for tensor in tensors_in(arguments))
        calls = frozenset((name, frozenset(classes)) for name, classes in shapes.items())
        kind = (module, inputs, calls)
        is_new = kind not in self._known
        if is_new:
            self._known[kind] = find()
        return self._known[kind], is_new


def decision_of(decisions: Sequence[Decision], call: int | None) -> Decision:
    """The decision for a call of a layer; where its number is not known, that of all calls, if they agree."""
    if call is not None and call < len(decisions):
        return decisions[call]
    if decisions and all(one == decisions[0] for one in decisions):
        return decisions[0]
    return Decision(None, "its calls hold the rows in different places" if decisions else "")


def _attempt(
    subject: _Subject, arguments: Arguments, rows: int, placement: Placement, told: Told, called: Collection[str]
) -> Proof:
    """Experiments with the rows where `placement` says: in evaluation mode, then in the mode the model is in, for what is still open."""
    proof = Proof()
    permutation, replacement = moved_rows(rows)
    for evaluating in (True, False):
        if proof.is_complete(told, called):
            break
        try:
            before = subject.run(arguments, evaluating=evaluating)
            permuted = subject.run(_moved(arguments, placement, permutation), evaluating=evaluating)
            replaced = subject.run(_moved(arguments, placement, replacement), evaluating=evaluating)
        except Exception as error:
            proof.problem = f"running the model again raised {type(error).__name__}: {error}"
            continue
        _decide(proof, told, before, (permutation, permuted), (replacement, replaced))
    return proof


def _decide(
    proof: Proof, told: Told, before: Calls, permuted: tuple[RowMap, Calls], replaced: tuple[RowMap, Calls]
) -> None:
    rows = len(permuted[0])
    for layer, inputs in before.by_layer.items():
        others = [calls.by_layer.get(layer, []) for _, calls in (permuted, replaced)]
        decisions = proof.decisions.get(layer, [])
        if decisions and all(one.is_proved for one in decisions):
            continue
        found = []
        for call, one in enumerate(inputs):
            named = told.reading(layer, one.lead, rows, one.axis)
            allowed = readings(one.lead, rows, one.axis) if named is None else [named]
            if any(len(calls) != len(inputs) or calls[call].lead != one.lead for calls in others):
                found.append(Decision(None, "its inputs have other shapes when the rows are permuted"))
                continue
            moved = Experiment(permuted[0], others[0][call].numbers)
            changed = Experiment(replaced[0], others[1][call].numbers)
            found.append(decide(allowed, one.numbers, moved, changed))
            says_so = named is not None or one.axis is not None
            if says_so and found[-1].is_proved and found[-1].where != SHARED:
                proof.is_confirmed = True
        if not decisions or sum(one.is_proved for one in found) > sum(one.is_proved for one in decisions):
            proof.decisions[layer] = found


def _moved(arguments: Arguments, placement: Placement, rows: RowMap) -> Arguments:
    positional, named = move_rows(arguments, iter(placement.axes), rows)
    return positional, named


def moved_rows(rows: int) -> tuple[RowMap, RowMap]:
    """The rows of both experiments, always the same: all permuted, and half of them replaced by others.

    The permutation is one cycle, and the replaced rows follow each other in it. Then a model that puts its rows into another order is
    found out by one of the two: only powers of a cycle commute with it, and none of them leaves a part of the cycle where it is.
    """
    cycle = np.random.default_rng(rows).permutation(rows)
    permutation = np.empty(rows, dtype=np.int64)
    permutation[cycle] = np.roll(cycle, 1)
    replacement = np.arange(rows)
    replaced = cycle[: max(1, rows // 2)]
    replacement[replaced] = permutation[replaced]
    return permutation, replacement


_TURNS = RLock()
"""Held while random states and settings of PyTorch are changed."""


class _Subject:
    """What runs in experiments: copies of a module, which tell what its recorded parts are given."""

    def __init__(self, module: nn.Module, recorded: Mapping[str, nn.Module]):
        self._module, self._recorded = module, recorded

    def run(self, arguments: Arguments, *, evaluating: bool) -> Calls:
        """What the layers are given. evaluating: in evaluation mode, or as the model is."""
        copies: dict[int, Any] = {}
        copy = runnable_copy(self._module, copies)  # a new one each time: a module may count its calls
        calls = Calls()
        for name, original in self._recorded.items():
            rule = rule_for(original)
            if rule is not None and id(original) in copies:
                _hook(copies[id(original)], rule, name, calls)
        for inner in copy.modules():  # not .eval(), which some modules use to change their weights
            inner.training = inner.training and not evaluating
        positional, named = arguments
        with _same_random_numbers(self._module), torch.no_grad():
            copy(*positional, **named)
        return calls


def _hook(module: nn.Module, rule: Rule, name: str, calls: Calls) -> None:
    begun: list[Any] = []

    def before(module: nn.Module, args: Any) -> None:
        begun[:] = [rule.begin(module) if rule.begin else None]

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for watch in rule.watch(module, (args, kwargs), output, begun.pop() if begun else None):
            for found in watch.slots(None):
                calls.add(joined(name, found.layer), found)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, with_kwargs=True)


@contextlib.contextmanager
def _same_random_numbers(module: nn.Module) -> Iterator[None]:
    """Afterwards, all random states are what they were. These belong to the process, so threads take turns."""
    devices = {parameter.device for parameter in module.parameters()}
    cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with _TURNS:
        python_state = random.getstate()
        numpy_state = np.random.get_state()
        fast_path = torch.backends.mha.get_fastpath_enabled()
        try:
            with torch.random.fork_rng(devices=cuda):
                torch.backends.mha.set_fastpath_enabled(False)  # it calls no inner modules
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            np.random.set_state(numpy_state)
            random.setstate(python_state)
