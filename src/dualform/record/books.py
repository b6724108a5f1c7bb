"""The books: turns what the ledger holds into the updates, slots and rows of a step, and watches the weights between.

Everything here happens in an optimizer's hooks, before or after its update. An exception may come at any moment (Ctrl-C), so an update is
first written down apart from everything else (`prepare`). Then its slots are taken out of the ledger (`consume`), and it counts once the
optimizer has returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from types import FrameType, MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from dualform.errors import RecordingError, UnexplainedError
from dualform.record import audit
from dualform.record.columns import Batch
from dualform.record.ledger import Held, LayerLedger, Ledger, ModuleLedger
from dualform.record.looks import Looks
from dualform.record.optimizers import Numbers, Replay, replay_for
from dualform.record.parameters import Link, ParameterLedger
from dualform.recursions import KINDS
from dualform.store import records
from dualform.store.format import NO_ROW, Mark

EDITED = (
    "was changed {when} by something else than its optimizer (load_state_dict, .data, an average of weights, a "
    "constraint), or its gradient by a hook that runs after the recorder's"
)
REPLACED = "had its optimizer state replaced since the last step (optimizer.load_state_dict)"
UNEXPLAINED = "has a gradient that its recorded slots do not explain"


@dataclass(slots=True)
class _Audited:
    ledger: ParameterLedger
    gradient: Tensor
    links: list[Link]
    verdict: audit.Verdict
    settings: dict[str, float]
    factors: dict[int, float] = field(default_factory=dict)
    """By backward pass; those that take no part are not in it."""


COUNTED_AS = {"step": "count", "mu_product": "mu_product"}
"""Numbers in an optimizer's state: their names there, and in the settings of an update, where they are those after it."""


@dataclass(frozen=True)
class WatchedParameter:
    """A recorded parameter, and what its optimizer knows of it."""

    ledger: ParameterLedger
    kind: str
    names: tuple[str, ...]
    """The tensors that such an optimizer may have, …"""
    tensors: dict[str, Tensor]
    """… and those that it has."""
    counters: dict[str, float]

    @property
    def is_elementwise(self) -> bool:
        """Whether the optimizer's coefficients are matrices."""
        return self.kind in KINDS and KINDS[self.kind].elementwise


@dataclass(eq=False, slots=True)
class OpenStep:
    """A step that may still get updates of other optimizers: what is recorded of it, and what the next update needs to know."""

    record: records.Step
    next_row: int
    """The number of the first row after it."""
    updated_by: frozenset[int] = frozenset()
    """The optimizers whose updates are in it."""
    rows_of: dict[int, int] = field(default_factory=dict)
    """By batch() call: the number of its first row."""
    backward_of: dict[int, int] = field(default_factory=dict)
    """By backward pass: its number in this step."""
    stored: dict[LayerLedger, set[int]] = field(default_factory=dict)
    """By layer: the backward passes whose slots are in it. Weight and bias may have different optimizers."""

    def copy(self) -> OpenStep:
        """Another one, which can get an update without any change to this one; log() writes to both."""
        stored = {layer: set(tasks) for layer, tasks in self.stored.items()}
        return OpenStep(
            self.record.copy(), self.next_row, self.updated_by, dict(self.rows_of), dict(self.backward_of), stored
        )

    def row_of(self, batch: Batch) -> int:
        """The number of a batch's first row in this step."""
        if batch.serial not in self.rows_of:
            self.rows_of[batch.serial] = self.next_row
            self.record.rows.append(records.Rows(self.next_row, batch.rows, batch.values))
            self.next_row += batch.rows
        return self.rows_of[batch.serial]


