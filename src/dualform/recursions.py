"""What an optimizer makes of each gradient: one update of each kind, as a linear map.

Every optimizer here does this to a parameter W with one running average m (momentum):

    g' = sign·g + decay·W;   m ← keep·m + take·g';   W ← shrink·W − direct·g' − through·m

For SGD all of these are numbers, so one walk backwards over the settings gives the coefficient of every step. For the Adam
family some of them are matrices that depend on past gradients (√v̂ and the like): given those, it is linear all the same.
The tensors they depend on are called shared, since a mask leaves them as they were.

A weight is at rest as long as it has had no gradient (v = 0) and updates leave it as it is, most often because it is exactly 0.
`direct` and `through` then multiply zeros, so they are free to choose. The formulas make them about lr / ε, so that under coupled decay
everything before would be multiplied by 1 − lr·decay / ε in each step, perhaps by −1,000, until it is no number any more. `at_rest`
makes them 0 instead: slots whose gradients cancel exactly in such a weight have written nothing to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Settings = Mapping[str, float]
Factor = float | Tensor


@dataclass(frozen=True)
class Inverse:
    """number / matrix: divided by where it is used, which takes no pass of its own."""

    number: float
    matrix: Tensor

    def __rmul__(self, other: Factor) -> Tensor:
        return other * self.number / self.matrix

    def __mul__(self, number: float) -> Inverse:
        return Inverse(self.number * number, self.matrix)


@dataclass(frozen=True)
class Linear:
    """One update as a linear map."""

    keep: float
    take: Factor | Inverse
    direct: Factor | Inverse
    through: Factor | Inverse
    sign: float = 1.0
    decay: float = 0.0
    shrink: float = 1.0

    def apply(self, weight: Tensor, average: Tensor, gradient: Tensor | None) -> None:
        """Go one step on, in place. gradient: None for the initial part, which gets none."""
        if gradient is None:
            pushed = weight * self.decay if self.decay else None
        else:
            pushed = gradient if self.sign > 0 else -gradient
            pushed = pushed.add(weight, alpha=self.decay) if self.decay else pushed
        if pushed is not None and isinstance(self.take, float) and self.take == 1.0 - self.keep:
            average.lerp_(pushed, self.take)  # in one pass, as PyTorch's Adam does it
        else:
            _scale(average, self.keep)
            _add(average, self.take, pushed)
        _scale(weight, self.shrink)
        _add(weight, self.direct, pushed, -1.0)
        _add(weight, self.through, average, -1.0)

    def carry(self, weight: Factor, average: Factor) -> tuple[Factor, Factor]:
        """Like apply without a gradient, not in place; what is a number stays one as long as no matrix meets it."""
        pushed = _times(weight, self.decay)
        average = _plus(_times(average, self.keep), self.take, pushed)
        weight = _plus(_times(weight, self.shrink), self.direct, pushed, -1.0)
        return _plus(weight, self.through, average, -1.0), average

    def back(self, p: Factor, q: Factor) -> tuple[Factor, Factor, Factor]:
        """X = p·W + q·m after this update → the coefficient of its gradient, and p, q before it."""
        r = q - p * self.through
        h = r * self.take - p * self.direct
        before = p * self.shrink + h * self.decay if self.decay else (p if self.shrink == 1.0 else p * self.shrink)
        return h if self.sign < 0 else -h, before, r * self.keep


def _scale(tensor: Tensor, factor: float) -> None:
    if factor != 1.0:
        tensor.mul_(factor) if factor else tensor.zero_()


def _add(tensor: Tensor, factor: Factor | Inverse, other: Tensor | None, sign: float = 1.0) -> None:
    if other is None:
        return
    if isinstance(factor, Inverse):
        tensor.addcdiv_(other, factor.matrix, value=sign * factor.number)
    elif isinstance(factor, Tensor):
        tensor.addcmul_(factor, other, value=sign)
    elif factor:
        tensor.add_(other, alpha=sign * factor)


TINY = 1e-30
"""A number below it is taken for 0: nothing is left of it in any sum, and float32's smallest numbers are slow."""


def _times(one: Factor, number: float) -> Factor:
    if isinstance(one, Tensor) and number:
        return one if number == 1.0 else one * number
    return 0.0 if isinstance(one, Tensor) or abs(one * number) < TINY else one * number


