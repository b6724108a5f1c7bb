"""The rounding floor: how far rounding alone may have moved a parameter away from what its slots say.

Three things are rounded, and by how much is measured in each run, not assumed: the weights, at every update; the gradients, whose
distance from their slots the audit measured at every update; and slots that are stored in a shorter type. The rounding of a gradient goes
through the optimizer. Under SGD it is multiplied by the coefficient of its step. The Adam family divides gradients by their size, so
there the training is replayed with noise of that size (`_displacement`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Floats
from dualform.dual.coefficients import Coefficients, Updates, is_elementwise, update_table, updates_of, walked
from dualform.dual.gradients import Call, Replayed, Step, Sum, compute_dtype, description
from dualform.dual.replay import starting_moment, step_on
from dualform.layers.layer import Layer
from dualform.recursions import KINDS, outer
from dualform.store.reader import Store
from dualform.totals.rounding import ROUNDED_WITHIN, ROUNDINGS_WITHIN, coarse_spread

BOTH_ROUNDED = math.sqrt(2 / 3)
"""Key and error signal are each off by up to one roundoff, spread evenly."""

UPDATE_ROUNDINGS = 8
"""How many operations of an optimizer round what it adds to a weight: Adam's averages (two each), root, ε, quotient and learning rate."""

WORST_DRAWS = 16
WORST_NOISE = 2.0
WORST_UNIT = 3.0
"""The worst displacement is the largest of WORST_DRAWS draws with WORST_NOISE times the usual noise, divided by WORST_UNIT. If displacements
are proportional to noise, that is 1.5 times the usual displacement: 4.6 / 3."""


@dataclass(frozen=True)
class Floor:
    """How far a parameter may be from its dual by rounding, by cause; Frobenius norms."""

    weights: float
    gradients: float = 0.0
    storage: float = 0.0

    @property
    def total(self) -> float:
        """The floor of all causes, which are independent of each other."""
        return math.sqrt(self.weights**2 + self.gradients**2 + self.storage**2)

    def __str__(self) -> str:
        causes = {"weights": self.weights, "gradients": self.gradients, "stored slots": self.storage}
        return f"rounding of {max(causes, key=causes.__getitem__)}"


SIXTEEN_BITS = ("bfloat16", "float16")


def roundoff(dtype: str) -> float:
    """Return the unit roundoff of a type of numbers."""
    return torch.finfo(getattr(torch, dtype)).eps / 2


def storage_roundoff(store: Store, parameter: str) -> float:
    """Return the unit roundoff of a parameter's slots in the store; 0: storing them rounds nothing."""
    stored = roundoff(store.manifest.dtype)
    return stored if stored > roundoff(description(store, parameter).dtype) else 0.0


def weights_floor(dtype: str, updates: int, size: float) -> Floor:
    """Return what the rounding of weights explains: a random walk with a step of one roundoff per update. size: ‖W‖.

    If weights have 16 bits, most updates are smaller than a roundoff and are lost, always in the same direction: then roundoffs add up.
    """
    is_lossy = dtype in SIXTEEN_BITS
    roundoffs = updates if is_lossy else math.sqrt(updates)
    return Floor(roundoff(dtype) * roundoffs * size)


def full_floor(
    store: Store,
    parameter: str,
    begin: int,
    end: int,
    weights: Floor,
    is_worst: bool = False,
) -> Floor:
    """Return the floor with what the rounding of gradients and of stored slots explains. This walks through training again.

    is_worst: if coefficients are matrices, take each weight's largest displacement in many walks.
    """
    updates = updates_of(store, parameter, begin=begin, end=end)
    if store.is_vector(parameter):  # its gradients are recorded exactly
        along_the_way = _along_the_way(store, updates)
        carried = _carried_by_decay(store, updates, is_worst)
        return Floor(max(weights.weights, along_the_way, carried))
    if is_elementwise(updates):
        return _tried_floor(store, updates, weights, is_worst)
    return _computed_floor(store, updates, weights)


def _tried_floor(store: Store, updates: Updates, weights: Floor, is_worst: bool) -> Floor:
    """Return the floor if coefficients are matrices."""
    stored = storage_roundoff(store, updates.parameter)
    measured = _measured(store, updates)
    noise = _Noise(store, updates, measured, stored)
    distance = _worst_distance(updates, noise) if is_worst else _usual_distance(updates, noise)
    if stored:
        return Floor(weights.weights, storage=distance)
    return Floor(weights.weights, gradients=distance)


def _computed_floor(store: Store, updates: Updates, weights: Floor) -> Floor:
    """Return the floor if coefficients are numbers."""
    parameter = updates.parameter
    coefficients = walked(updates)
    measured = _measured(store, updates)
    trained = coefficients.walked.c * measured.residual * measured.size
    sizes = _sizes_of_slots(store, coefficients)
    unit = torch.finfo(compute_dtype(store, parameter)).eps / 2
    own = unit * math.hypot(*sizes.values())
    gradients = _both_roundings(float(np.linalg.norm(trained)), own)
    stored = storage_roundoff(store, parameter)
    if not stored:
        return Floor(weights.weights, gradients)
    by_layer = [math.sqrt(_slots_per_key(store, layer)) * sizes[layer.name] for layer in store.users(parameter)]
    storage = BOTH_ROUNDED * stored * math.hypot(*by_layer)
    return Floor(weights.weights, gradients, storage)