@dataclass(eq=False, slots=True)
class Update:
    """An update that an optimizer is about to make."""

    optimizer: int
    step: OpenStep
    """The step with this update in it."""
    within: FrameType
    """The call of optimizer.step() that makes it."""
    last_task: int
    """The last backward pass before it."""
    others: list[tuple[Tensor, int]]
    """The optimizer's parameters that are not recorded, with PyTorch's counts of their changes."""
    modules: list[ModuleLedger] = field(default_factory=list)
    layers: list[LayerLedger] = field(default_factory=list)
    parameters: list[ParameterLedger] = field(default_factory=list)
    """What it takes out of the ledger: modules that need a new batch() call, slots, and what backward passes added to gradients."""
    held: Held | None = None
    foretold: bool = False
    """Whether it is known what SGD will make of the gradients."""
    edited: bool = False
    """Whether something else has changed weights or optimizer state before it (and on_unexplained="mark")."""
    has_returned: bool = False
    """Whether the optimizer has made it."""

    def has_moved_others(self) -> bool:
        """Whether parameters that are not recorded may have changed since it began."""
        return any(parameter._version != version for parameter, version in self.others)


@dataclass(slots=True)
class _Watched:
    """The recorded parameters of one optimizer."""

    count: int
    """How many parameters are recorded at all."""
    groups: list[Any]
    listed: list[Any]
    """All parameters of the optimizer, recorded or not, …"""
    others: list[Any]
    """… and those that are not."""
    parts: list[tuple[Any, int, int]]
    """Its groups, the first of the recorded parameters of each, and the one after the last."""
    looks: Looks
    numbers: list[int]
    """Of the parameters."""
    modules: list[ModuleLedger]
    """Those that use them, …"""
    whole: bool
    """… and whether they use nothing else."""
    all_state: list[Any] = field(default_factory=list)
    """The state of all parameters that the optimizer has one of, …"""
    state: list[dict[str, Any]] = field(default_factory=list)
    """… and of each recorded one."""
    states: list[tuple[int, str, Tensor, int]] = field(default_factory=list)
    """The optimizer's tensors after its last step: of which parameter, their names, themselves and PyTorch's count of changes."""
    read: list[tuple[Numbers, list[Numbers]]] = field(default_factory=list)
    """The numbers of each group before the last update, …"""
    settings: list[Numbers] = field(default_factory=list)
    """… and what they come to for each parameter; most of the time the next update has the same."""


