"""The rounding floor: how far rounding alone may have moved a parameter away from what its slots say.

Three things are rounded, and how much is known of each run, not assumed: the weights, at every update; the gradients, whose distance
from their slots the audit has measured at every update; and slots that are stored in a shorter type. What rounding does to a gradient goes
through the optimizer: by the coefficient of its step under SGD; under the Adam family, where the gradients of a weight may be small and are
divided by their size, that is tried out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.dual.coefficients import Coefficients, Updates, is_elementwise, update_table, updates_of, walked
from dualform.dual.gradients import Call, Replayed, Step, Sum, compute_dtype
from dualform.dual.replay import moment, step_on
from dualform.layers.streams import Layer
from dualform.recursions import KINDS, Floats
from dualform.store.reader import Store
from dualform.totals.rounding import ROUNDED_WITHIN, ROUNDINGS_WITHIN, coarse_spread

BOTH_ROUNDED = math.sqrt(2 / 3)
"""Key and error signal are each off by up to one roundoff, evenly spread."""

UPDATE_ROUNDINGS = 8
"""So many operations of an optimizer round what it adds to a weight: Adam's two averages (two each), root, ε, quotient and learning rate."""

WORST_DRAWS = 16
WORST_NOISE = 2.0
"""A worst displacement is the largest of so many draws of noise of twice the usual size …"""
WORST_UNIT = 3.0
"""… divided by this. Where displacements are in proportion to noise, that is 1.5 times the usual one: 4.6 / 3."""


@dataclass(frozen=True)
class Floor:
    """How far a parameter may be from its dual by rounding, by cause; Frobenius norms."""

    weights: float
    gradients: float = 0.0
    storage: float = 0.0

    @property
    def total(self) -> float:
        """All causes are independent of each other."""
        return math.sqrt(self.weights**2 + self.gradients**2 + self.storage**2)

    def __str__(self) -> str:
        causes = {"weights": self.weights, "gradients": self.gradients, "stored slots": self.storage}
        return f"rounding of {max(causes, key=causes.__getitem__)}"


def storage_roundoff(store: Store, parameter: str) -> float:
    """The unit roundoff of a parameter's slots in store; 0: they are stored as they were."""
    described = store.manifest.parameters[store.parameter(parameter)]
    stored = _roundoff(store.manifest.dtype)
    return stored if stored > _roundoff(described.dtype) else 0.0


SIXTEEN_BITS = ("bfloat16", "float16")


def weights_floor(dtype: str, updates: int, size: float) -> Floor:
    """What the rounding of weights explains: a random walk of one roundoff for each update. size: ‖W‖.

    Where weights have 16 bits, most updates are smaller than a roundoff and vanish, all in one direction: there the roundoffs add up.
    """
    is_lossy = dtype in SIXTEEN_BITS
    return Floor(_roundoff(dtype) * (updates if is_lossy else math.sqrt(updates)) * size)


def full_floor(store: Store, parameter: str, begin: int, end: int, weights: Floor, is_worst: bool = False) -> Floor:
    """The floor with what rounding of gradients and of stored slots explains. This walks through training once more.

    is_worst: each weight counts with its largest displacement in many walks (_worst_displacement), where coefficients are matrices.
    """
    if store.manifest.keep != "slots":
        return weights
    updates = updates_of(store, parameter, begin=begin, end=end)
    if store.is_vector(parameter):  # its gradients are kept as they were
        return Floor(max(weights.weights, _along_the_way(store, updates)))
    stored = storage_roundoff(store, parameter)
    measured = _measured(store, parameter, updates)
    if is_elementwise(updates):
        noise = _Noise(store, updates, measured, stored)
        found = _worst_displacement(noise) if is_worst else float(_displacement(noise, seed=0).norm())
        return Floor(weights.weights, storage=found) if stored else Floor(weights.weights, gradients=found)
    coefficients = walked(updates)
    errors = coefficients.walked.c * measured.residual * measured.size
    sizes = _sizes_of_slots(store, parameter, coefficients)
    own = torch.finfo(compute_dtype(store, parameter)).eps / 2 * math.hypot(*sizes.values())
    gradients = _both_roundings(float(np.linalg.norm(errors)), own)
    storage = 0.0
    if stored:
        visits = {layer.name: _visits(store, layer) for layer in store.users(parameter)}
        storage = BOTH_ROUNDED * stored * math.hypot(*(math.sqrt(visits[name]) * size for name, size in sizes.items()))
    return Floor(weights.weights, gradients, storage)


