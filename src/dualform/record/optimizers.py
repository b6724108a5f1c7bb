"""What is read from an optimizer at each step. Its mathematics is in recursions.py, under the same name.

A new optimizer is one line in OPTIMIZERS here (in NAMED, if it is not PyTorch's), with a function of its own if it has unusual numbers, and one
function and one line there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.errors import OptimizerError
from dualform.record.fixed_weights import FixedWeights
from dualform.record.trial import follows
from dualform.recursions import KINDS, nadam_momentum

Numbers = dict[str, float]


State = Mapping[str, Any]


def _nothing(numbers: Numbers, states: Sequence[State], parameters: Sequence[Tensor]) -> list[Numbers]:
    return [{} for _ in states]


@dataclass(frozen=True)
class Replay:
    """How an optimizer is written down: the settings of a step, and the state tensors it carries."""

    kind: str
    shared: Callable[[dict[str, Any]], Numbers]
    """Of a group → numbers that all its parameters share."""
    own: Callable[[Numbers, Sequence[State], Sequence[Tensor]], list[Numbers]] = _nothing
    """Of these, and of some parameters with their states before the step → numbers of each one's own."""

    def read(self, group: dict[str, Any], states: Sequence[State], parameters: Sequence[Tensor]) -> list[Numbers]:
        """The numbers of a group's updates, one dictionary for each of its parameters. states: theirs, before the step."""
        shared = self.shared(group)
        return [{**shared, **own} for own in self.own(shared, states, parameters)]

    @property
    def is_elementwise(self) -> bool:
        """Whether coefficients are matrices: an update is not linear in the gradient as a whole."""
        return KINDS[self.kind].elementwise

    @property
    def state(self) -> tuple[str, ...]:
        """The state tensors that belong to the initial part."""
        return KINDS[self.kind].state


def _numbers(*names: str) -> Callable[[dict[str, Any]], Numbers]:
    wanted = ("lr", "weight_decay", "maximize", *names)
    return lambda group: {name: float(group[name]) for name in wanted}


def _betas(*names: str) -> Callable[[dict[str, Any]], Numbers]:
    numbers = _numbers("eps", *names)

    def read(group: dict[str, Any]) -> Numbers:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        decoupled = float(group.get("decoupled_weight_decay", False))
        return {**numbers(group), "beta1": beta1, "beta2": beta2, "decoupled": decoupled}

    return read


_adam = _betas("amsgrad")


def _adamw(group: dict[str, Any]) -> Numbers:
    return {**_adam(group), "decoupled": 1.0}  # older versions of PyTorch have no flag for it


def _fresh(numbers: Numbers, states: Sequence[State], parameters: Sequence[Tensor]) -> list[Numbers]:
    return [{"fresh": 1.0 if state.get("momentum_buffer") is None else 0.0} for state in states]


def _count(numbers: Numbers, states: Sequence[State], parameters: Sequence[Tensor]) -> list[Numbers]:
    """The number of this update, from 1."""
    return [{"count": float(state.get("step", 0)) + 1} for state in states]


def _nadam(numbers: Numbers, states: Sequence[State], parameters: Sequence[Tensor]) -> list[Numbers]:
    own = _count(numbers, states, parameters)
    for one, state in zip(own, states, strict=True):
        product = state.get("mu_product", torch.ones(()))  # PyTorch rounds it to its own type
        one["mu_product"] = float(product * nadam_momentum(numbers, one["count"]))
    return own


def _lion(group: dict[str, Any]) -> Numbers:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    numbers = {name: float(group.get(name, 0.0)) for name in ("lr", "weight_decay", "maximize")}
    return {**numbers, "beta1": beta1, "beta2": beta2, "decoupled": 1.0}


_FLOOR_OF_TYPE = -1.0
"""PyTorch's Adafactor divides by no less than ε of the parameter's type, if it is told nothing else."""


def _adafactor(group: dict[str, Any]) -> Numbers:
    floor, smallest_scale = group["eps"]
    return {
        **_numbers("beta2_decay")(group),
        "floor": _FLOOR_OF_TYPE if floor is None else float(floor),
        "smallest_scale": float(smallest_scale),
        "clip": float(group["d"]),
        "decoupled": 1.0,
    }