class Books:
    """Keeps the books of one recording."""

    def __init__(self, ledger: Ledger, optimizers: Sequence[Optimizer], *, keep: str, on_unexplained: str):
        self._ledger, self._optimizers = ledger, optimizers
        self._keep, self._on_unexplained = keep, on_unexplained
        self._replays: list[Replay | None] = [replay_for(optimizer) for optimizer in optimizers]
        self._watched: dict[int, _Watched] = {}
        self._regrouped = False
        """Whether an optimizer has other parameters than when that was last looked at."""
        self.first_row = 0
        """The number of the first row that is recorded: more than 0 in a resumed recording."""

    def recorded(self) -> Iterator[tuple[ParameterLedger, dict[str, Any]]]:
        """The recorded parameters of all optimizers, with their groups."""
        for number in range(len(self._optimizers)):
            watched = self._watch(number)
            for group, first, end in watched.parts:
                for ledger in watched.looks.ledgers[first:end]:
                    yield ledger, group

    def _watch(self, number: int) -> _Watched:
        """The recorded parameters of an optimizer: found once, and again when a group, a parameter or a layer is new
        (load_state_dict makes new groups)."""
        groups, parameters = self._optimizers[number].param_groups, self._ledger.parameters
        now = list(chain.from_iterable([group["params"] for group in groups]))
        known = self._watched.get(number)
        if (
            known is None
            or known.count != len(parameters)
            or not _same(known.groups, groups)
            or not _same(known.listed, now)
        ):
            ledgers: list[ParameterLedger] = []
            parts = []
            for group in groups:
                first = len(ledgers)
                ledgers += [parameters[id(one)] for one in group["params"] if id(one) in parameters]
                parts.append((group, first, len(ledgers)))
            modules = [one for one in self._ledger.modules if any(p in ledgers for p in one.parameters)]
            whole = all(p in ledgers for one in modules for p in one.parameters)
            looks, numbers = Looks(ledgers), [ledger.number for ledger in ledgers]
            others = [one for one in now if id(one) not in parameters]
            watched = _Watched(len(parameters), list(groups), now, others, parts, looks, numbers, modules, whole)
            if known is not None:
                self._ledger.take_apart()  # what it is to explain was told to others than these looks
                known.looks.hand_out()
                watched.states = [
                    (ledgers.index(ledger), name, value, version)
                    for place, name, value, version in known.states
                    if (ledger := known.looks.ledgers[place]) in ledgers
                ]
            looks.attach()
            known, self._regrouped = watched, True
            self._watched[number] = watched
        return known

    def refuse_shared(self) -> None:
        """Refuse parameters that several optimizers update: a dual form holds for one."""
        seen: set[str] = set()
        for ledger, _ in self.recorded():
            if ledger.name in seen:
                raise RecordingError(
                    f"{ledger.name!r} is in two of the recorded optimizers, and a dual form holds for the updates of one. Give each "
                    f"parameter to one of them; if one takes over from the other, close the recording and go on with "
                    f"record(model, other, path, resume=True)."
                )
            seen.add(ledger.name)
        self._regrouped = False

    def watched_parameters(self) -> Iterator[WatchedParameter]:
        """The recorded parameters of all optimizers, with the optimizers' state."""
        for number, replay in enumerate(self._replays):
            watched = self._watch(number)
            names = () if replay is None else replay.state
            for ledger, state in zip(watched.looks.ledgers, self._state(number, watched), strict=True):
                tensors = {name: value for name in names if isinstance(value := state.get(name), Tensor)}
                counters = {name: float(state[name]) for name in COUNTED_AS if replay is not None and name in state}
                yield WatchedParameter(ledger, self._kind(number), names, tensors, counters)

    def _tensors(self, number: int, watched: _Watched) -> list[tuple[int, str, Tensor, int]]:
        replay = self._replays[number]
        if replay is None:
            return []
        names = replay.state
        return [
            (place, name, value, value._version)
            for place, state in enumerate(self._state(number, watched))
            for name in names
            if isinstance(value := state.get(name), Tensor)
        ]

    def _state(self, number: int, watched: _Watched) -> list[dict[str, Any]]:
        """The optimizer's state of each parameter. To look a parameter up takes a function in Python: not at every step."""
        state = self._optimizers[number].state
        now = list(state.values())
        if len(watched.state) != len(watched.numbers) or not _same(now, watched.all_state):
            # In this order: an exception in between must not make the old states pass for the new ones
            watched.state = [state.get(ledger.parameter, {}) for ledger in watched.looks.ledgers]
            watched.all_state = now
        return watched.state

    # Between steps

    def changes(self, looked: Mapping[int, bool] = MappingProxyType({})) -> dict[str, tuple[ParameterLedger, str]]:
        """What changed since the last update though no optimizer did it: by parameter, and how.

        looked: of some optimizers, whether their parameters have been looked at and are the same.
        """
        found: dict[str, tuple[ParameterLedger, str]] = {}
        for number in range(len(self._optimizers)):
            watched = self._watched[number] if number in looked else self._watch(number)
            if not (looked[number] if number in looked else watched.looks.unchanged()):
                found |= {
                    ledger.name: (ledger, _edited(ledger)) for ledger in watched.looks.ledgers if ledger.changed()
                }
            found |= {
                ledger.name: found.get(ledger.name, (ledger, REPLACED)) for ledger in self._replaced(number, watched)
            }
        return found

    def _replaced(self, number: int, watched: _Watched) -> Iterator[ParameterLedger]:
        """The parameters whose optimizer state is not what the last update left: other tensors, changed, new or gone."""
        now = self._tensors(number, watched)
        if len(now) == len(watched.states) and all(map(_is_unchanged, now, watched.states)):
            return
        replay = self._replays[number]
        assert replay is not None
        known = {(place, name): (value, version) for place, name, value, version in watched.states}
        for place, name, value, version in now:
            before, counted = known.pop((place, name), (None, 0))
            if value is not before or version != counted:
                yield watched.looks.ledgers[place]
        if KINDS[replay.kind].elementwise:  # SGD begins afresh without its buffer, which is written down
            yield from (watched.looks.ledgers[place] for place, _ in known)

    def _settle_changes(self, update: Update, looked: Mapping[int, bool]) -> None:
        """Raise what changed between steps, or mark it and go on from what there is now."""
        for name, (ledger, how) in self.changes(looked).items():
            update.edited = True
            self._complain(update.step.record, ledger, f"{name!r} {how}. Its dual form no longer holds. End the recording before "
                           f"such a change and begin a new one after it", unseen=ledger.unseen)  # fmt: skip

    def remember(self, number: int | None = None) -> None:
        """Remember what parameters and optimizer state look like now: of one optimizer, or (default) of all."""
        for one in range(len(self._optimizers)) if number is None else [number]:
            self._remember(one, foretold=False)

    def remember_after(self, update: Update) -> None:
        """Remember what an update has made of them, and write it down. Doing so again changes nothing."""
        # What is foretold may be gone through only once
        foretold, update.foretold = update.foretold, False
        numbers = range(len(self._optimizers)) if update.edited else [update.optimizer]
        for number in numbers:
            fingerprints = self._remember(number, foretold=foretold and number == update.optimizer)
            update.step.record.after.update(fingerprints)

    def _remember(self, number: int, *, foretold: bool) -> dict[int, float]:
        """Look at an optimizer's parameters; return a fingerprint of each, by its number."""
        watched = self._watched.get(number) or self._watch(number)
        watched.states = self._tensors(number, watched)
        fingerprints = watched.looks.remember(watched.settings if foretold else None, watched.state)
        return dict(zip(watched.numbers, fingerprints, strict=True))

    # A step

    def prepare(self, number: int, step: OpenStep, within: FrameType) -> Update:
        """An optimizer is about to update its parameters: write down what it will make of which slots.

        step: one that nobody else uses; it gets the update. within: the call of optimizer.step().
        """
        step.record.row_evidence |= self._ledger.rows.news
        for one in range(len(self._optimizers)):
            self._watch(one)
        if self._regrouped:
            self.refuse_shared()
        watched = self._watched[number]
        others = [(one, one._version) for one in watched.others]
        update = Update(number, step, within, self._ledger.last_task, others)
        step.updated_by |= {number}
        looks, optimizer, replay = watched.looks, self._optimizers[number], self._replays[number]
        gradients = [parameter.grad for parameter in looks.parameters]
        held = self._held(watched)
        links = None if held else [_only_pass(ledger) for ledger in looks.ledgers]
        usual, same = looks.before_update(gradients, links)
        self._settle_changes(update, {number: same})
        settings = self._settings(number, watched)
        scale = getattr(optimizer, "grad_scale", None)  # a loss scaler may leave the division to a fused optimizer
        by_sgd = replay is not None and replay.kind == "sgd" and scale is None and not update.edited
        update.foretold = by_sgd and (usual or all(one is not None for one in gradients))
        if usual and scale is None:
            if held is not None:
                self._write_held(update, watched, settings, held)
                return update
            if watched.whole and self._write_single(update, watched, settings):
                return update
        self._ledger.take_apart()
        audited = list(self._audit(step.record, looks, gradients, settings))
        self._write(update, audited, 1 / float(scale or 1.0))
        return update

    def consume(self, update: Update) -> None:
        """Take the slots of an update out of the ledger. Doing so again changes nothing."""
        if update.held is not None and self._ledger.held is update.held:
            self._ledger.held = None
        for layer in update.layers:
            waiting = self._waiting_tasks(layer, update)
            layer.forget({task for task in layer.tasks() if task <= update.last_task and task not in waiting})
        for parameter in update.parameters:
            parameter.forget_until(update.last_task)
        self._ledger.spent.update(update.modules)

    def _waiting_tasks(self, layer: LayerLedger, update: Update) -> set[int]:
        """The backward passes that an update has not stored, and that other parameters of the layer may need.

        Weight and bias may have different optimizers. That of the bias stores no slots if its gradient is rounding alone.
        """
        others = [parameter for _, parameter in layer.uses if parameter not in update.parameters]
        counted = {link.task for parameter in others for link in parameter.links if link.counted}
        return counted - update.step.stored.get(layer, set())

    def retire(self, step: OpenStep) -> None:
        """A step is over: its backward passes cannot be part of another one."""
        for layer, tasks in step.stored.items():
            layer.consumed.extend(tasks.difference(layer.consumed))
        self._ledger.rows.forget_news(step.record.row_evidence)

    def _held(self, watched: _Watched) -> Held | None:
        """The ordinary pass that was kept, if it went through all layers that are updated, and no others."""
        held = self._ledger.held
        if (
            held is not None
            and watched.whole
            and len(held.calls) == len(watched.modules)
            and [module.seen_in for module in watched.modules].count(held.task) == len(held.calls)
            and len(self._optimizers) == 1
        ):
            return held
        self._ledger.take_apart()
        return None

    def _settings(self, number: int, watched: _Watched) -> list[dict[str, float]]:
        """Those of each parameter: the very same as of the last update, if they are."""
        replay, state = self._replays[number], self._state(number, watched)
        if replay is None:
            return [{} for _ in state]
        read = [replay.read(group, state[first:end]) for group, first, end in watched.parts]
        if read != watched.read:
            # In this order: an exception in between must not make the old settings pass for the new ones
            watched.settings = [{**shared, **own} for shared, owns in read for own in owns]
            watched.read = read
        return watched.settings

    def _write_held(self, update: Update, watched: _Watched, settings: list[dict[str, float]], held: Held) -> None:
        """Write down an update by an ordinary pass."""
        record = update.step.record
        record.blocks += held.blocks(update.step.row_of(held.batch))
        update.held, update.modules = held, watched.modules
        self._write_factors(update, watched, settings, [])
        room = held.room
        if room is not None:  # always as much
            room.nbytes = record.nbytes = room.nbytes or record.nbytes

    def _write_single(self, update: Update, watched: _Watched, settings: list[dict[str, float]]) -> bool:
        """Write down an update by the gradients of a single backward pass, of whole layers; False: it is none."""
        step = update.step
        tasks = {ledger.links[0].task for ledger in watched.looks.ledgers}
        if len(tasks) != 1 or not tasks.isdisjoint(step.backward_of):
            return False
        [task] = tasks
        for module in watched.modules:
            for layer in module.layers:
                self._store(layer, task, step)
                update.layers.append(layer)
        update.modules, update.parameters = watched.modules, watched.looks.ledgers
        earlier = [0.0] * step.backward_of.setdefault(task, len(step.backward_of))
        self._write_factors(update, watched, settings, earlier)
        return True

    def _write_factors(
        self, update: Update, watched: _Watched, settings: list[dict[str, float]], earlier: list[float]
    ) -> None:
        """Write down what was found for each parameter. earlier: the factors of passes before the one that was looked at."""
        found = watched.looks.factors()
        factors, residuals = found[:, :1], found[:, 1]
        if earlier:
            factors = np.concatenate([np.tile(earlier, (len(found), 1)), factors], 1)
        kept = watched.looks.vectors() if self._keep != "keys" else [None] * len(found)  # a vector is seen as it is
        sizes = watched.looks.sizes()
        kind = self._kind(update.optimizer)
        update.step.record.updates.append(
            records.Update(kind, watched.numbers, settings, factors, residuals, sizes, kept)
        )

    def _write(self, update: Update, audited: list[_Audited], unscaled: float) -> None:
        """Write down an update by any gradients. unscaled: by what the optimizer will multiply them first."""
        kind = self._kind(update.optimizer)
        elementwise = kind in KINDS and KINDS[kind].elementwise
        for one in audited:
            # A bias before a normalisation has no true gradient. The Adam family divides its rounding by its rounding, and would
            # so make anything of a slot's part of it: the gradient is kept, and belongs to the initial part as a whole
            if not one.verdict.determined and elementwise and self._keeps_gradient(one.ledger):
                continue
            for link, factor in zip(one.links, one.verdict.factors, strict=True):
                if factor != 0:
                    one.factors[link.task] = factor * unscaled
        self._store_slots({one.ledger.number: one.factors for one in audited}, update)
        numbers, factors = update.step.backward_of, []
        for one in audited:
            listed = [0.0] * (1 + max([numbers[task] for task in one.factors], default=-1))
            for task, factor in one.factors.items():
                listed[numbers[task]] = factor
            factors.append(listed)
            update.parameters.append(one.ledger)
        update.step.record.updates.append(
            records.Update(
                kind,
                [one.ledger.number for one in audited],
                [one.settings for one in audited],
                factors,
                [one.verdict.residual for one in audited],
                [one.verdict.size * unscaled / math.sqrt(one.ledger.columns) for one in audited],
                [_copied(one.gradient, unscaled) if self._keeps_gradient(one.ledger) else None for one in audited],
            )
        )

    def _kind(self, number: int) -> str:
        replay = self._replays[number]
        return replay.kind if replay else type(self._optimizers[number]).__name__

    def _keeps_gradient(self, ledger: ParameterLedger) -> bool:
        return not ledger.is_matrix and self._keep != "keys"

    def _audit(
        self, step: records.Step, looks: Looks, gradients: list[Tensor | None], settings: list[dict[str, float]]
    ) -> Iterator[_Audited]:
        """Do the slots explain the gradients that were looked at?"""
        audited = []
        for place, (ledger, gradient) in enumerate(zip(looks.ledgers, gradients, strict=True)):
            if gradient is None:
                continue
            links = [link for link in ledger.links if link.counted]
            own = settings[place]
            units = [ledger.bound_coarse_error(link) for link in links if link.coarse_dtype is not None]
            if units:
                own = {**own, "autocast": max(units)}
            verdict = looks.verdict(place)
            if not all(link.audited for link in links):
                verdict = audit.unaudited(links)
            elif verdict is None or not verdict.determined:  # the compiled loop knows nothing of other gradients
                verdict = audit.explain(links, looks.seen(place), ledger.roundoff)
            audited.append((place, _Audited(ledger, gradient, links, verdict, own)))
        _share_factors(looks, audited)
        for _, one in audited:
            if not one.verdict.explained:
                self._unexplained(step, one.ledger, one.verdict, one.links)
            yield one

    def _store_slots(self, tasks: Mapping[int, Iterable[int]], update: Update) -> None:
        """Store the slots of those backward passes that take part in an update of some parameters; the others are forgotten."""
        for module in self._ledger.modules:
            if not any(p.number in tasks for p in module.parameters):
                continue
            for layer in module.layers:
                mine = [tasks[p.number] for _, p in layer.uses if p.number in tasks]
                wanted: set[int] = set()
                wanted.update(*mine)
                for task in sorted(wanted - update.step.stored.get(layer, set())):
                    self._store(layer, task, update.step)
                if mine:
                    update.layers.append(layer)
            update.modules.append(module)

    def _store(self, layer: LayerLedger, task: int, step: OpenStep) -> None:
        if task in layer.problems:
            raise layer.problems[task]
        if task in layer.consumed:
            raise UnexplainedError(
                f"layer {layer.layer.name!r}, step {step.record.number}: its parameters are updated in different steps with gradients "
                f"of one backward pass, whose slots belong to the earlier step. Step its optimizers together, or zero gradients."
            )
        backward = step.backward_of.setdefault(task, len(step.backward_of))
        calls = layer.calls.get(task, [])
        if len(calls) > 1:
            calls.sort(key=lambda call: call.serial)
        for number, call in enumerate(calls):
            call.backward, call.call = backward, number
            call.first_row = NO_ROW if call.is_shared else step.row_of(call.batch)
            step.record.blocks.append(call)
        step.stored.setdefault(layer, set()).add(task)

    def _unexplained(
        self, step: records.Step, ledger: ParameterLedger, verdict: audit.Verdict, links: list[Link]
    ) -> None:
        tasks = {link.task for link in links}
        for layer in self._layers_of(ledger):
            for task, problem in layer.problems.items():
                if task in tasks:
                    raise problem
        self._complain(
            step,
            ledger,
            f"{ledger.name!r} {UNEXPLAINED} (residual {verdict.residual:.1e} of its size). Likely causes: gradients "
            f"clipped by value or with noise added, gradients not zeroed since an earlier step, the parameter used "
            f"outside its module (F.linear), or its input changed in place. Scaling, clipping by norm and accumulation "
            f"are understood",
        )

    def _layers_of(self, ledger: ParameterLedger) -> list[LayerLedger]:
        return [layer for layer in self._ledger.layers if any(p is ledger for _, p in layer.uses)]

    def _complain(self, step: records.Step, ledger: ParameterLedger, what: str, unseen: int = 0) -> None:
        """unseen: so many updates before the last one it may have happened already."""
        layers = [layer.layer.name for layer in self._layers_of(ledger)]
        if self._on_unexplained == "raise":
            raise UnexplainedError(
                f"layer {layers[0]!r}, step {step.number}: {what}. To let the training go on and mark the layer as inexact "
                f'from here, record with on_unexplained="mark".'
            )
        for layer in layers:
            step.marks.setdefault(layer, Mark(max(0, step.number - unseen), what))


