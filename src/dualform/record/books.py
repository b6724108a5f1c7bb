"""The books: turns what the ledger holds into the updates, slots and rows of a step, and watches the weights between.

Everything here happens in an optimizer's hooks, before or after its update.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import UnexplainedError
from dualform.record import audit
from dualform.record.columns import Batch
from dualform.record.ledger import LayerLedger, Ledger, Pass, roundoff
from dualform.record.optimizers import Replay, replay_for
from dualform.store import records

EDITED = (
    "was changed since the last step by something else than its optimizer (load_state_dict, .data, an average of "
    "weights, a constraint)"
)
REPLACED = "had its optimizer state replaced since the last step (optimizer.load_state_dict)"
UNEXPLAINED = "has a gradient that its recorded slots do not explain"


@dataclass(frozen=True)
class Place:
    """Where a parameter lives."""

    number: int
    layer: int
    short: str
    name: str


@dataclass(frozen=True)
class _Audited:
    place: Place
    gradient: Tensor
    passes: list[Pass]
    verdict: audit.Verdict
    settings: dict[str, float]


class Books:
    """Keeps the books of one recording."""

    def __init__(self, ledger: Ledger, optimizers: Sequence[Optimizer], *, keep: str, on_unexplained: str):
        self._ledger, self._optimizers = ledger, optimizers
        self._keep, self._on_unexplained = keep, on_unexplained
        self._replays: list[Replay | None] = [replay_for(optimizer) for optimizer in optimizers]
        self._places: dict[int, Place] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        self._states: dict[tuple[int, str], tuple[Tensor, int]] = {}
        self._rows_of: dict[int, int] = {}
        self.next_row = 0

    def enter(self, layer: int, name: str) -> dict[str, str]:
        """Enter the parameters of a layer; gives their full names."""
        names = {}
        for short, parameter in self._ledger.layers[layer].parameters().items():
            names[short] = f"{name}.{short}" if name else short
            self._places[id(parameter)] = Place(len(self._places), layer, short, names[short])
            self._parameters[id(parameter)] = parameter  # keeps the id from being given to another
        return names

    def recorded(self, numbers: Iterable[int] | None = None) -> Iterator[tuple[Place, nn.Parameter, dict[str, Any]]]:
        """The recorded parameters of some optimizers (default: all), with their groups."""
        for number in range(len(self._optimizers)) if numbers is None else numbers:
            for group in self._optimizers[number].param_groups:
                for parameter in group["params"]:
                    place = self._places.get(id(parameter))
                    if place is not None:
                        yield place, parameter, group

    def optimizer_state(self) -> Iterator[tuple[Place, str, Tensor]]:
        """The state tensors that belong to the initial part."""
        for number, (optimizer, replay) in enumerate(zip(self._optimizers, self._replays, strict=True)):
            for place, parameter, _ in self.recorded([number]):
                for name in replay.state if replay else ():
                    value = optimizer.state.get(parameter, {}).get(name)
                    if isinstance(value, Tensor):
                        yield place, name, value

    def begin_step(self) -> None:
        """A new step is open."""
        self._rows_of.clear()
        for ledger in self._ledger.layers:
            ledger.stored.clear()

    # Between steps

    def changes(self) -> dict[str, tuple[Place, str]]:
        """What changed since the last update though no optimizer did it: by parameter, and how."""
        found = {}
        for place, parameter, _ in self.recorded():
            if self._ledger.layers[place.layer].watched[place.short].changed(parameter):
                found[place.name] = (place, EDITED)
        for place, name, value in self.optimizer_state():
            known = self._states.get((place.number, name))
            if known is not None and (known[0] is not value or known[1] != value._version):
                found.setdefault(place.name, (place, REPLACED))
        return found

    def settle_changes(self, step: records.Step) -> None:
        """Raise what changed between steps, or mark it and go on from what there is now."""
        for name, (place, how) in self.changes().items():
            self._complain(step, place, f"{name!r} {how}. Its dual form no longer holds. End the recording before such "
                           f"a change and begin a new one after it")  # fmt: skip
        if step.marks:
            self.remember(range(len(self._optimizers)), step)

    def remember(self, numbers: Iterable[int], step: records.Step | None) -> None:
        """Remember what parameters and optimizer state look like after an update."""
        for place, parameter, _ in self.recorded(numbers):
            watched = self._ledger.layers[place.layer].watched[place.short]
            watched.remember(parameter)
            if step is not None:
                step.after[place.number] = watched.fingerprint
        for place, name, value in self.optimizer_state():
            self._states[place.number, name] = (value, value._version)

    # A step

    def update(self, number: int, step: records.Step) -> None:
        """An optimizer is about to update its parameters: write down what it will make of which slots."""
        replay = self._replays[number]
        audited = list(self._audit(number, step))
        common = _common_factor([entry.verdict for entry in audited])
        factors: list[dict[int, float]] = []
        for entry in audited:
            scale = 1.0 if entry.verdict.determined else common
            pairs = zip(entry.passes, entry.verdict.factors, strict=True)
            factors.append({one.task: factor * scale for one, factor in pairs if factor != 0})
        used: dict[int, set[int]] = {}
        for entry, by_task in zip(audited, factors, strict=True):
            used.setdefault(entry.place.layer, set()).update(by_task)
        for layer, tasks in used.items():
            self._store_slots(layer, tasks, step)
        kind = replay.kind if replay else type(self._optimizers[number]).__name__
        for entry, by_task in zip(audited, factors, strict=True):
            is_bias = entry.place.short == "bias" and self._keep != "keys"
            step.updates.append(
                records.Update(
                    entry.place.number,
                    kind,
                    entry.settings,
                    [by_task.get(one.task, 0.0) for one in self._ledger.layers[entry.place.layer].stored],
                    entry.verdict.residual,
                    entry.gradient.detach().cpu().clone() if is_bias else None,
                )
            )

    def _audit(self, number: int, step: records.Step) -> Iterator[_Audited]:
        replay, state = self._replays[number], self._optimizers[number].state
        for place, parameter, group in self.recorded([number]):
            if parameter.grad is None:
                continue
            ledger = self._ledger.layers[place.layer]
            passes = [one for one in (*ledger.stored, *ledger.passes) if place.short in one.counted]
            seen = ledger.seen(place.short, parameter.grad)
            verdict = audit.explain([one.link(place.short) for one in passes], seen, roundoff(parameter))
            if not verdict.explained:
                self._unexplained(step, place, verdict, passes)
            settings = replay.settings(group, state.get(parameter, {})) if replay else {}
            yield _Audited(place, parameter.grad, passes, verdict, settings)

    def _store_slots(self, layer: int, tasks: set[int], step: records.Step) -> None:
        """Store the slots of those backward passes of a layer that take part in an update; forget the others."""
        ledger: LayerLedger = self._ledger.layers[layer]
        for one in ledger.passes:
            if one.task not in tasks:
                continue
            if one.problem is not None:
                raise one.problem
            for call, slots in enumerate(sorted(one.calls, key=lambda c: c.serial)):
                step.blocks.append(
                    records.Block(
                        layer,
                        len(ledger.stored),
                        call,
                        self._rows(slots.batch, step),
                        slots.rows,
                        slots.positions,
                        slots.keys,
                        slots.errors,
                        slots.may_repeat,
                    )
                )
            ledger.stored.append(one)
        ledger.passes.clear()
        self._ledger.spent.add(layer)

    def _rows(self, batch: Batch, step: records.Step) -> int:
        """The number of a batch's first row in this step."""
        if batch.serial not in self._rows_of:
            self._rows_of[batch.serial] = self.next_row
            step.rows.append(records.Rows(self.next_row, batch.rows, batch.values))
            self.next_row += batch.rows
        return self._rows_of[batch.serial]

    def _unexplained(self, step: records.Step, place: Place, verdict: audit.Verdict, passes: list[Pass]) -> None:
        for one in passes:
            if one.problem is not None:
                raise one.problem
        self._complain(
            step,
            place,
            f"{place.name!r} {UNEXPLAINED} (residual {verdict.residual:.1e} of its size). Likely causes: gradients "
            f"clipped by value or with noise added, gradients not zeroed since an earlier step, the parameter used "
            f"outside its module (F.linear), or its input changed in place. Scaling, clipping by norm and accumulation "
            f"are understood",
        )

    def _complain(self, step: records.Step, place: Place, what: str) -> None:
        layer = self._ledger.layers[place.layer].layer.name
        if self._on_unexplained == "raise":
            raise UnexplainedError(
                f"layer {layer!r}, step {step.number}: {what}. To let the training go on and mark the layer as inexact "
                f'from here, record with on_unexplained="mark".'
            )
        step.marks.setdefault(layer, what)


def _common_factor(verdicts: list[audit.Verdict]) -> float:
    """For gradients that are rounding noise, the factor of the others: clipping scales them all alike."""
    known = [verdict.factors[-1] for verdict in verdicts if verdict.determined and verdict.factors]
    return statistics.median_low(known) if known else 1.0
