"""One update of each kind of optimizer, written as a linear map of the weight, its running average and the gradient.

Every optimizer here does this to a parameter W with one running average m (momentum):

    g' = sign·g + decay·W;   m ← keep·m + take·g';   W ← shrink·W − direct·g' − through·m

Lion updates the weight before the average: there `through` multiplies ahead·m + (1 − ahead)·g', with the m before the update.

For SGD all of these factors are numbers, so one walk backwards over the settings gives the coefficient of every step. For the Adam
family some are matrices that depend on past gradients (√v̂ and the like); given those matrices, the update is still linear.
The tensors that they depend on are called shared, because a mask does not change them.

A weight is at rest as long as it has had no gradient (v = 0) and updates do not change it, usually because it is exactly 0.
`direct` and `through` then multiply zeros, so any value will do. The formulas give about lr / ε, so that coupled decay would multiply
everything before by 1 − lr·decay / ε in each step, perhaps −1,000, until it overflows. `at_rest` makes them 0 instead:
slots whose gradients cancel exactly in such a weight have written nothing to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Floats, Ints

Settings = Mapping[str, float]
Shape = tuple[int, ...]
Factor = float | Tensor


@dataclass(frozen=True)
class Inverse:
    """number / matrix. Kept apart, so that no pass over memory is needed for the division alone."""

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
    ahead: float | None = None
    """If given, `through` is an Inverse and multiplies ahead·m + (1 − ahead)·g', with the m before the update; None: the m after it."""
    sign: float = 1.0
    decay: float = 0.0
    shrink: float = 1.0

    def apply(self, weight: Tensor, average: Tensor, gradient: Tensor | None) -> None:
        """Apply the update in place. gradient: None for the initial part, which has no gradients."""
        pushed = self._pushed(weight, gradient)
        early = None if self.ahead is None else mixed(average, pushed, self.ahead)
        advance(average, pushed, self.keep, self.take)
        _scale(weight, self.shrink)
        _add(weight, self.direct, pushed, -1.0)
        if early is None:
            _add(weight, self.through, average, -1.0)
        else:
            # Divided first, by its own size, so that a sign is exactly 1 even for the smallest numbers
            assert isinstance(self.through, Inverse)
            _add(weight, self.through.number, early.div_(self.through.matrix), -1.0)

    def _pushed(self, weight: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Return g', or None if it is zero."""
        if gradient is None:
            return weight * self.decay if self.decay else None
        signed = gradient if self.sign > 0 else -gradient
        return signed.add(weight, alpha=self.decay) if self.decay else signed

    def back(self, p: Factor, q: Factor) -> tuple[Factor, Factor, Factor]:
        """From X = p·W + q·m after this update, return c, p, q such that X = p·W + q·m − c·gradient before it."""
        moved = p * self.through
        if self.ahead is None:
            of_new_average = q - moved
            of_pushed = of_new_average * self.take - p * self.direct
            of_average = of_new_average * self.keep
        else:
            of_pushed = q * self.take - moved * (1 - self.ahead) - p * self.direct
            of_average = q * self.keep - moved * self.ahead
        of_weight = p if self.shrink == 1.0 else p * self.shrink
        if self.decay:
            of_weight = of_weight + of_pushed * self.decay
        coefficient = of_pushed if self.sign < 0 else -of_pushed
        return coefficient, of_weight, of_average


def advance(average: Tensor, pushed: Tensor | None, keep: float, take: Factor | Inverse) -> None:
    """Update an average in place: m ← keep·m + take·g'. pushed: g'; None: it is zero."""
    if pushed is not None and isinstance(take, float) and take == 1.0 - keep:
        average.lerp_(pushed, take)  # in one pass, as PyTorch's Adam does it
    else:
        _scale(average, keep)
        _add(average, take, pushed)


def mixed(average: Tensor, pushed: Tensor | None, ahead: float) -> Tensor:
    """Return ahead·m + (1 − ahead)·g'. pushed: g'; None: it is zero."""
    moving = average * ahead
    return moving if pushed is None else moving.add_(pushed, alpha=1 - ahead)


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


class Inputs(NamedTuple):
    """What the factors of an update depend on."""

    settings: Settings
    shared: dict[str, Tensor]
    """Their state before the update; an update changes them in place."""
    gradient: Tensor | None
    """g'; None for optimizers that do not need it."""
    buffer: Tensor | None
    """Memory for a matrix like the weight, which the next update may overwrite; None: new memory."""

    @property
    def pushed(self) -> Tensor:
        """g'."""
        assert self.gradient is not None
        return self.gradient

    def average_of_squares(self, name: str, rate: float) -> Tensor:
        """Add g' squared to a shared running average, and return it."""
        return _add_square(self.shared[name], self.pushed, rate)

    def inverse_root(self, number: float, squares: Tensor, eps: float) -> Inverse:
        """Return number / (√squares + ε)."""
        root = torch.sqrt(squares, out=self.buffer)
        return Inverse(number, root.add_(eps))


class Factors(NamedTuple):
    """The factors of an update that depend on the kind of optimizer; by default there is no running average. See Linear."""

    keep: float = 1.0
    take: Factor | Inverse = 0.0
    direct: Factor | Inverse = 0.0
    through: Factor | Inverse = 0.0
    ahead: float | None = None


@dataclass(frozen=True)
class Kind:
    """One kind of optimizer."""

    factors: Callable[[Inputs], Factors]
    average: str | None
    """The name of m among the optimizer's state."""
    shared: tuple[str, ...] = ()
    shapes: Callable[[Shape], dict[str, Shape]] | None = None
    """From a parameter's shape to the shapes of its shared tensors; None: they have the shape of the parameter."""

    @property
    def needs_all_rows(self) -> bool:
        """Whether the update of an element depends on other elements' gradients, so that single rows cannot be replayed."""
        return self.shapes is not None

    def shared_shapes(self, shape: Shape) -> dict[str, Shape]:
        """The shared tensors of a parameter of this shape, with their shapes."""
        return dict.fromkeys(self.shared, shape) if self.shapes is None else self.shapes(shape)

    @property
    def elementwise(self) -> bool:
        """Whether coefficients are matrices."""
        return bool(self.shared)

    @property
    def state(self) -> tuple[str, ...]:
        """The names of all state tensors, each once: Lion's average is shared as well."""
        return tuple(dict.fromkeys(name for name in (self.average, *self.shared) if name is not None))

    def linear(
        self, settings: Settings, shared: dict[str, Tensor], pushed: Tensor | None, room: Tensor | None = None
    ) -> Linear:
        """Return this update, and advance `shared` in place. pushed: g' = sign·gradient + decay·weight.

        room: memory like the weight, which the result may use until the next update. New memory costs more than the arithmetic.
        """
        factors = self.factors(Inputs(settings, shared, pushed, room))
        return Linear(*factors, *outer(settings))


def outer(settings: Settings) -> tuple[float, float, float]:
    """Return sign, coupled decay and shrink, which every optimizer has."""
    decay = settings["weight_decay"]
    sign = -1.0 if settings["maximize"] else 1.0
    if settings.get("decoupled", 0.0):
        return sign, 0.0, 1.0 - settings["lr"] * decay
    return sign, decay, 1.0


SMALL_EPS = 1e-20
"""With a smaller ε, lr / ε may leave the range of float32."""


def may_blow_up(settings: Settings) -> bool:
    """Whether coefficients of weights at rest may overflow, so that `at_rest` must find them."""
    _, decay, _ = outer(settings)
    return decay != 0 or settings.get("eps", 1.0) < SMALL_EPS


def _add_square(average: Tensor, values: Tensor, rate: float) -> Tensor:
    """average ← rate · average + (1 − rate) · values², in place."""
    return average.mul_(rate).addcmul_(values, values, value=1 - rate)


def _sgd(inputs: Inputs) -> Factors:
    settings = inputs.settings
    lr = settings["lr"]
    momentum = settings["momentum"]
    if momentum == 0:
        return Factors(direct=lr)
    # PyTorch's first average is the gradient itself
    is_fresh = bool(settings["fresh"])
    keep = 0.0 if is_fresh else momentum
    take = 1.0 if is_fresh else 1 - settings["dampening"]
    if settings["nesterov"]:
        return Factors(keep, take, direct=lr, through=lr * momentum)
    return Factors(keep, take, through=lr)


def _adam(inputs: Inputs) -> Factors:
    settings = inputs.settings
    beta1 = settings["beta1"]
    squares = inputs.average_of_squares("exp_avg_sq", settings["beta2"])
    if settings["amsgrad"]:
        largest = inputs.shared["max_exp_avg_sq"]
        squares = torch.maximum(largest, squares, out=largest)
    size, eps = adam_numbers(settings)
    return Factors(beta1, 1 - beta1, through=inputs.inverse_root(size, squares, eps))


def adam_numbers(settings: Settings) -> tuple[float, float]:
    """Return size and ε of Adam's update size·m / (√v + ε), with the bias correction of the first steps in both."""
    root = _root_of_correction(settings)
    return _corrected_lr(settings) * root, settings["eps"] * root


def _corrected_lr(settings: Settings) -> float:
    """Return lr with the bias correction of the first average."""
    correction: float = 1 - settings["beta1"] ** settings["count"]
    return settings["lr"] / correction


def _root_of_correction(settings: Settings) -> float:
    """Return the bias correction of √(average of squares)."""
    return math.sqrt(1 - settings["beta2"] ** settings["count"])


def nadam_momentum(settings: Settings, count: float) -> float:
    """Return NAdam's momentum at an update, which warms up."""
    warmth = 1.0 - 0.5 * 0.96 ** (count * settings["momentum_decay"])
    return float(settings["beta1"]) * float(warmth)


def _nadam(inputs: Inputs) -> Factors:
    settings = inputs.settings
    beta1 = settings["beta1"]
    count = settings["count"]
    squares = inputs.average_of_squares("exp_avg_sq", settings["beta2"])
    root = _root_of_correction(settings)
    inverse = inputs.inverse_root(root, squares, settings["eps"] * root)
    momentum = nadam_momentum(settings, count)
    next_momentum = nadam_momentum(settings, count + 1)
    product = settings["mu_product"]
    direct = settings["lr"] * (1 - momentum) / (1 - product)
    through = settings["lr"] * next_momentum / (1 - product * next_momentum)
    return Factors(beta1, 1 - beta1, inverse * direct, inverse * through)


def _radam(inputs: Inputs) -> Factors:
    settings = inputs.settings
    beta1 = settings["beta1"]
    beta2 = settings["beta2"]
    count = settings["count"]
    squares = inputs.average_of_squares("exp_avg_sq", beta2)
    size = _corrected_lr(settings)
    # ρ∞ and ρ of the paper: how many squares an average is made of, in the long run and now
    most = 2 / (1 - beta2) - 1
    now = most - 2 * count * beta2**count / (1 - beta2**count)
    if now <= 5:
        return Factors(beta1, 1 - beta1, through=size)
    rectified = math.sqrt((now - 4) * (now - 2) * most / ((most - 4) * (most - 2) * now))
    number = size * rectified * _root_of_correction(settings)
    return Factors(beta1, 1 - beta1, through=inputs.inverse_root(number, squares, settings["eps"]))


def _adagrad(inputs: Inputs) -> Factors:
    settings = inputs.settings
    squares = inputs.shared["sum"].addcmul_(inputs.pushed, inputs.pushed)
    lr = settings["lr"] / (1 + (settings["count"] - 1) * settings["lr_decay"])
    return Factors(direct=inputs.inverse_root(lr, squares, settings["eps"]))


def _rmsprop(inputs: Inputs) -> Factors:
    settings = inputs.settings
    lr = settings["lr"]
    eps = settings["eps"]
    momentum = settings["momentum"]
    squares = inputs.average_of_squares("square_avg", settings["alpha"])
    if settings["centered"]:
        mean = inputs.shared["grad_avg"].lerp_(inputs.pushed, 1 - settings["alpha"])
        squares = squares.addcmul(mean, mean, value=-1)
    if momentum > 0:
        return Factors(momentum, inputs.inverse_root(1.0, squares, eps), through=lr)
    return Factors(direct=inputs.inverse_root(lr, squares, eps))


def _adadelta(inputs: Inputs) -> Factors:
    rate = inputs.settings["rho"]
    eps = inputs.settings["eps"]
    squares = inputs.average_of_squares("square_avg", rate)
    moves = inputs.shared["acc_delta"]
    size_of_gradient = squares.add(eps).sqrt_()
    ratio = moves.add(eps).sqrt_().div_(size_of_gradient)
    _add_square(moves, ratio * inputs.pushed, rate)
    return Factors(direct=ratio.mul_(inputs.settings["lr"]))


def _adamax(inputs: Inputs) -> Factors:
    settings = inputs.settings
    beta1 = settings["beta1"]
    largest = inputs.shared["exp_inf"].mul_(settings["beta2"])
    torch.maximum(largest, inputs.pushed.abs().add_(settings["eps"]), out=largest)
    # With a buffer, the update is used only until the next one changes the shared tensor
    matrix = largest if inputs.buffer is not None else largest.clone()
    return Factors(beta1, 1 - beta1, through=Inverse(_corrected_lr(settings), matrix))


def _lion(inputs: Inputs) -> Factors:
    settings = inputs.settings
    beta1 = settings["beta1"]
    beta2 = settings["beta2"]
    average = inputs.shared["exp_avg"]
    # sign(x) = x / |x|; where x = 0 the weight does not move
    size = mixed(average, inputs.pushed, beta1).abs_()
    size.masked_fill_(size == 0, math.inf)
    advance(average, inputs.pushed, beta2, 1 - beta2)
    return Factors(beta2, 1 - beta2, through=Inverse(settings["lr"], size), ahead=beta1)


def _adafactor(inputs: Inputs) -> Factors:
    """Adafactor as PyTorch computes it."""
    floor = inputs.settings["floor"]
    rate = inputs.settings["rate"]
    gradient = inputs.pushed
    if "variance" in inputs.shared:
        squares = inputs.shared["variance"].lerp_(gradient * gradient, rate)
    else:
        rows = inputs.shared["row_var"].lerp_(_mean_square(gradient, -1), rate)
        columns = inputs.shared["col_var"].lerp_(_mean_square(gradient, -2), rate)
        squares = rows @ columns / rows.mean(-2, keepdim=True).clamp_(min=floor)
    root = squares.clamp(min=floor * floor).sqrt_()
    return Factors(direct=_clipped(gradient, root, inputs.settings))


def _mean_square(gradient: Tensor, axis: int) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=axis, keepdim=True)
    return norm.square_().div_(gradient.shape[axis])


