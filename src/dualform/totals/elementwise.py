"""Folding the updates of optimizers whose coefficients are matrices (the Adam family).

The optimizer's own recursion runs on every group's part of a parameter, step by step, with the state that all groups share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Floats
from dualform.layers.written import each_written
from dualform.recursions import KINDS, Linear, at_rest, outer
from dualform.store.format import Manifest
from dualform.totals.group_tensors import FOLDED, Deltas
from dualform.totals.rounding import ROUNDED_WITHIN, ROUNDINGS_WITHIN, coarse_spread
from dualform.totals.stretch import StretchUpdates, Uses
from dualform.totals.sums import sum_by_group
from dualform.totals.written import add_by_group, add_written

States = dict[str, Tensor]
"""A parameter ("weight"), its running average ("average"), and the optimizer's other state by name."""


class ElementwiseFold:
    """Folds the updates of one parameter in a stretch."""

    def __init__(
        self,
        manifest: Manifest,
        number: int,
        updates: StretchUpdates,
        tensors: dict[str, Tensor],
        beginning: Mapping[str, Tensor] | None,
    ):
        """number: of the parameter. tensors: by the names of Accumulated, changed in place. beginning: the snapshot that training began from."""
        self._number = number
        self._parameters = len(manifest.parameters)
        self._name = manifest.parameters[number].name
        self._shape = tuple(manifest.parameters[number].shape)
        self._is_vector = manifest.is_vector(self._name)
        users = [layer for layer in manifest.layers if self._name in layer.parameters]
        self._is_rounded_within = any(layer.kind == ROUNDED_WITHIN for layer in users)
        self._updates = updates
        self._kind = KINDS[updates.kind]
        self._tensors = tensors
        if f"now.{number}.weight" not in tensors:
            assert beginning is not None
            self._begin(beginning)

    def _begin(self, beginning: Mapping[str, Tensor]) -> None:
        """Start from the parameter and its optimizer state when recording began."""
        weight = beginning[f"model.{self._name}"]
        average = beginning.get(f"state.{self._name}.{self._kind.average}", torch.zeros_like(weight))
        states = {"weight": weight, "average": average}
        for state, shape in self._kind.shared_shapes(self._shape).items():
            nothing = weight.new_zeros(shape)
            states[state] = beginning.get(f"state.{self._name}.{state}", nothing)
        self._keep("now", states)
        self._keep("initial", {name: states[name] for name in FOLDED})

    def _keep(self, prefix: str, states: States) -> None:
        for state, tensor in states.items():
            self._tensors[f"{prefix}.{self._number}.{state}"] = tensor.clone()

    def _states(self, prefix: str) -> States:
        """Return the parameter and its optimizer state, to be changed in place."""
        states = (*FOLDED, *self._kind.shared_shapes(self._shape))
        return {state: self._tensors[f"{prefix}.{self._number}.{state}"] for state in states}

    def fold(self, uses: Uses, deltas: Mapping[int, Deltas]) -> None:
        """Run the optimizer on the initial part and on each group's part, step by step. deltas: by grouping."""
        now = self._states("now")
        initial_weight = self._tensors[f"initial.{self._number}.weight"]
        initial_average = self._tensors[f"initial.{self._number}.average"]
        for update, step in enumerate(self._updates.steps.tolist()):
            slots = _of_step(uses, step)
            gradient = self._gradient(slots, update, now["weight"])
            if not self._is_vector:
                self._fold_rounding(slots, update, gradient)
            linear = self._step(now, update, gradient)
            linear.apply(initial_weight, initial_average, None)
            for grouping, held in deltas.items():
                if self._is_vector:
                    parts = self._vector_parts(slots, update, gradient, grouping, len(held.weight))
                else:
                    parts = self._matrix_parts(slots, update, grouping, held.weight)
                linear.apply(held.weight, held.average, parts)

    def _step(self, states: States, update: int, gradient: Tensor) -> Linear:
        """Do one update of the parameter and its optimizer state, in place; return it as a linear map."""
        settings = self._updates.at(update)
        weight = states["weight"]
        average = states["average"]
        shared = {name: state for name, state in states.items() if name in self._kind.shared}
        sign, decay, _ = outer(settings)
        pushed = gradient * sign + weight * decay
        linear = self._kind.linear(settings, shared, pushed)
        linear = at_rest(linear, self._kind, settings, shared, (weight, average), gradient)
        linear.apply(weight, average, gradient)
        return linear

    # Gradients, and what the slots of each group added to them

    def _gradient(self, slots: Uses, update: int, like: Tensor) -> Tensor:
        """Return the gradient of an update: that of a vector as it was kept, that of a matrix from its slots."""
        if self._is_vector and self._updates.gradients is not None:
            return self._updates.gradients[update].to(like.dtype)
        gradient = torch.zeros_like(like)
        if not self._is_vector:
            for use, piece in slots:
                factors = self._updates.slot_factors(update, piece)
                add_written(gradient, use, piece, factors)
        return gradient

    def _matrix_parts(self, slots: Uses, update: int, grouping: int, like: Tensor) -> Tensor:
        """Return what the slots of each group added to a matrix's gradient, (groups, *shape)."""
        parts = torch.zeros_like(like)
        for use, piece in slots:
            factors = self._updates.slot_factors(update, piece)
            add_by_group(parts, None, grouping, use, piece, factors)
        return parts

    def _vector_parts(self, slots: Uses, update: int, gradient: Tensor, grouping: int, count: int) -> Tensor:
        """Return what a vector's gradient holds beyond its slots, and what the slots of each group added to it, (1 + groups, *shape).

        What slots write to a bias may cancel up to rounding (before a normalisation, in an attention), and Adam divides the rest by its own
        size. So these sums are computed in a longer type, as they are for masks without totals.
        """
        longer: Any = np.longdouble if gradient.dtype == torch.float64 else np.float64
        parts = np.zeros((count, *gradient.shape), longer)
        for use, piece in slots:
            factors = self._updates.slot_factors(update, piece)
            assert piece.errors is not None
            written = each_written(use, piece.keys, piece.errors).numpy()
            own = parts[:, slice(*use.rows)] if use.rows else parts
            for factor in np.unique(factors):  # one for each backward pass
                of_pass = factors == factor
                rows = piece.groups[grouping][of_pass] + 1
                sums = sum_by_group(written[of_pass], longer, rows, count)
                own += longer(factor) * sums.reshape(own.shape)
        in_groups = parts[1:].sum(0)
        parts[0] = gradient.numpy().astype(longer) - in_groups
        rounded = torch.from_numpy(parts.astype(np.float64))
        return rounded.to(gradient.dtype)

    # Rounding to 16 bits

    def _fold_rounding(self, slots: Uses, update: int, gradient: Tensor) -> None:
        """Update a copy of the parameter whose gradients have noise; it starts at the first gradient that has."""
        noise = self._noise(slots, update, gradient)
        if noise is not None and f"rounded.{self._number}.weight" not in self._tensors:
            self._keep("rounded", self._states("now"))
        if f"rounded.{self._number}.weight" not in self._tensors:
            return
        disturbed_gradient = gradient if noise is None else gradient + noise
        self._step(self._states("rounded"), update, disturbed_gradient)

    def _noise(self, slots: Uses, update: int, gradient: Tensor) -> Tensor | None:
        """Return random noise of the size that rounding to 16 bits added to a gradient; None: it was not rounded."""
        rounded = self._updates.rounded
        if rounded is None or not rounded.units[update]:
            return None
        unit = float(rounded.units[update])
        rest = float(rounded.rests[update])
        factors = self._updates.factors[update]
        if self._is_rounded_within:
            squares = _added_by_passes(_squared(slots), factors**2, gradient)
            spread = coarse_spread(squares, rest, unit, ROUNDINGS_WITHIN)
        else:
            added = _added_by_passes(slots, factors, gradient)
            spread = coarse_spread(map(torch.square, added), rest, unit)
        # Seeded by step and parameter, so that an interrupted and resumed recording draws the same
        seed = int(self._updates.steps[update]) * self._parameters + self._number
        generator = torch.Generator().manual_seed(seed)
        random = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
        return random * spread.sqrt()


def _of_step(uses: Uses, step: int) -> Uses:
    """Return the slots of one step."""
    of_step = []
    for use, piece in uses:
        low, high = np.searchsorted(piece.steps, [step, step + 1]).tolist()
        if high - low == len(piece):
            of_step.append((use, piece))
        elif low < high:
            of_step.append((use, piece.select(slice(low, high))))
    return of_step


def _squared(slots: Uses) -> Uses:
    """Return slots with the squares of their keys and error signals."""
    squared = []
    for use, piece in slots:
        assert piece.errors is not None
        squares = replace(piece, keys=piece.keys.squared(), errors=piece.errors.square())
        squared.append((use, squares))
    return squared


def _added_by_passes(slots: Uses, factors: Floats, like: Tensor) -> Iterator[Tensor]:
    """Yield what each backward pass added to a gradient, for each use of the parameter."""
    for use, piece in slots:
        for backward, factor in enumerate(factors.tolist()):
            is_of_pass = piece.backwards == backward
            if is_of_pass.any():
                added = torch.zeros_like(like)
                add_written(added, use, piece, is_of_pass * factor)
                yield added
