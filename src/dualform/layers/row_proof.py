"""Prove that each slot belongs to the row whose name it carries.

Sums cannot show that, since swapping two names changes none. So a copy of the model runs again, without gradients: as it was, with the rows
of its batch permuted, and with some of them replaced. The input of each layer must change in the same way along the axis of the rows.

The model runs in its present mode, so that what it does only in training (shuffling, say) shows, but without dropout. If something stays
in place when rows move (random numbers, a state that the model keeps for each row), or if rows may be reordered, further runs replace other
rows. If every vector depends on every row (noise before a batch normalisation), the model runs in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import numpy as np
from torch import Tensor, nn

from dualform.layers.rehearsal import Calls, rehearse
from dualform.layers.row_arguments import (
    Placement,
    are_rows_equal,
    holds_rows,
    move_rows,
    options_in,
    placements,
    tensors_in,
)
from dualform.layers.rows import (
    MIXING,
    ORDER,
    PLACES,
    SAME_FOR_ALL_ROWS,
    SHARED,
    Decision,
    Experiment,
    Lead,
    RowAxis,
    RowMap,
    decide,
    reading_of_batch_axis,
    reading_of_module,
    readings,
)
from dualform.layers.slot_source import Arguments

MOST_TRIES = 3
"""How many batches of a kind are tried if the first one does not decide where the rows are."""
MOST_KINDS = 32
"""After this many kinds of forward passes of a module, their common decision is assumed for further kinds."""


@dataclass(frozen=True)
class BatchAxes:
    """The user's batch_axis=: axes by the names of layers and modules, which may be patterns."""

    axes: Mapping[str, int] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    """The module of each layer."""
    inputs: int | None = None
    """The axis of the model's arguments that holds the rows."""

    def reading(self, layer: str, lead: Lead, rows: int, axis: int | None) -> RowAxis | None:
        """Return how the user says to read a layer's input; None: nothing is said. axis: the one that the module itself names."""
        patterns = self._patterns(layer)
        if not patterns:
            return None
        named = self.axes[patterns[0]]
        if axis is None:
            return reading_of_batch_axis(lead, rows, named, layer)
        return reading_of_module(lead, rows, axis, named)

    def _patterns(self, layer: str) -> list[str]:
        """The keys of batch_axis that match a layer or its module, exact names first."""
        names = dict.fromkeys((layer, self.modules.get(layer, layer)))
        exact = [name for name in names if name in self.axes]
        return exact + [pattern for pattern in self.axes if any(fnmatchcase(name, pattern) for name in names)]

    def names(self, layer: str) -> bool:
        """Whether the user says anything about a layer."""
        return bool(self._patterns(layer))

    def layers(self, module: str) -> list[str]:
        """The layers of a module."""
        return [layer for layer, owner in self.modules.items() if owner == module]

    def with_inputs(self, axis: int | None) -> BatchAxes:
        """The same, for a module whose arguments have their rows along this axis."""
        return replace(self, inputs=axis)


@dataclass
class Proof:
    """What experiments have shown about a forward pass."""

    decisions: dict[str, list[Decision]] = field(default_factory=dict)
    """By layer: where the rows are in each of its calls."""
    problem: str = ""
    """Why nothing could be shown."""
    rows_differ: bool = False
    """Whether the model was given another number of rows than batch() announced."""
    is_confirmed: bool = False
    """Whether the rows are where the user says in some layer, or where a module itself says (a recurrent layer, attention)."""

    @property
    def all_decisions(self) -> list[Decision]:
        """The decisions about all calls of all layers."""
        return [decision for calls in self.decisions.values() for decision in calls]

    @property
    def is_inconclusive(self) -> bool:
        """Whether another batch may show more."""
        return any(decision.may_differ for decision in self.all_decisions)

    def covers(self, axes: BatchAxes, called: Collection[str]) -> bool:
        """Whether every call of every module that was called is decided."""
        seen = {axes.modules.get(layer, layer) for layer in self.decisions}
        return seen.issuperset(called) and all(decision.where is not None for decision in self.all_decisions)

    def score(self) -> int:
        """Return how many calls are decided."""
        return sum(decision.where is not None for decision in self.all_decisions)