def _both_roundings(trained: float, own: float) -> float:
    """Return how far a gradient that training rounded by `trained` may be from our sum of its slots.

    Our products round as those of the training do. But terms that cancelled exactly in training (equal rows with opposite error signals)
    may not cancel here, where they are summed in another order. own: one roundoff of the terms, in the type that we sum in.
    """
    return math.hypot(trained, max(trained, own))


def _along_the_way(store: Store, updates: Updates) -> float:
    """Return what the rounding of a vector explains, which may have been larger during training than at its beginning and end."""
    kind = KINDS[updates.kind]
    gradients = Replayed(store, updates)
    now = starting_moment(gradients)
    total = gradients.sum()
    squares = 0.0
    for place in range(len(updates.steps)):
        before = now.weight.clone()
        gradient = gradients(gradients.read(place), total)
        step_on(now, kind, updates.at(place), gradient)
        squares += float(_squares_rounded(before.double(), now.weight.double()).sum())
    return roundoff(description(store, updates.parameter).dtype) * math.sqrt(squares)


def _squares_rounded(before: Tensor, after: Tensor) -> Tensor:
    """Return the squares of all numbers that an update rounds: the weight, and several times what is added to it, in training and here."""
    return after.square() + 2 * UPDATE_ROUNDINGS * (after - before).square()


def _carried_by_decay(store: Store, updates: Updates, is_worst: bool) -> float:
    """Return what the rounding of a vector explains under coupled decay and an optimizer of the Adam family.

    Decay makes the weight a part of its gradient, which is divided by its size. If there is little else in the gradient, each update may
    enlarge the rounding errors of earlier ones.
    """
    if not is_elementwise(updates) or not _has_coupled_decay(updates):
        return 0.0
    noise = _Noise(store, updates, _measured(store, updates), stored=0.0)
    return _worst_distance(updates, noise) if is_worst else _usual_distance(updates, noise)


def _has_coupled_decay(updates: Updates) -> bool:
    return any(outer(settings)[1] != 0 for settings in updates.each())


@dataclass(frozen=True)
class _Measured:
    """What the audit measured at each update."""

    residual: Floats
    size: Floats
    coarse: Floats
    """The unit roundoff of the 16-bit type that the gradient itself was rounded to (autocast); 0: it was not."""


def _measured(store: Store, updates: Updates) -> _Measured:
    table = update_table(store, updates.parameter, updates.begin, updates.end)
    coarse = np.zeros(table.height)
    if "autocast" in table.columns:
        coarse = table["autocast"].fill_null(0.0).to_numpy().astype(np.float64)
    residual = np.nan_to_num(table["residual"].to_numpy(), nan=0.0)
    size = np.nan_to_num(table["size"].to_numpy(), nan=0.0)
    return _Measured(residual, size, coarse)


def _sizes_of_slots(store: Store, coefficients: Coefficients) -> dict[str, float]:
    """Return, by layer, the root of the sum of squares of what each slot writes to a weight under SGD."""
    updates = coefficients.updates
    sizes = {}
    for layer in store.users(updates.parameter):
        total = 0.0
        for chunk in store.chunks(layer.name, begin_step=updates.begin, end_step=updates.end):
            by_slot = torch.from_numpy(chunk.per_slot(coefficients.of_blocks(chunk)))
            for low, high in chunk.pieces(layer.d_in + layer.d_out):
                keys, errors = chunk.pairs(torch.float32, low, high)
                squares = keys.square_norms().double()
                squares *= errors.double().square().sum(1)
                total += float(squares @ by_slot[low:high].square())
        sizes[layer.name] = math.sqrt(total)
    return sizes


def _slots_per_key(store: Store, layer: Layer) -> float:
    """Return how many slots share a stored key on average. The key has the same rounding error in all of them."""
    if layer.form != "vectors":
        return 1.0
    slots = sum(chunk.slots_with_keys for chunk in store.addresses(layer.name))  # gradients of rows have none
    stored_keys = max(1, store.key_count(layer.name))
    return max(1.0, slots / stored_keys)


def _usual_distance(updates: Updates, noise: _Noise) -> float:
    return float(_displacement(updates, noise, seed=0).norm())


def _worst_distance(updates: Updates, noise: _Noise) -> float:
    """Return the norm of each weight's largest displacement in several draws of larger noise, in units of the usual displacement.

    The Adam family divides a gradient by its size. If noise changes the sign of a weight's first gradient, the weight ends two learning rates
    away. A single such weight may be the whole distance, and few draws of the usual noise show it.
    """
    largest = _displacement(updates, noise, seed=0, scale=WORST_NOISE).abs()
    for seed in range(1, WORST_DRAWS):
        displacement = _displacement(updates, noise, seed, WORST_NOISE)
        largest = torch.maximum(largest, displacement.abs())
    return float(largest.norm()) / WORST_UNIT