def _steps_of_adafactor(numbers: Numbers, states: Sequence[State], parameters: Sequence[Tensor]) -> list[Numbers]:
    own = _count(numbers, states, parameters)
    for one, parameter in zip(own, parameters, strict=True):
        scale = max(numbers["smallest_scale"], _root_mean_square(parameter))
        one["rate"] = one["count"] ** numbers["beta2_decay"]
        one["step_size"] = scale * min(numbers["lr"], one["count"] ** -0.5)
        if numbers["floor"] == _FLOOR_OF_TYPE:
            one["floor"] = torch.finfo(parameter.dtype).eps
    return own


def _fairseq_adafactor(group: dict[str, Any]) -> Numbers:
    floor, smallest_scale = group["eps"]
    beta1 = group["beta1"]
    return {
        "lr": float(group["lr"] or 0.0),
        "weight_decay": float(group["weight_decay"]),
        "maximize": 0.0,
        "decoupled": 1.0,
        "decay_rate": float(group["decay_rate"]),
        "floor": float(floor),
        "smallest_scale": float(smallest_scale) if group["scale_parameter"] else 0.0,
        "clip": float(group["clip_threshold"]),
        "relative_step": float(group["relative_step"]),
        "warmup_init": float(group["warmup_init"]),
        "averages": 0.0 if beta1 is None else 1.0,
        "beta1": float(beta1 or 0.0),
    }


def _steps_of_fairseq_adafactor(
    numbers: Numbers, states: Sequence[State], parameters: Sequence[Tensor]
) -> list[Numbers]:
    own = _count(numbers, states, parameters)
    for one, parameter in zip(own, parameters, strict=True):
        count = one["count"]
        lr = numbers["lr"]
        if numbers["relative_step"]:
            largest = 1e-6 * count if numbers["warmup_init"] else 1e-2
            lr = min(largest, count**-0.5)
        if numbers["smallest_scale"]:
            lr *= max(numbers["smallest_scale"], _root_mean_square(parameter))
        # Its decay goes with the size of the step, too
        one["lr"] = lr
        one["step_size"] = lr
        one["rate"] = count ** numbers["decay_rate"]
    return own


def _root_mean_square(parameter: Tensor) -> float:
    return float(parameter.detach().norm()) / math.sqrt(parameter.numel())


OPTIMIZERS: dict[type[Optimizer], Replay] = {
    torch.optim.SGD: Replay("sgd", _numbers("momentum", "dampening", "nesterov"), _fresh),
    torch.optim.AdamW: Replay("adam", _adamw, _count),
    torch.optim.Adam: Replay("adam", _adam, _count),
    torch.optim.NAdam: Replay("nadam", _betas("momentum_decay"), _nadam),
    torch.optim.RAdam: Replay("radam", _betas(), _count),
    torch.optim.Adagrad: Replay("adagrad", _numbers("eps", "lr_decay"), _count),
    torch.optim.RMSprop: Replay("rmsprop", _numbers("eps", "alpha", "centered", "momentum")),
    torch.optim.Adadelta: Replay("adadelta", _numbers("eps", "rho")),
    torch.optim.Adamax: Replay("adamax", _betas(), _count),
    torch.optim.Adafactor: Replay("adafactor", _adafactor, _steps_of_adafactor),
}
NAMED = {
    "Lion": Replay("lion", _lion),
    "Adafactor": Replay("fairseq adafactor", _fairseq_adafactor, _steps_of_fairseq_adafactor),
}
"""Optimizers of other libraries, by the names of their classes. Others may have the same name, so each is tried out (trial.py)."""
NOT_LINEAR = {
    "LBFGS": "it looks back over several gradients at once and may search along a line",
    "Rprop": "it uses the signs of gradients only",
    "Muon": "it makes each gradient orthogonal as a whole, so no slot has a part of its own",
    "Lion": "it is another Lion than those that are known, or keeps its average in fewer bits",
    "Adafactor": "it is another Adafactor than those that are known",
    "SparseAdam": "it skips elements whose gradient is not there",
    "FixedWeights": "nothing is trained",
    "ASGD": "it averages weights beside the recursion",
}


HOOKED = Optimizer.profile_hook_step(lambda: None).__code__
"""The code of the function that PyTorch wraps around every step(), for its hooks."""