def prove(
    module: nn.Module,
    arguments: Arguments,
    rows: int,
    axes: BatchAxes,
    recorded: Mapping[str, nn.Module],
    called: Collection[str],
) -> Proof:
    """Find the rows in the input of every layer that a forward pass of this module calls.

    recorded: modules by name; called: the names of those that the forward pass has called.
    """
    best = _nothing_shown(arguments, rows)
    for placement in placements(arguments, rows, axes.inputs):
        attempt = _attempt(_Setup(module, arguments, recorded, rows, placement), axes)
        # An axis other than the first is never taken by its length alone
        is_trusted = axes.inputs is not None or placement.is_first_axis or attempt.is_confirmed
        if is_trusted and (attempt.score() > best.score() or not best.decisions):
            best = attempt
        if best.covers(axes, called):
            break
    return best


def _nothing_shown(arguments: Arguments, rows: int) -> Proof:
    tensors = tensors_in(arguments)
    if not tensors:
        return Proof(problem="the model is given no tensors or lists whose rows could be permuted")
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4])
    problem = f"the model was given tensors of shapes {shapes}"
    return Proof(problem=problem, rows_differ=not holds_rows(arguments, rows))


@dataclass(frozen=True)
class _Setup:
    """The model, its arguments, and where they are assumed to hold the rows."""

    module: nn.Module
    arguments: Arguments
    recorded: Mapping[str, nn.Module]
    rows: int
    placement: Placement
    evaluating: bool = False
    """Whether the model runs in evaluation mode, and not in its own."""

    def run(self, order: RowMap | None) -> Calls:
        """Run the model with its rows in this order (None: unchanged); return the inputs of its layers."""
        arguments = self.arguments if order is None else move_rows(self.arguments, self.placement, order)
        return rehearse(self.module, arguments, self.recorded, self.rows, evaluating=self.evaluating)

    def experiment(self, order: RowMap) -> tuple[RowMap, Calls]:
        """The same, with the order of the rows."""
        return order, self.run(order)


def _attempt(setup: _Setup, axes: BatchAxes) -> Proof:
    """Run the experiments of a setup in the model's mode, then in evaluation mode if that may show more."""
    proof = Proof()
    for evaluating in (False, True):
        try:
            _experiment(replace(setup, evaluating=evaluating), proof, axes)
        except Exception as error:
            proof.problem = f"running a copy of the model raised {type(error).__name__}: {error}"
        if not _may_evaluation_show_more(proof, setup.module):
            break
    return proof


def _experiment(setup: _Setup, proof: Proof, axes: BatchAxes) -> None:
    """Decide from three or four runs of the model, and from more if these may show more."""
    trial = _make_trial(setup)
    _decide_calls(proof, axes, trial)
    if any(decision.hidden_by in (ORDER, PLACES) for decision in proof.all_decisions):
        more = [setup.experiment(order) for order in coded_rows(setup.rows)]
        _decide_calls(proof, axes, replace(trial, replaced=[*trial.replaced, *more]))


def _may_evaluation_show_more(proof: Proof, module: nn.Module) -> bool:
    """Evaluation mode counts only where the model's own mode shows nothing: in evaluation it may arrange its rows differently."""
    if not any(inner.training for inner in module.modules()):
        return False
    return not proof.decisions or any(decision.hidden_by == MIXING for decision in proof.all_decisions)


@dataclass(frozen=True)
class _Trial:
    """Runs of the model: as it was, with permuted rows, and with replaced rows."""

    before: Calls
    permuted: tuple[RowMap, Calls]
    replaced: Sequence[tuple[RowMap, Calls]]
    are_rows_equal: bool
    """Whether all rows of the model's arguments are equal, so that nothing can follow them."""