def _same(some: list[Any], others: list[Any]) -> bool:
    """Whether these are the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _is_unchanged(now: tuple[int, str, Tensor, int], before: tuple[int, str, Tensor, int]) -> bool:
    """Whether a tensor of the optimizer is what it was, of the same parameter."""
    return now[2] is before[2] and now[3] == before[3]


def _edited(ledger: ParameterLedger) -> str:
    return EDITED.format(when=f"within the last {ledger.unseen + 1} steps" if ledger.unseen else "since the last step")


def _only_pass(ledger: ParameterLedger) -> Link | None:
    """The only backward pass that has added to a gradient, in the parameter's own type; None: there are others, or none."""
    links = ledger.links
    if len(links) != 1:
        return None
    link = links[0]
    return link if link.counted and link.audited and link.coarse_dtype is None else None


def _share_factors(looks: Looks, audited: list[tuple[int, _Audited]]) -> None:
    """Let gradients that do not tell well by what they were scaled take the factor of those that do.

    looks: at the gradients, each given with its place there.
    """
    verdicts = [one.verdict for _, one in audited]
    audit.share_factors(verdicts)
    likely = audit.likely_factors(verdicts)
    for place, one in audited:
        if one.verdict.determined or not one.links or not bool(one.gradient.detach().any()):
            continue
        # It is nothing but rounding, as that of a bias before a normalisation is
        for factor in likely:
            one.verdict = audit.explain(one.links, looks.seen(place), one.ledger.roundoff, last_factor=factor)
            if one.verdict.explained:
                break
        is_kept = not one.ledger.is_matrix
        if not one.verdict.explained and is_kept and not any(other.determined for other in verdicts):
            one.verdict = audit.explain_rounding(one.links, looks.seen(place), one.ledger.roundoff)


def _copied(gradient: Tensor, times: float) -> records.Array:
    own: records.Array = gradient.detach().cpu().numpy()
    return own.copy() if times == 1 else own * times
