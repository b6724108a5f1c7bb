"""Who else changes the weights: watches the parameters and the state of each optimizer between its updates.

The dual form holds only if nothing but the optimizer changes a parameter, from the gradient that was audited. What was changed otherwise is
found before the next update: a parameter, the optimizer's state, or the gradient itself, after the audit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.record.optimizers import Numbers, replay_for
from dualform.record.parameters import RecordedParameter

EDITED = "was changed since the last step by something else than its optimizer (load_state_dict, .data, an average of weights, a constraint)"
EDITED_GRADIENT = "had its gradient changed by an optimizer hook that runs after the recorder's, so its slots do not explain its update"
REPLACED = "had its optimizer state replaced since the last step (optimizer.load_state_dict)"

COUNTED_AS = {"step": "count", "mu_product": "mu_product"}
"""Numbers in an optimizer's state: their names there, and in the settings of an update, where they are those after it."""

Edits = dict[str, tuple[RecordedParameter, str]]
"""By the name of a parameter: itself, and how it was changed."""
Gradients = list[tuple[RecordedParameter, Tensor, int]]
"""Parameters, their gradients, and PyTorch's counts of the gradients' changes."""


@dataclass(frozen=True)
class WatchedParameter:
    """A recorded parameter, and what its optimizer knows of it."""

    parameter: RecordedParameter
    kind: str
    names: tuple[str, ...]
    """The tensors that such an optimizer may have, …"""
    tensors: dict[str, Tensor]
    """… and those that it has."""
    counters: dict[str, float]
    is_elementwise: bool
    """Whether the optimizer's coefficients are matrices."""


@dataclass(frozen=True, slots=True)
class _StateTensor:
    """A tensor of the optimizer, as its last update left it."""

    parameter: RecordedParameter
    name: str
    value: Tensor
    version: int
    """PyTorch's count of its changes."""

    def is_same(self, other: _StateTensor) -> bool:
        """Whether the other is the very same tensor, unchanged, of the same parameter."""
        return self.value is other.value and self.version == other.version and self.parameter is other.parameter