def _make_trial(setup: _Setup) -> _Trial:
    permutation, *replacements = moved_rows(setup.rows)
    before = setup.run(None)
    permuted = setup.experiment(permutation)
    for replacement in replacements:
        replaced = setup.experiment(replacement)
        if _has_same_shapes(before, replaced[1]):
            break  # otherwise the longest row was replaced, and the model trims its inputs to the longest row
    return _Trial(before, permuted, [replaced], are_rows_equal(setup.arguments, setup.placement))


def _has_same_shapes(some: Calls, others: Calls) -> bool:
    def shapes(calls: Calls) -> dict[str, list[Lead]]:
        return {layer: [one.lead for one in inputs] for layer, inputs in calls.by_layer.items()}

    return shapes(some) == shapes(others)


def _decide_calls(proof: Proof, axes: BatchAxes, trial: _Trial) -> None:
    """Decide about every call of every layer that is not decided yet."""
    for layer, inputs in trial.before.by_layer.items():
        earlier = proof.decisions.get(layer, [])
        if earlier and not any(decision.hidden_by for decision in earlier):
            continue
        decisions = []
        for call, given in enumerate(inputs):
            named = axes.reading(layer, given.lead, len(trial.permuted[0]), given.axis)
            decision = _decide_call(trial, layer, call, named)
            decisions.append(decision)
            is_named = named is not None or given.axis is not None
            if is_named and decision.proves_rows:
                proof.is_confirmed = True
        if _count_proved(decisions) >= _count_proved(earlier):
            proof.decisions[layer] = decisions


def _count_proved(decisions: Sequence[Decision]) -> int:
    return sum(decision.is_proved for decision in decisions)


def _decide_call(trial: _Trial, layer: str, call: int, named: RowAxis | None) -> Decision:
    given = trial.before.by_layer[layer][call]
    permuted = _moved_input(trial, trial.permuted, layer, call)
    replaced = [_moved_input(trial, experiment, layer, call) for experiment in trial.replaced]
    experiments = [experiment for experiment in replaced if experiment is not None]
    if permuted is None or len(experiments) < len(replaced):
        return Decision(None, "its inputs have other shapes when rows are moved")
    allowed = readings(given.lead, len(permuted.rows), given.axis) if named is None else [named]
    decision = decide(allowed, given.numbers, permuted, experiments, is_coarse=given.is_coarse, module_axis=given.axis)
    if decision.proves_rows and given.ordered_by:
        why = f"the model may order or select rows by their content ({given.ordered_by})"
        return Decision(decision.where, why, may_differ=True)
    if trial.are_rows_equal and decision.where is not None:
        return _decide_for_equal_rows(decision)
    return decision


def _decide_for_equal_rows(decision: Decision) -> Decision:
    """Leave the decision from a batch of equal rows open for a later batch.

    Behind a batch normalisation, equal rows become rounding alone, which stays in place when rows move, as if all rows shared it.
    In evaluation mode equal rows stay equal, and the first axis can be taken by its length.
    """
    hidden_by = MIXING if decision.is_proved and decision.where == SHARED else decision.hidden_by
    return replace(decision, why=decision.why or SAME_FOR_ALL_ROWS, hidden_by=hidden_by, may_differ=True)


def _moved_input(trial: _Trial, moved: tuple[RowMap, Calls], layer: str, call: int) -> Experiment | None:
    """Return a call of a layer in another run, if the layer was called as often, and with an input of the same shape."""
    rows, calls = moved
    inputs = trial.before.by_layer[layer]
    others = calls.by_layer.get(layer, [])
    if len(others) != len(inputs) or others[call].lead != inputs[call].lead:
        return None
    return Experiment(rows, others[call].numbers)