def replay_for(optimizer: Optimizer) -> Replay | None:
    """The replay of an optimizer, or None: its update is not known to be a linear recursion."""
    for kind, replay in OPTIMIZERS.items():
        if type(optimizer) is kind or (isinstance(optimizer, kind) and _inherits_update(type(optimizer), kind)):
            return replay
    named = [NAMED[parent.__name__] for parent in type(optimizer).__mro__ if parent.__name__ in NAMED]
    if named and follows(optimizer, named[0], _without_hooks(type(optimizer).step)):
        return named[0]
    return None


def _inherits_update(subclass: type[Optimizer], kind: type[Optimizer]) -> bool:
    same_step = _without_hooks(subclass.step) is _without_hooks(kind.step)
    return same_step and getattr(subclass, "_init_group", None) is getattr(kind, "_init_group", None)


def _without_hooks(step: Any) -> Any:
    """The function that a class defines. PyTorch wraps it at the first instance, for a subclass that inherits it perhaps once more."""
    while getattr(step, "__code__", None) is HOOKED:
        step = step.__wrapped__
    return step


def unwrapped(optimizer: object) -> object:
    """The optimizer inside wrappers such as Accelerate's AcceleratedOptimizer or Lightning's LightningOptimizer."""
    inner = getattr(optimizer, "optimizer", None)
    return optimizer if inner is None else unwrapped(inner)


def optimizer_list(given: object) -> list[Optimizer]:
    """One optimizer or several, as a list, each without its wrappers."""
    optimizers: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    optimizers = [unwrapped(optimizer) for optimizer in optimizers]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise OptimizerError(
                f"record() got {type(optimizer).__name__!r} where it expected a torch.optim.Optimizer or a list of them."
            )
    if not optimizers:
        raise OptimizerError("record() got no optimizer: expected a torch.optim.Optimizer or a list of them.")
    return optimizers


def optimized_ids(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ids of all parameters that optimizers update."""
    return {
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    }


def why_not_replayed(name: str) -> str:
    """Why the updates of an optimizer of this class cannot be replayed."""
    return NOT_LINEAR.get(name, "its update is not known to be linear in the gradients")


def warn_not_replayed(optimizers: Iterable[Optimizer], *, stacklevel: int = 2) -> None:
    """Warn of optimizers whose updates cannot be replayed: their slots are recorded, but get no coefficients."""
    trained = [one for one in optimizers if not isinstance(one, FixedWeights)]
    for name in _not_replayed(trained):
        if name == "LBFGS":
            raise OptimizerError(
                "LBFGS computes several gradients within one step, so no slot belongs to its update. It is not recorded."
            )
        warnings.warn(
            f"{name} cannot be replayed ({why_not_replayed(name)}). Keys and error signals are recorded and checked against every "
            f"gradient; attention and influence can be asked. Contributions, masks and verify() of the weights need coefficients: "
            f"train with one of {', '.join(kind.__name__ for kind in OPTIMIZERS)} for those.",
            stacklevel=stacklevel,
        )


def refuse_not_replayed(optimizers: Iterable[Optimizer], what: str) -> None:
    """Refuse optimizers whose updates cannot be replayed, for recordings that need coefficients."""
    for name in _not_replayed(optimizers):
        raise OptimizerError(
            f"{what} needs coefficients, and {name} cannot be replayed ({why_not_replayed(name)}). Optimizers that can: "
            f'{", ".join(kind.__name__ for kind in OPTIMIZERS)}. Or keep="slots": attention and influence need no coefficients.'
        )


def refuse_some_rows(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers in which the update of a row depends on other rows, for recordings that keep some of them."""
    for optimizer in optimizers:
        replay = replay_for(optimizer)
        if replay is not None and KINDS[replay.kind].needs_all_rows:
            raise OptimizerError(
                f"outputs= keeps some rows of a weight, and {type(optimizer).__name__} scales each by all of them. Leave out outputs=, or "
                f"train with another optimizer."
            )


def _not_replayed(optimizers: Iterable[Optimizer]) -> list[str]:
    return [type(optimizer).__name__ for optimizer in optimizers if replay_for(optimizer) is None]