class OptimizerWatch:
    """The recorded parameters of one optimizer."""

    def __init__(self, optimizer: Optimizer, recorded: Mapping[int, RecordedParameter]):
        """recorded: all recorded parameters by their id; there may be more of them later."""
        self._optimizer = optimizer
        self._recorded = recorded
        self._replay = replay_for(optimizer)
        self._count = -1
        """How many parameters were recorded when those of this optimizer were last listed, …"""
        self._groups: list[dict[str, Any]] = []
        """… its groups, …"""
        self._listed: list[Tensor] = []
        """… and all its parameters, recorded or not."""
        self.others: list[Tensor] = []
        """Those that are not recorded."""
        self.parts: list[tuple[dict[str, Any], list[RecordedParameter]]] = []
        """The recorded parameters of each group, …"""
        self.recorded: list[RecordedParameter] = []
        """… and of all groups."""
        self._state_tensors: list[_StateTensor] = []
        """The optimizer's tensors after its last update."""
        self._gradient_edits: list[RecordedParameter] = []
        """The parameters whose gradients were changed between the audit and the last update."""

    @property
    def kind(self) -> str:
        """The name of its recursion, or of its class if it has none."""
        return self._replay.kind if self._replay else type(self._optimizer).__name__

    @property
    def is_elementwise(self) -> bool:
        """Whether its coefficients are matrices."""
        return self._replay is not None and self._replay.is_elementwise

    def unscaled(self) -> float:
        """What it multiplies gradients by first: a loss scaler may leave the division to a fused optimizer."""
        scale = getattr(self._optimizer, "grad_scale", None)
        return 1 / float(scale or 1.0)

    def refresh(self) -> bool:
        """List its parameters again if a group, a parameter or a layer is new (load_state_dict makes new groups); gives whether one is."""
        groups = self._optimizer.param_groups
        listed = list(chain.from_iterable([group["params"] for group in groups]))
        if self._count == len(self._recorded) and _are_same(self._groups, groups) and _are_same(self._listed, listed):
            return False
        self.parts = [
            (group, [self._recorded[id(one)] for one in group["params"] if id(one) in self._recorded])
            for group in groups
        ]
        self.recorded = [parameter for _, of_group in self.parts for parameter in of_group]
        self.others = [one for one in listed if id(one) not in self._recorded]
        self._state_tensors = [one for one in self._state_tensors if one.parameter in self.recorded]
        self._count = len(self._recorded)
        self._groups = list(groups)
        self._listed = listed
        return True

    def states(self) -> list[dict[str, Any]]:
        """The optimizer's state of each recorded parameter."""
        return [self._optimizer.state.get(parameter.tensor, {}) for parameter in self.recorded]

    def settings(self) -> list[Numbers]:
        """The numbers by which the coming update is made, of each recorded parameter."""
        states = self.states()
        if self._replay is None:
            return [{} for _ in states]
        settings: list[Numbers] = []
        for group, recorded in self.parts:
            first = len(settings)
            of_group = states[first : first + len(recorded)]
            shared, owns = self._replay.read(group, of_group, [one.tensor for one in recorded])
            settings += [{**shared, **own} for own in owns]
        return settings

    def parameters(self) -> Iterator[WatchedParameter]:
        """Its recorded parameters, with its state of them."""
        names = () if self._replay is None else self._replay.state
        for parameter, state in zip(self.recorded, self.states(), strict=True):
            tensors = {name: value for name in names if isinstance(value := state.get(name), Tensor)}
            counters = {name: float(state[name]) for name in COUNTED_AS if self._replay is not None and name in state}
            yield WatchedParameter(parameter, self.kind, names, tensors, counters, self.is_elementwise)

    def gradients(self) -> Gradients:
        """The gradients that the coming update is made of.

        Not those that the optimizer changes itself: fused ones count as a change what they only read, and SGD with Nesterov's momentum adds
        it to the gradient where it updates many parameters at a time.
        """
        return [
            (parameter, gradient, gradient._version)
            for group, recorded in self.parts
            if not (group.get("fused") or group.get("nesterov"))
            for parameter in recorded
            if (gradient := parameter.tensor.grad) is not None
        ]

    def remember(self) -> dict[int, float]:
        """Remember parameters and state as they are now; gives a fingerprint of each parameter, by its number."""
        self._state_tensors = self._tensors_now()
        for parameter in self.recorded:
            parameter.remember()
        return {parameter.number: parameter.fingerprint for parameter in self.recorded}

    def remember_after(self, gradients: Gradients) -> dict[int, float]:
        """The same after an update that was audited with these gradients."""
        self._gradient_edits = [parameter for parameter, gradient, version in gradients if gradient._version != version]
        return self.remember()

    def edits(self) -> Edits:
        """What has changed since the last update."""
        if self._replay is None:
            # No dual form is claimed, and some of these optimizers move the weights between steps (schedule-free ones do)
            return {}
        found = {parameter.name: (parameter, EDITED) for parameter in self.recorded if parameter.changed()}
        for parameter in self._replaced_states():
            found.setdefault(parameter.name, (parameter, REPLACED))
        for parameter in self._gradient_edits:
            found[parameter.name] = (parameter, EDITED_GRADIENT)
        return found

    def _tensors_now(self) -> list[_StateTensor]:
        if self._replay is None:
            return []
        return [
            _StateTensor(parameter, name, value, value._version)
            for parameter, state in zip(self.recorded, self.states(), strict=True)
            for name in self._replay.state
            if isinstance(value := state.get(name), Tensor)
        ]

    def _replaced_states(self) -> Iterator[RecordedParameter]:
        """The parameters whose optimizer state is not what the last update left: other tensors, changed, new or gone."""
        now = self._tensors_now()
        if len(now) == len(self._state_tensors) and all(map(_StateTensor.is_same, now, self._state_tensors)):
            return
        known = {(one.parameter, one.name): one for one in self._state_tensors}
        for one in now:
            before = known.pop((one.parameter, one.name), None)
            if before is None or not one.is_same(before):
                yield one.parameter
        if self.is_elementwise:  # SGD begins afresh without its buffer, which is written down
            yield from (parameter for parameter, _ in known)


class EditWatch:
    """The recorded parameters of all optimizers."""

    def __init__(self, optimizers: Sequence[Optimizer], recorded: Mapping[int, RecordedParameter]):
        self._optimizers = [OptimizerWatch(optimizer, recorded) for optimizer in optimizers]
        self._regrouped = False
        """Whether an optimizer has other parameters than when shared ones were last refused."""

    def __getitem__(self, number: int) -> OptimizerWatch:
        watch = self._optimizers[number]
        self._regrouped |= watch.refresh()
        return watch

    def __iter__(self) -> Iterator[OptimizerWatch]:
        return (self[number] for number in range(len(self._optimizers)))

    def refuse_shared(self) -> None:
        """Refuse parameters that several optimizers update: a dual form holds for one."""
        watches = list(self)
        if not self._regrouped:
            return
        seen: set[str] = set()
        for parameter in (parameter for watch in watches for parameter in watch.recorded):
            if parameter.name in seen:
                raise RecordingError(
                    f"{parameter.name!r} is in two of the recorded optimizers, and a dual form holds for the updates of one. Give each "
                    f"parameter to one of them; if one takes over from the other, close the recording and go on with "
                    f"record(model, other, path, resume=True)."
                )
            seen.add(parameter.name)
        self._regrouped = False

    def parameters(self) -> Iterator[WatchedParameter]:
        """All recorded parameters, with the optimizers' state of them."""
        for watch in self:
            yield from watch.parameters()

    def edits(self) -> Edits:
        """What has changed since the last update."""
        found: Edits = {}
        for watch in self:
            found |= watch.edits()
        return found

    def remember(self) -> dict[int, float]:
        """Remember everything as it is now; gives a fingerprint of each parameter, by its number."""
        fingerprints: dict[int, float] = {}
        for watch in self:
            fingerprints |= watch.remember()
        return fingerprints


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether these are the very same objects."""
    return len(some) == len(others) and all(map(is_, some, others))