def moved_rows(rows: int) -> tuple[RowMap, RowMap, RowMap]:
    """Return the rows of the experiments, always the same: all permuted, half of them replaced, and the other half.

    The permutation is one cycle, and the replaced rows follow each other in it. Then a model that puts its rows into another order is
    found out by one of the two: only powers of a cycle commute with it, and none of them leaves a part of the cycle in place.
    """
    cycle = np.random.default_rng(rows).permutation(rows)
    permutation = np.empty(rows, dtype=np.int64)
    permutation[cycle] = np.roll(cycle, 1)
    half = max(1, rows // 2)
    return permutation, _replace(permutation, cycle[:half]), _replace(permutation, cycle[half:])


def coded_rows(rows: int) -> list[RowMap]:
    """Return the rows of further experiments, which replace each row in a pattern of its own: the digits of its number, from 1 on."""
    permutation, _, _ = moved_rows(rows)
    numbers = np.arange(1, rows + 1)
    digits = range(rows.bit_length())
    return [_replace(permutation, np.flatnonzero(numbers >> digit & 1)) for digit in digits]


def _replace(permutation: RowMap, replaced: RowMap) -> RowMap:
    replacement = np.arange(len(permutation))
    replacement[replaced] = permutation[replaced]
    return replacement


# Which proof a forward pass needs


def shape_class(tensor: Tensor, rows: int) -> Hashable:
    """Return what a shape says about the rows: which axes are as long as the batch, and whether the first is a multiple of it.

    Sequences of different lengths are of the same class, so that a few experiments are enough for all batches.
    """
    shape = tensor.shape
    is_multiple = bool(shape) and rows > 0 and shape[0] % rows == 0
    return tensor.dtype.is_floating_point, is_multiple, tuple(length == rows for length in shape)


Shapes = Mapping[str, AbstractSet[Hashable]]
"""By module: the shape classes of its inputs in a forward pass."""


class Proofs:
    """The proofs of a model's forward passes, one for each kind of them."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Proof] = {}
        self._tries: dict[Hashable, int] = {}
        self._of_module: dict[nn.Module, list[Proof]] = {}
        self._common: dict[nn.Module, Proof] = {}

    def get(
        self, module: nn.Module, arguments: Arguments, shapes: Shapes, rows: int, find: Callable[[], Proof]
    ) -> tuple[Proof, bool]:
        """Return the proof for a forward pass, made by `find` if it is needed, and whether it is new."""
        inputs = tuple(shape_class(tensor, rows) for tensor in tensors_in(arguments))
        options = options_in(arguments)
        calls = frozenset((name, frozenset(classes)) for name, classes in shapes.items())
        kind = (module, module.training, inputs, options, calls)
        proof = self._known.get(kind)
        tries = self._tries.get(kind, 0)
        if proof is not None and not (proof.is_inconclusive and tries < MOST_TRIES):
            return proof, False
        proofs = self._of_module.setdefault(module, [])
        if proof is None and len(proofs) >= MOST_KINDS:
            # A model with many experts has too many kinds of forward passes to try each
            is_new = module not in self._common
            if is_new:
                self._common[module] = _common_proof(proofs)
            return self._common[module], is_new
        new_proof = find()
        proofs.append(new_proof)
        self._known[kind] = new_proof
        self._tries[kind] = tries + 1
        return new_proof, True


def _common_proof(proofs: Sequence[Proof]) -> Proof:
    """Return what all of these proofs agree on, as an assumption about forward passes of other kinds."""
    why = f"the model has run in more than {MOST_KINDS} different ways"
    common = Proof(problem=why)
    by_layer: dict[str, list[Decision]] = {}
    for proof in proofs:
        for layer, decisions in proof.decisions.items():
            by_layer.setdefault(layer, []).extend(decisions)
    for layer, decisions in by_layer.items():
        places = {decision.where for decision in decisions}
        where = places.pop() if len(places) == 1 else None
        common.decisions[layer] = [Decision(where, why)]
    return common


def decision_of(decisions: Sequence[Decision], call: int | None) -> Decision:
    """Return the decision for a call of a layer, or, where its number is not known, that of all calls if they agree."""
    if call is not None and call < len(decisions):
        return decisions[call]
    if decisions and all(one == decisions[0] for one in decisions):
        return decisions[0]
    return Decision(None, "its calls hold the rows in different places" if decisions else "")