def _both_roundings(trained: float, own: float) -> float:
    """How far a gradient that the training rounded by `trained` may be from our sum of its slots.

    Our own products round as those of the training do. But terms that cancelled exactly there (equal rows with opposite error signals) need
    not do so here, where they are summed in another order. own: one roundoff of the terms, in the type that we sum in.
    """
    return math.hypot(trained, max(trained, own))


def _along_the_way(store: Store, updates: Updates) -> float:
    """What the rounding of a vector explains if it was larger during training than at the beginning and at the end.

    Each update rounds the weight, and what is added to it a few times: both in training and here.
    """
    described = store.manifest.parameters[store.parameter(updates.parameter)]
    kind = KINDS[updates.kind]
    gradients = Replayed(store, updates)
    now = moment(store, updates.parameter, updates.begin, kind, gradients.rows, gradients.dtype)
    sums = gradients.sum()
    squares = 0.0
    for place in range(len(updates.steps)):
        before = now.weight.clone()
        step_on(now, kind, updates.at(place), gradients(gradients.read(place), sums))
        moved = float((now.weight - before).double().square().sum())
        squares += float(now.weight.double().square().sum()) + 2 * UPDATE_ROUNDINGS * moved
    return _roundoff(described.dtype) * math.sqrt(squares)


@dataclass(frozen=True)
class _Measured:
    """What the audit found of each update."""

    residual: Floats
    size: Floats
    coarse: Floats
    """The unit roundoff of the 16-bit type that the gradient itself was rounded to (autocast); 0: it was not."""


def _measured(store: Store, parameter: str, updates: Updates) -> _Measured:
    table = update_table(store, parameter, updates.begin, updates.end)
    coarse = np.zeros(table.height)
    if "autocast" in table.columns:
        coarse = table["autocast"].fill_null(0.0).to_numpy().astype(np.float64)
    residual = np.nan_to_num(table["residual"].to_numpy(), nan=0.0)
    size = np.nan_to_num(table["size"].to_numpy(), nan=0.0)
    return _Measured(residual, size, coarse)


def _sizes_of_slots(store: Store, parameter: str, found: Coefficients) -> dict[str, float]:
    """By layer: the root of the sum of squares of what each slot writes to a weight under SGD."""
    sizes = {}
    for layer in store.users(parameter):
        total = 0.0
        for chunk in store.chunks(layer.name, begin_step=found.updates.begin, end_step=found.updates.end):
            coefficients = torch.from_numpy(chunk.per_slot(found.of_blocks(chunk)))
            for low, high in chunk.pieces(layer.d_in + layer.d_out):
                squares = chunk.keys(torch.float32, low, high).square_norms().double()
                squares *= chunk.errors(torch.float32, low, high).double().square().sum(1)
                total += float(squares @ coefficients[low:high].square())
        sizes[layer.name] = math.sqrt(total)
    return sizes


def _visits(store: Store, layer: Layer) -> float:
    """How many slots have one stored key, on average: it is off by the same in each of them."""
    if layer.form != "vectors":
        return 1.0
    return max(1.0, store.slots(layer.name) / max(1, store.key_count(layer.name)))


@dataclass(frozen=True)
class _Noise:
    """What rounding does to the gradients of a parameter."""

    store: Store
    updates: Updates
    measured: _Measured
    stored: float
    """The unit roundoff of the store's type, or 0."""