def _plus(one: Factor, factor: Factor | Inverse, other: Factor, sign: float = 1.0) -> Factor:
    """one + sign·factor·other, in one go over the matrices."""
    if isinstance(factor, Inverse):
        return _plus_inverse(one, factor, other, sign)
    if isinstance(factor, Tensor) and isinstance(other, Tensor):
        if isinstance(one, Tensor):
            return torch.addcmul(one, factor, other, value=sign)
        return one + sign * factor * other
    # At most one of the two is a matrix
    number, matrix = (other, factor) if isinstance(other, float) else (factor, other)
    if 0.0 in (number, matrix if isinstance(matrix, float) else 1.0):
        return one
    if isinstance(one, Tensor) and isinstance(matrix, Tensor):
        return torch.add(one, matrix, alpha=sign * float(number))
    return one + matrix * (sign * number)


def _plus_inverse(one: Factor, factor: Inverse, other: Factor, sign: float) -> Factor:
    if isinstance(other, float) and other == 0.0:
        return one
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.addcdiv(one, other, factor.matrix, value=sign * factor.number)
    return one + sign * (other * factor)


Filled = tuple[float, Factor | Inverse, Factor | Inverse, Factor | Inverse]
Update = Callable[[Settings, dict[str, Tensor], Tensor | None, Tensor | None], Filled]
"""(settings, shared, g', room) → keep, take, direct, through; shared goes one step on, in place. room: memory for a matrix."""


@dataclass(frozen=True)
class Kind:
    """One kind of optimizer."""

    update: Update
    average: str | None
    """The name of m among the optimizer's state."""
    shared: tuple[str, ...] = ()

    @property
    def elementwise(self) -> bool:
        """Whether coefficients are matrices."""
        return bool(self.shared)

    @property
    def state(self) -> tuple[str, ...]:
        """All state tensors."""
        return (*([self.average] if self.average else []), *self.shared)

    def linear(
        self, settings: Settings, shared: dict[str, Tensor], pushed: Tensor | None, room: Tensor | None = None
    ) -> Linear:
        """This update; `shared` goes one step on. pushed: g' = sign·gradient + decay·weight.

        room: memory like the weight, for who needs an update only until the next one: fresh pages cost more than what is
        computed in them.
        """
        keep, take, direct, through = self.update(settings, shared, pushed, room)
        sign, decay, shrink = outer(settings)
        return Linear(keep, take, direct, through, sign, decay, shrink)


def outer(settings: Settings) -> tuple[float, float, float]:
    """sign, decay and shrink: what every optimizer has."""
    decay = settings["weight_decay"]
    decoupled = bool(settings.get("decoupled", 0.0))
    sign = -1.0 if settings["maximize"] else 1.0
    return sign, 0.0 if decoupled else decay, 1.0 - settings["lr"] * decay if decoupled else 1.0


SMALL_EPS = 1e-20
"""lr / ε of a smaller one may leave the range of float32."""


def may_blow_up(settings: Settings) -> bool:
    """Whether coefficients of weights at rest may become too large for any number, so that they must be told apart."""
    _, decay, _ = outer(settings)
    return decay != 0 or settings.get("eps", 1.0) < SMALL_EPS


def _sgd(s: Settings, shared: dict[str, Tensor], g: Tensor | None, room: Tensor | None) -> Filled:
    if s["momentum"] == 0:
        return 1.0, 0.0, s["lr"], 0.0
    keep, take = (0.0, 1.0) if s["fresh"] else (s["momentum"], 1 - s["dampening"])
    return (keep, take, s["lr"], s["lr"] * s["momentum"]) if s["nesterov"] else (keep, take, 0.0, s["lr"])


def _squares(s: Settings, shared: dict[str, Tensor], g: Tensor, name: str, rate: float) -> Tensor:
    return shared[name].mul_(rate).addcmul_(g, g, value=1 - rate)


def _inverse(number: float, squares: Tensor, eps: float, room: Tensor | None) -> Inverse:
    """number / (√squares + ε)."""
    return Inverse(number, torch.sqrt(squares, out=room).add_(eps))