def _clipped(gradient: Tensor, root: Tensor, settings: Settings) -> Inverse:
    """Return step_size / root, or less if gradient / root has a root mean square above `clip`."""
    mean_size = float((gradient / root).norm()) / math.sqrt(gradient.numel())
    return Inverse(settings["step_size"] / max(1.0, mean_size / settings["clip"]), root)


def _shapes_of_adafactor(shape: Shape) -> dict[str, Shape]:
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def _fairseq_adafactor(inputs: Inputs) -> Factors:
    """Adafactor as fairseq and Transformers compute it."""
    settings = inputs.settings
    floor = settings["floor"]
    rate = settings["rate"]
    gradient = inputs.pushed
    squares = gradient.square().add_(floor)
    if "exp_avg_sq" in inputs.shared:
        mean = inputs.shared["exp_avg_sq"].lerp_(squares, rate)
        root = mean.sqrt()
        is_small = mean <= 2 * floor
    else:
        rows = inputs.shared["exp_avg_sq_row"].lerp_(squares.mean(-1), rate)
        columns = inputs.shared["exp_avg_sq_col"].lerp_(squares.mean(-2), rate)
        relative = rows / rows.mean(-1, keepdim=True)
        root = relative.sqrt_().unsqueeze(-1) * columns.sqrt().unsqueeze(-2)
        is_small = (rows <= 2 * floor).unsqueeze(-1) | (columns <= 2 * floor).unsqueeze(-2)
    # As in at_rest: where there never was a gradient any factor will do, and the formula gives about 1e15
    root.masked_fill_(is_small & (gradient == 0), math.inf)
    scale = _clipped(gradient, root, settings)
    if settings["averages"]:
        return Factors(settings["beta1"], scale * (1 - settings["beta1"]), through=1.0)
    return Factors(direct=scale)