def _displacement(updates: Updates, noise: _Noise, seed: int, scale: float = 1.0) -> Tensor:
    """Replay the optimizer with noise of the size of rounding on its gradients, and return how far that moves each weight.

    For coefficients that are matrices. This is closer to the truth than a bound, since what the optimizer divides by has the same noise.
    An entry of a gradient is a sum of products, so its rounding grows with the root of the sum of their squares. If decay makes weights
    a part of their gradients, the rounding of the weights is noise, too. scale: how many times the usual noise.
    """
    kind = KINDS[updates.kind]
    gradients = noise.gradients
    now = starting_moment(gradients)
    disturbed = now.copy()
    total = gradients.sum()
    generator = torch.Generator().manual_seed(seed)
    for place in range(len(updates.steps)):
        step = gradients.read(place)
        settings = updates.at(place)
        gradient = gradients(step, total)
        spread = noise.variance(place, step, gradient).sqrt()
        random = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
        before = now.weight.clone()
        step_on(disturbed, kind, settings, gradient + scale * spread * random)
        step_on(now, kind, settings, gradient)
        if noise.of_weight:
            spread = noise.of_weight * _squares_rounded(before, now.weight).sqrt()
            random = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
            disturbed.weight += scale * spread * random
    return (disturbed.weight - now.weight).double()


class _Noise:
    """How far rounding may have moved each entry of a parameter's gradients."""

    def __init__(
        self,
        store: Store,
        updates: Updates,
        measured: _Measured,
        stored: float,
    ):
        """stored: the unit roundoff of slots in the store; 0: storing them rounds nothing."""
        self.gradients = Replayed(store, updates)
        self._measured = measured
        self._squares = self.gradients.sum()
        self._of_call = self.gradients.sum()
        users = store.users(updates.parameter)
        slots_per_key = max(_slots_per_key(store, layer) for layer in users)
        self._of_storage = slots_per_key * (BOTH_ROUNDED * stored) ** 2
        is_rounded_within = any(layer.kind == ROUNDED_WITHIN for layer in users)
        self._roundings = ROUNDINGS_WITHIN if is_rounded_within else 1
        self._own = torch.finfo(self.gradients.dtype).eps / 2
        self.of_weight = roundoff(description(store, updates.parameter).dtype) if _has_coupled_decay(updates) else 0.0
        """The unit roundoff of the weight if its rounding goes through the optimizer; else 0."""
        self._is_vector = store.is_vector(updates.parameter)

    def variance(self, place: int, step: Step, gradient: Tensor) -> Tensor:
        """Return the variance of each entry of an update's gradient."""
        if self._is_vector:  # recorded exactly
            return torch.zeros_like(gradient)
        squares = _squares_of_slots(self.gradients, step, self._squares)
        # If only some rows were kept (outputs=), the recorded size of the whole gradient is too large
        is_whole = self.gradients.rows is None
        size = float(self._measured.size[place] if is_whole else gradient.norm())
        rest = float(self._measured.residual[place]) * size
        coarse = float(self._measured.coarse[place])
        if coarse:
            parts = _squares_of_parts(self.gradients, step, self._of_call)
            of_gradient = coarse_spread(parts, rest, coarse, self._roundings)
            # Slots of a call may cancel, exactly in training and up to a roundoff of the terms here
            of_gradient = of_gradient + squares * _both_roundings(self._own, self._own) ** 2
        else:
            of_gradient = _spread(squares, rest, self._own)
        return of_gradient + squares * self._of_storage


def _squares_of_parts(gradients: Replayed, step: Step, total: Sum) -> Iterator[Tensor]:
    """Yield the squares of what each call of a layer added to a step's gradient; if it rounds within a call, of what each slot added."""
    for call in step.calls:
        if call.layer.kind == ROUNDED_WITHIN:
            _add_squares(gradients, call, total)
            yield total.taken()
            continue
        for use in gradients.uses(call.layer):
            total.add(call.layer, use, call.keys, call.errors, call.factor)
        yield total.taken().square()


def _spread(variance: Tensor, rest: float, own: float) -> Tensor:
    """Return the variance of each entry of a gradient whose error has the norm `rest`, and that we sum with the unit roundoff `own`."""
    whole = float(variance.sum())
    if whole == 0:  # by its slots the gradient is zero, so all of it is rounding
        return torch.full_like(variance, rest**2 / max(1, variance.numel()))
    return variance * _both_roundings(rest / math.sqrt(whole), own) ** 2


def _squares_of_slots(gradients: Replayed, step: Step, total: Sum) -> Tensor:
    """Return Σ (factor · error)² ⊗ key² over the slots, shaped like the parameter."""
    for call in step.calls:
        _add_squares(gradients, call, total)
    return total.taken()


def _add_squares(gradients: Replayed, call: Call, total: Sum) -> None:
    for use in gradients.uses(call.layer):
        total.add(call.layer, use, call.keys.squared(), call.errors.square(), call.factor**2)