def _adam(s: Settings, shared: dict[str, Tensor], g: Tensor | None, room: Tensor | None) -> Filled:
    assert g is not None
    squares = _squares(s, shared, g, "exp_avg_sq", s["beta2"])
    if s["amsgrad"]:
        squares = torch.maximum(shared["max_exp_avg_sq"], squares, out=shared["max_exp_avg_sq"])
    size, eps = adam_numbers(s)
    return s["beta1"], 1 - s["beta1"], 0.0, _inverse(size, squares, eps, room)


def adam_numbers(s: Settings) -> tuple[float, float]:
    """size and ε of Adam's size·m / (√v + ε); what it corrects in its first steps is in them."""
    root = math.sqrt(1 - s["beta2"] ** s["count"])
    return s["lr"] / (1 - s["beta1"] ** s["count"]) * root, s["eps"] * root


def nadam_momentum(s: Settings, count: float) -> float:
    """NAdam's momentum warms up."""
    return float(s["beta1"]) * float(1.0 - 0.5 * 0.96 ** (count * s["momentum_decay"]))


def _nadam(s: Settings, shared: dict[str, Tensor], g: Tensor | None, room: Tensor | None) -> Filled:
    assert g is not None
    squares = _squares(s, shared, g, "exp_avg_sq", s["beta2"])
    root = math.sqrt(1 - s["beta2"] ** s["count"])
    inverse = _inverse(root, squares, s["eps"] * root, room)
    now, coming = (nadam_momentum(s, count) for count in (s["count"], s["count"] + 1))
    product = s["mu_product"]
    direct = s["lr"] * (1 - now) / (1 - product)
    through = s["lr"] * coming / (1 - product * coming)
    return s["beta1"], 1 - s["beta1"], inverse * direct, inverse * through


def _radam(s: Settings, shared: dict[str, Tensor], g: Tensor | None, room: Tensor | None) -> Filled:
    assert g is not None
    squares = _squares(s, shared, g, "exp_avg_sq", s["beta2"])
    rest = 1 - s["beta2"] ** s["count"]
    size = s["lr"] / (1 - s["beta1"] ** s["count"])
    most = 2 / (1 - s["beta2"]) - 1
    now = most - 2 * s["count"] * s["beta2"] ** s["count"] / rest
    if now <= 5:
        return s["beta1"], 1 - s["beta1"], 0.0, size
    rectified = math.sqrt((now - 4) * (now - 2) * most / ((most - 4) * (most - 2) * now))
    return s["beta1"], 1 - s["beta1"], 0.0, _inverse(size * rectified * math.sqrt(rest), squares, s["eps"], room)


def _adagrad(s: Settings, shared: dict[str, Tensor], g: Tensor | None, room: Tensor | None) -> Filled:
    assert g is not None
    squares = shared["sum"].addcmul_(g, g)
    return 1.0, 0.0, _inverse(s["lr"] / (1 + (s["count"] - 1) * s["lr_decay"]), squares, s["eps"], room), 0.0


def _rmsprop(s: Settings, shared: dict[str, Tensor], g: Tensor | None, room: Tensor | None) -> Filled:
    assert g is not None
    squares = _squares(s, shared, g, "square_avg", s["alpha"])
    if s["centered"]:
        mean = shared["grad_avg"].lerp_(g, 1 - s["alpha"])
        squares = squares.addcmul(mean, mean, value=-1)
    if s["momentum"] > 0:
        return s["momentum"], _inverse(1.0, squares, s["eps"], room), 0.0, s["lr"]
    return 1.0, 0.0, _inverse(s["lr"], squares, s["eps"], room), 0.0


def _adadelta(s: Settings, shared: dict[str, Tensor], g: Tensor | None, room: Tensor | None) -> Filled:
    assert g is not None
    squares = _squares(s, shared, g, "square_avg", s["rho"])
    ratio = shared["acc_delta"].add(s["eps"]).sqrt_().div_(squares.add(s["eps"]).sqrt_())
    moved = ratio * g
    _squares(s, shared, moved, "acc_delta", s["rho"])
    return 1.0, 0.0, ratio.mul_(s["lr"]), 0.0