def _shapes_of_fairseq_adafactor(shape: Shape) -> dict[str, Shape]:
    if len(shape) < 2:
        return {"exp_avg_sq": shape}
    return {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": (*shape[:-2], shape[-1])}


KINDS: dict[str, Kind] = {
    "sgd": Kind(_sgd, "momentum_buffer"),
    "adam": Kind(_adam, "exp_avg", ("exp_avg_sq", "max_exp_avg_sq")),
    "nadam": Kind(_nadam, "exp_avg", ("exp_avg_sq",)),
    "radam": Kind(_radam, "exp_avg", ("exp_avg_sq",)),
    "adagrad": Kind(_adagrad, None, ("sum",)),
    "rmsprop": Kind(_rmsprop, "momentum_buffer", ("square_avg", "grad_avg")),
    "adadelta": Kind(_adadelta, None, ("square_avg", "acc_delta")),
    "adamax": Kind(_adamax, "exp_avg", ("exp_inf",)),
    "lion": Kind(_lion, "exp_avg", ("exp_avg",)),
    "adafactor": Kind(_adafactor, None, ("row_var", "col_var", "variance"), _shapes_of_adafactor),
    "fairseq adafactor": Kind(
        _fairseq_adafactor,
        "exp_avg",
        ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"),
        _shapes_of_fairseq_adafactor,
    ),
}


def at_rest(
    linear: Linear,
    kind: Kind,
    settings: Settings,
    shared: Mapping[str, Tensor],
    now: tuple[Tensor, Tensor],
    gradient: Tensor,
) -> Linear:
    """Return the same update with factors of 0 where the weight is at rest.

    shared: after the update. now: weight and average before it, without any mask. gradient: as the optimizer saw it.
    """
    if not may_blow_up(settings):
        return linear
    weight, average = now
    resting = torch.ones_like(weight, dtype=torch.bool)
    for name in kind.shared:
        # Adamax adds ε to each gradient's size, so a weight without gradients has about ε here
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
    """Return a matrix with zeros in some elements. A number is the same for all elements and stays."""
    if isinstance(factor, Inverse):
        return Inverse(factor.number, factor.matrix.masked_fill(elements, math.inf))
    return factor.masked_fill(elements, 0.0) if isinstance(factor, Tensor) else factor


@dataclass(frozen=True)
class Walked:
    """The result of walking back through updates: X_T = a·W_0 + b·m_0 − Σ_s c_s·gradient_s, X being the parameter or its average."""

    a: float
    b: float
    c: Floats


@dataclass(frozen=True)
class Updates:
    """Consecutive updates of one parameter."""

    kind: str
    steps: Ints
    """(updates,)"""
    settings: dict[str, Floats]
    """(updates,) each."""
    factors: Floats
    """(updates, backward passes): the factor between each pass's slots and the gradient; 0: there was no such pass."""

    def at(self, place: int) -> dict[str, float]:
        """Return the settings of one update."""
        return {name: float(values[place]) for name, values in self.settings.items()}

    def walked(self, of: str = "weight", later: Walked | None = None) -> Walked:
        """Return the coefficients of these updates; see walk_back."""
        return walk_back(self.kind, self.settings, len(self.steps), of, later)


def walk_back(
    kind: str, settings: Mapping[str, Floats], updates: int, of: str = "weight", later: Walked | None = None
) -> Walked:
    """Return the coefficients of an optimizer whose coefficients are numbers, from the last update to the first.

    settings: one number for each update. of: "weight" or "average", X in `Walked`. later: the coefficients of the updates after these, if
    X is asked for at a later time.
    """
    optimizer = KINDS[kind]
    assert not optimizer.elementwise
    coefficients = np.zeros(updates)
    columns = {name: values.tolist() for name, values in settings.items()}
    # X = p·W + q·m at the end
    p, q = (1.0, 0.0) if of == "weight" else (0.0, 1.0)
    if later is not None:
        p = later.a
        q = later.b
    for update in reversed(range(updates)):
        of_update = {name: values[update] for name, values in columns.items()}
        linear = optimizer.linear(of_update, {}, None)
        coefficients[update], p, q = linear.back(p, q)  # type: ignore[assignment]
    return Walked(p, q, coefficients)