def _worst_displacement(noise: _Noise) -> float:
    """The norm of each weight's largest displacement in several draws of larger noise, in units of the usual displacement.

    The Adam family divides a gradient by its size. If noise changes the sign of a weight's first gradient, the weight ends two learning rates
    elsewhere: a single such weight may be the whole distance, and few draws of the usual noise show it.
    """
    largest = _displacement(noise, seed=0, scale=WORST_NOISE).abs()
    for seed in range(1, WORST_DRAWS):
        largest = torch.maximum(largest, _displacement(noise, seed, WORST_NOISE).abs())
    return float(largest.norm()) / WORST_UNIT


def _displacement(noise: _Noise, seed: int, scale: float = 1.0) -> Tensor:
    """Where a weight whose coefficients are matrices ends if its gradients are disturbed by as much as rounding does, less where it ended.

    The optimizer is replayed with random noise on its gradients. That is nearer the truth than a bound, since what it divides by
    is disturbed by the same noise. An entry of a gradient is a sum of products; its rounding goes with the root of the sum of their squares.
    scale: how many times the usual size of noise.
    """
    store = noise.store
    updates = noise.updates
    measured = noise.measured
    kind = KINDS[updates.kind]
    gradients = Replayed(store, updates)
    now = moment(store, updates.parameter, updates.begin, kind, gradients.rows, gradients.dtype)
    disturbed = now.copy()
    sums = gradients.sum()
    squares = gradients.sum()
    of_call = gradients.sum()
    generator = torch.Generator().manual_seed(seed)
    users = store.users(updates.parameter)
    visits = max(_visits(store, layer) for layer in users)
    roundings = ROUNDINGS_WITHIN if any(layer.kind == ROUNDED_WITHIN for layer in users) else 1
    own = torch.finfo(gradients.dtype).eps / 2
    for place in range(len(updates.steps)):
        step = gradients.read(place)
        settings = updates.at(place)
        gradient = gradients(step, sums)
        variance = _variance(gradients, step, squares)
        # Of some rows only (outputs=), the size of the whole gradient says too much
        size = float(measured.size[place] if gradients.rows is None else gradient.norm())
        rest = float(measured.residual[place]) * size
        coarse = float(measured.coarse[place])
        spread = (
            coarse_spread(_squares_of_parts(gradients, step, of_call), rest, coarse, roundings)
            if coarse
            else _spread(variance, rest, own)
        )
        spread = spread + variance * (visits * (BOTH_ROUNDED * noise.stored) ** 2)
        drawn = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
        step_on(disturbed, kind, settings, gradient + scale * spread.sqrt() * drawn)
        step_on(now, kind, settings, gradient)
    return (disturbed.weight - now.weight).double()


def _squares_of_parts(gradients: Replayed, step: Step, total: Sum) -> Iterator[Tensor]:
    """Squares of what each call of a layer added to the gradient of a step; where it rounds within a call, of what each slot added."""
    for call in step.calls:
        if call.layer.kind == ROUNDED_WITHIN:
            _add_squares(gradients, call, total)
            yield total.taken()
            continue
        for use in gradients.uses(call.layer):
            total.add(call.layer, use, call.keys, call.errors, call.factor)
        yield total.taken().square()


def _spread(variance: Tensor, rest: float, own: float) -> Tensor:
    """The variance of each entry of a gradient that is off by `rest` in all, as a norm, and that we sum with the unit roundoff `own`."""
    whole = float(variance.sum())
    if whole == 0:  # the slots say that there is no gradient, and what there was is rounding
        return torch.full_like(variance, rest**2 / max(1, variance.numel()))
    return variance * _both_roundings(rest / math.sqrt(whole), own) ** 2


def _variance(gradients: Replayed, step: Step, total: Sum) -> Tensor:
    """Σ over slots of (factor · error)² ⊗ key², shaped like the parameter."""
    for call in step.calls:
        _add_squares(gradients, call, total)
    return total.taken()


def _add_squares(gradients: Replayed, call: Call, total: Sum) -> None:
    for use in gradients.uses(call.layer):
        total.add(call.layer, use, call.keys.squared(), call.errors.square(), call.factor**2)


def _roundoff(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).eps / 2