def _adamax(s: Settings, shared: dict[str, Tensor], g: Tensor | None, room: Tensor | None) -> Filled:
    assert g is not None
    largest = shared["exp_inf"].mul_(s["beta2"])
    torch.maximum(largest, g.abs().add_(s["eps"]), out=largest)
    size = s["lr"] / (1 - s["beta1"] ** s["count"])
    return s["beta1"], 1 - s["beta1"], 0.0, Inverse(size, largest if room is not None else largest.clone())


KINDS: dict[str, Kind] = {
    "sgd": Kind(_sgd, "momentum_buffer"),
    "adam": Kind(_adam, "exp_avg", ("exp_avg_sq", "max_exp_avg_sq")),
    "nadam": Kind(_nadam, "exp_avg", ("exp_avg_sq",)),
    "radam": Kind(_radam, "exp_avg", ("exp_avg_sq",)),
    "adagrad": Kind(_adagrad, None, ("sum",)),
    "rmsprop": Kind(_rmsprop, "momentum_buffer", ("square_avg", "grad_avg")),
    "adadelta": Kind(_adadelta, None, ("square_avg", "acc_delta")),
    "adamax": Kind(_adamax, "exp_avg", ("exp_inf",)),
}


def at_rest(
    linear: Linear,
    kind: Kind,
    settings: Settings,
    shared: Mapping[str, Tensor],
    now: tuple[Tensor, Tensor],
    gradient: Tensor,
) -> Linear:
    """The same update with factors of 0 where the weight is at rest.

    shared: after the update. now: weight and average before it, in the training as it was; gradient: the one that the optimizer saw.
    """
    if not may_blow_up(settings):
        return linear
    weight, average = now
    resting = torch.ones_like(weight, dtype=torch.bool)
    for name in kind.shared:
        # Adamax divides by no less than ε: a weight without gradients has about that
        smallest = 2 * settings["eps"] if name == "exp_inf" else 0.0
        resting &= shared[name].abs() <= smallest
    if not resting.any():
        return linear
    moved = weight.clone()
    moved_average = average.clone()
    linear.apply(moved, moved_average, gradient)
    resting &= moved == weight
    take, direct, through = (_zeroed(factor, resting) for factor in (linear.take, linear.direct, linear.through))
    return replace(linear, take=take, direct=direct, through=through)


def _zeroed(factor: Factor | Inverse, elements: Tensor) -> Factor | Inverse:
    """A matrix with zeros in some elements. Numbers, which are the same for all of them, stay."""
    if isinstance(factor, Inverse):
        return Inverse(factor.number, factor.matrix.masked_fill(elements, math.inf))
    return factor.masked_fill(elements, 0.0) if isinstance(factor, Tensor) else factor


@dataclass(frozen=True)
class Walked:
    """X_T = a·W_0 + b·m_0 − Σ_s c_s·gradient_s, where X is the parameter or its running average."""

    a: float
    b: float
    c: Floats


@dataclass(frozen=True)
class Updates:
    """Updates of one parameter, one after the other."""

    kind: str
    steps: Ints
    """(updates,)"""
    settings: dict[str, Floats]
    """(updates,) each."""
    factors: Floats
    """(updates, backward passes), 0 where there was none."""

    def at(self, place: int) -> dict[str, float]:
        """The settings of one update."""
        return {name: float(values[place]) for name, values in self.settings.items()}

    def walked(self, of: str = "weight", later: Walked | None = None) -> Walked:
        """What becomes of their beginning and of their gradients; see walk_back."""
        return walk_back(self.kind, self.settings, len(self.steps), of, later)


def walk_back(
    kind: str, settings: Mapping[str, Floats], updates: int, of: str = "weight", later: Walked | None = None
) -> Walked:
    """The coefficients of an optimizer whose coefficients are numbers. settings: one number for each update.

    later: what becomes of the end of these updates, if X is asked for at a later time.
    """
    assert not KINDS[kind].elementwise
    c = np.zeros(updates)
    columns = {name: values.tolist() for name, values in settings.items()}
    p, q = (1.0, 0.0) if of == "weight" else (0.0, 1.0)
    if later is not None:
        p = later.a
        q = later.b
    for s in range(updates - 1, -1, -1):
        one = KINDS[kind].linear({name: values[s] for name, values in columns.items()}, {}, None)
        c[s], p, q = one.back(p, q)  # type: ignore[assignment]
    return Walked(p, q, c)
