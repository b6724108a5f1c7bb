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


TensorVersion = tuple[Tensor, int]
"""A tensor, and PyTorch's count of its changes."""


class OptimizerWatch:
    """The recorded parameters of one optimizer."""

    def __init__(self, optimizer: Optimizer, recorded: Mapping[int, RecordedParameter]):
        """recorded: all recorded parameters by their id; there may be more of them later."""
        self._optimizer = optimizer
        self._recorded = recorded
        self._replay = replay_for(optimizer)
        self._state_names: tuple[str, ...] = () if self._replay is None else self._replay.state
        """The tensors that it may have for each parameter."""
        self._count = -1
        """How many parameters were recorded when those of this optimizer were last listed, …"""
        self._groups: list[dict[str, Any]] = []
        """… its groups, …"""
        self._listed: list[Tensor] = []
        """… and all its parameters, recorded or not."""
        self.others: list[Tensor] = []
        """Those that are not recorded."""
        self.parts: list[tuple[dict[str, Any], list[RecordedParameter]]] = []
        """The groups, each with its recorded parameters, …"""
        self.recorded: list[RecordedParameter] = []
        """… and of all groups."""
        self._state_tensors: dict[tuple[RecordedParameter, str], TensorVersion] = {}
        """The optimizer's tensors as its last update left them, by parameter and name."""
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
        """List its parameters again if a group, a parameter or a layer is new (load_state_dict makes new groups). Returns whether one is."""
        groups = self._optimizer.param_groups
        listed = list(chain.from_iterable(group["params"] for group in groups))
        are_same = _are_same(self._groups, groups) and _are_same(self._listed, listed)
        if are_same and self._count == len(self._recorded):
            return False
        self._count = len(self._recorded)
        self._groups = list(groups)
        self._listed = listed
        self._split()
        return True

    def _split(self) -> None:
        """Tell the parameters that are recorded from the others."""
        self.parts = []
        self.recorded = []
        for group in self._groups:
            recorded = [self._recorded[id(tensor)] for tensor in group["params"] if id(tensor) in self._recorded]
            self.parts.append((group, recorded))
            self.recorded += recorded
        self.others = [tensor for tensor in self._listed if id(tensor) not in self._recorded]
        for parameter, name in list(self._state_tensors):
            if parameter not in self.recorded:
                del self._state_tensors[parameter, name]

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
            own_states = states[first : first + len(recorded)]
            tensors = [parameter.tensor for parameter in recorded]
            settings += self._replay.read(group, own_states, tensors)
        return settings

    def parameters(self) -> Iterator[WatchedParameter]:
        """Its recorded parameters, with its state of them."""
        for parameter, state in zip(self.recorded, self.states(), strict=True):
            counters = {}
            for name in COUNTED_AS:
                if self._replay is not None and name in state:
                    counters[name] = float(state[name])
            yield WatchedParameter(
                parameter=parameter,
                kind=self.kind,
                names=self._state_names,
                tensors=self._tensors_of(state),
                counters=counters,
                is_elementwise=self.is_elementwise,
            )

    def gradients(self) -> Gradients:
        """The gradients that the coming update is made of.

        Not those that the optimizer changes itself: fused ones count as a change what they only read, and SGD with Nesterov's momentum adds
        it to the gradient where it updates many parameters at a time.
        """
        gradients = []
        for group, recorded in self.parts:
            if group.get("fused") or group.get("nesterov"):
                continue
            for parameter in recorded:
                gradient = parameter.tensor.grad
                if gradient is not None:
                    gradients.append((parameter, gradient, gradient._version))
        return gradients

    def remember(self) -> dict[int, float]:
        """Remember parameters and state as they are now; gives a fingerprint of each parameter, by its number."""
        self._state_tensors = self._state_tensors_now()
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
        edits = {parameter.name: (parameter, EDITED) for parameter in self.recorded if parameter.changed()}
        for parameter in self._replaced_states():
            edits.setdefault(parameter.name, (parameter, REPLACED))
        for parameter in self._gradient_edits:
            edits[parameter.name] = (parameter, EDITED_GRADIENT)
        return edits

    def _tensors_of(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors that it has for one parameter."""
        tensors = {}
        for name in self._state_names:
            value = state.get(name)
            if isinstance(value, Tensor):
                tensors[name] = value
        return tensors

    def _state_tensors_now(self) -> dict[tuple[RecordedParameter, str], TensorVersion]:
        now = {}
        for parameter, state in zip(self.recorded, self.states(), strict=True):
            for name, tensor in self._tensors_of(state).items():
                now[parameter, name] = (tensor, tensor._version)
        return now

    def _replaced_states(self) -> Iterator[RecordedParameter]:
        """The parameters whose optimizer state is not what the last update left: other tensors, changed, new or gone."""
        now = self._state_tensors_now()
        for key, (tensor, version) in now.items():
            before = self._state_tensors.get(key)
            if before is None or before[0] is not tensor or before[1] != version:
                yield key[0]
        if self.is_elementwise:  # SGD begins afresh without its buffer, which is written down
            for key in self._state_tensors:
                if key not in now:
                    yield key[0]


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
        recorded = [parameter for watch in self for parameter in watch.recorded]
        if not self._regrouped:
            return
        seen: set[str] = set()
        for parameter in recorded:
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
        edits: Edits = {}
        for watch in self:
            edits |= watch.edits()
        return edits

    def remember(self) -> dict[int, float]:
        """Remember everything as it is now; gives a fingerprint of each parameter, by its number."""
        fingerprints: dict[int, float] = {}
        for watch in self:
            fingerprints |= watch.remember()
        return fingerprints


def _are_same(objects: Sequence[object], others: Sequence[object]) -> bool:
    """Whether these are the very same objects."""
    return len(objects) == len(others) and all(map(is_, objects, others))
