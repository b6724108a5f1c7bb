"""Does an optimizer do what a recursion says? Those of other libraries are known by name alone, so they are tried out.

A twin of the optimizer, with its settings, makes a few updates of small parameters beside the recursion.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.recursions import KINDS, Kind, outer

SHAPES = ((3, 4), (2, 3, 4), (5,))
UPDATES = 4
TOLERANCE = 1e-4
"""How far two tensors may be apart, relative to the largest number in them."""

Numbers = dict[str, float]
State = Mapping[str, Any]
Step = Callable[[Optimizer], object]


class Replay(Protocol):
    """How an optimizer is written down (record/optimizers.py)."""

    @property
    def kind(self) -> str:
        """The name of the recursion."""

    def read(
        self,
        group: dict[str, Any],
        states: Sequence[State],
        parameters: Sequence[Tensor],
    ) -> list[Numbers]:
        """The numbers of an update of each parameter."""


def follows(optimizer: Optimizer, replay: Replay, step: Step) -> bool:
    """Whether an optimizer's updates, with the settings of each of its groups, are those that it would be written down as.

    step: the step() of its class.
    """
    kind = KINDS[replay.kind]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            twin = _twin(optimizer)
            beside = [_Beside(one, kind) for one in _parameters(twin)]
            return all(_same_update(twin, beside, replay, step) for _ in range(UPDATES))
    except Exception:  # whatever it stumbles over: it is none of those that we know
        return False


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _twin(optimizer: Optimizer) -> Optimizer:
    """An optimizer like another one, for parameters of its own. Nothing that it changes belongs to the other one."""
    twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        is_container = isinstance(value, (dict, list, set))
        vars(twin)[name] = copy.copy(value) if is_container else value
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": _small_parameters(group["params"])}
        for group in optimizer.param_groups
    ]  # fmt: skip
    return twin


def _small_parameters(parameters: Sequence[Tensor]) -> list[nn.Parameter]:
    """Parameters on the same device; of the same type, if it has 32 bits or more."""
    like = parameters[0]
    dtype = like.dtype if like.dtype == torch.float64 else torch.float32
    drawn = [torch.randn(shape) for shape in SHAPES]
    return [nn.Parameter(one.to(like.device, dtype)) for one in drawn]


class _Beside:
    """A parameter that the recursion updates, too."""

    def __init__(self, parameter: nn.Parameter, kind: Kind):
        self.parameter = parameter
        self._kind = kind
        self._weight = parameter.detach().clone()
        self._average = torch.zeros_like(self._weight)
        shapes = kind.shared_shapes(tuple(parameter.shape))
        self._shared = {
            name: self._weight.new_zeros(shape)
            for name, shape in shapes.items()
        }  # fmt: skip

    def update(self, settings: Numbers) -> None:
        """Do what the optimizer should do with the parameter's gradient."""
        gradient = self.parameter.grad
        assert gradient is not None
        sign, decay, _ = outer(settings)
        pushed = sign * gradient + decay * self._weight
        linear = self._kind.linear(settings, self._shared, pushed)
        linear.apply(self._weight, self._average, gradient)

    def is_as(self, state: State) -> bool:
        """Whether the optimizer has done the same, and keeps in its state what a snapshot needs."""
        expected = dict(self._shared)
        if self._kind.average is not None and self._average.any():
            expected[self._kind.average] = self._average
        is_same_weight = _is_near(self.parameter.detach(), self._weight)
        return is_same_weight and all(
            name in state and _is_near(state[name], tensor)
            for name, tensor in expected.items()
        )  # fmt: skip


def _is_near(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    difference = (found - expected).abs().max()
    largest = expected.abs().max()
    return bool(difference <= TOLERANCE * largest)


def _same_update(
    twin: Optimizer,
    beside: Sequence[_Beside],
    replay: Replay,
    step: Step,
) -> bool:
    """Do one update of all parameters in both ways."""
    for one in beside:
        random = torch.randn(one.parameter.shape)
        one.parameter.grad = random.to(one.parameter)
    settings: list[Numbers] = []
    for group in twin.param_groups:
        parameters = group["params"]
        states = [twin.state.get(one, {}) for one in parameters]
        settings += replay.read(group, states, parameters)
    for one, numbers in zip(beside, settings, strict=True):
        one.update(numbers)
    step(twin)
    return all(one.is_as(twin.state.get(one.parameter, {})) for one in beside)
