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
from dualform.layers.keys import part as columns
from dualform.recursions import KINDS, Kind, Linear, at_rest, outer
from dualform.store.format import Manifest
from dualform.totals.group_tensors import OF, Deltas
from dualform.totals.rounding import ROUNDED_WITHIN, ROUNDINGS_WITHIN, coarse_spread
from dualform.totals.stretch import StretchUpdates, Uses
from dualform.totals.written import add_by_group, add_written

Parts = dict[int, Tensor]
"""By grouping: what the slots of each group added to a gradient, shaped like the group deltas."""


class ElementwiseFold:
    """The initial part of parameters, and the parameters themselves with their optimizer state, one step after the other."""

    def __init__(
        self,
        manifest: Manifest,
        tensors: dict[str, Tensor],
        beginning: Mapping[str, Tensor] | None,
    ):
        """tensors: where they are kept, by the names of Accumulated. beginning: the snapshot that training began from."""
        self._manifest = manifest
        self._tensors = tensors
        self._beginning = beginning

    def fold(self, number: int, uses: Uses, updates: StretchUpdates, deltas: Mapping[int, Deltas]) -> None:
        """Fold the updates of a parameter, given by its number. deltas: by grouping."""
        kind = KINDS[updates.kind]
        if f"now.{number}.weight" not in self._tensors:
            self._begin(number, kind)
        now = self._states("now", number, kind)
        initial_weight = self._tensors[f"initial.{number}.weight"]
        initial_average = self._tensors[f"initial.{number}.average"]
        is_vector = self._manifest.is_vector(self._manifest.parameters[number].name)
        for update, step in enumerate(updates.steps.tolist()):
            slots = _of_step(uses, step)
            if is_vector:
                gradient = _vector_gradient(updates, update, now["weight"])
                parts = _parts_of_vector(slots, updates, update, gradient, deltas)
            else:
                gradient, parts = _matrix_gradient(slots, updates, update, now["weight"], deltas)
                self._fold_rounding(number, slots, updates, update, gradient)
            linear = _step(now, kind, updates.at(update), gradient)
            linear.apply(initial_weight, initial_average, None)
            for grouping, held in deltas.items():
                linear.apply(held.weight, held.average, parts[grouping])

    def _begin(self, number: int, kind: Kind) -> None:
        """Take a parameter and its optimizer state as they were when recording began."""
        assert self._beginning is not None
        name = self._manifest.parameters[number].name
        weight = self._beginning[f"model.{name}"]
        stored_names = {state: state for state in kind.shared}
        if kind.average is not None:
            stored_names["average"] = kind.average
        states = {"weight": weight, "average": torch.zeros_like(weight)}
        for state, stored in stored_names.items():
            states[state] = self._beginning.get(f"state.{name}.{stored}", torch.zeros_like(weight))
        for state, tensor in states.items():
            self._tensors[f"now.{number}.{state}"] = tensor.clone()
        for of in OF:
            self._tensors[f"initial.{number}.{of}"] = states[of].clone()

    def _states(self, prefix: str, number: int, kind: Kind) -> dict[str, Tensor]:
        """Return a parameter and its optimizer state, to be changed in place."""
        names = (*OF, *kind.shared)
        return {name: self._tensors[f"{prefix}.{number}.{name}"] for name in names}

    def _fold_rounding(self, number: int, slots: Uses, updates: StretchUpdates, update: int, gradient: Tensor) -> None:
        """Update a copy of the parameter whose gradients have noise, from the first one on that has."""
        kind = KINDS[updates.kind]
        noise = self._noise(number, slots, updates, update, gradient)
        if f"rounded.{number}.weight" not in self._tensors:
            if noise is None:
                return
            for name, state in self._states("now", number, kind).items():
                self._tensors[f"rounded.{number}.{name}"] = state.clone()
        disturbed = self._states("rounded", number, kind)
        disturbed_gradient = gradient if noise is None else gradient + noise
        _step(disturbed, kind, updates.at(update), disturbed_gradient)

    def _noise(self, number: int, slots: Uses, updates: StretchUpdates, update: int, gradient: Tensor) -> Tensor | None:
        """Return as much random noise as rounding to 16 bits has added to a gradient; None: it has not."""
        if updates.rounded is None or not updates.rounded.units[update]:
            return None
        unit = float(updates.rounded.units[update])
        rest = float(updates.rounded.rests[update])
        factors = updates.factors[update]
        if self._is_rounded_within(number):
            squares = _added_by_passes(_squared(slots), factors**2, gradient)
            spread = coarse_spread(squares, rest, unit, ROUNDINGS_WITHIN)
        else:
            added = _added_by_passes(slots, factors, gradient)
            spread = coarse_spread(map(torch.square, added), rest, unit)
        # The same in a recording that was interrupted and resumed
        parameters = len(self._manifest.parameters)
        seed = int(updates.steps[update]) * parameters + number
        generator = torch.Generator().manual_seed(seed)
        random = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
        return random * spread.sqrt()

    def _is_rounded_within(self, number: int) -> bool:
        """Whether a layer that rounds within a call uses a parameter."""
        name = self._manifest.parameters[number].name
        users = [layer for layer in self._manifest.layers if name in layer.parameters]
        return any(layer.kind == ROUNDED_WITHIN for layer in users)


def _of_step(uses: Uses, step: int) -> Uses:
    """Return the slots of one step."""
    of_step = []
    for use, piece in uses:
        low, high = np.searchsorted(piece.steps, [step, step + 1]).tolist()
        if high - low == len(piece):
            of_step.append((use, piece))
        elif low < high:
            of_step.append((use, piece.some(slice(low, high))))
    return of_step


def _vector_gradient(updates: StretchUpdates, update: int, like: Tensor) -> Tensor:
    """Return the gradient of a bias in one update, as it was kept."""
    if updates.gradients is None:
        return torch.zeros_like(like)
    return updates.gradients[update].to(like.dtype)


def _parts_of_vector(
    slots: Uses, updates: StretchUpdates, update: int, gradient: Tensor, deltas: Mapping[int, Deltas]
) -> Parts:
    """Return, by grouping, what a bias's gradient holds beyond its slots, and what the slots of each group added to it, (1 + groups, *shape).

    What slots write to a bias may cancel to rounding (before a normalisation, in an attention), and Adam divides that by its own size: the
    sums are made in a longer type, as they are for masks without totals.
    """
    longer: Any = np.longdouble if gradient.dtype == torch.float64 else np.float64
    parts = {}
    for grouping, held in deltas.items():
        sums = np.zeros(held.weight.shape, longer)
        for use, piece in slots:
            assert piece.errors is not None
            written = piece.keys.vectors() if use.role == "scale" else columns(piece.errors, use.errors)
            factors = updates.slot_factors(update, piece).astype(longer)
            scaled = written.numpy().astype(longer) * factors[:, None]
            own = sums[:, slice(*use.rows)] if use.rows else sums
            row_of_group = piece.groups[grouping] + 1
            np.add.at(own, row_of_group, scaled.reshape(len(scaled), *own.shape[1:]))
        sums[0] = gradient.numpy().astype(longer) - sums[1:].sum(0)
        parts[grouping] = torch.from_numpy(sums.astype(np.float64)).to(gradient.dtype)
    return parts


def _matrix_gradient(
    slots: Uses, updates: StretchUpdates, update: int, like: Tensor, deltas: Mapping[int, Deltas]
) -> tuple[Tensor, Parts]:
    """Return the gradient of a matrix in one update, from its slots, and by grouping, what each group's slots added to it."""
    gradient = torch.zeros_like(like)
    parts = {grouping: torch.zeros_like(held.weight) for grouping, held in deltas.items()}
    for use, piece in slots:
        factors = updates.slot_factors(update, piece)
        add_written(gradient, use, piece, factors)
        for grouping, part in parts.items():
            add_by_group(part, None, grouping, use, piece, factors)
    return gradient, parts


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
                add_written(added, use, piece, np.where(is_of_pass, factor, 0.0))
                yield added


def _step(now: Mapping[str, Tensor], kind: Kind, settings: dict[str, float], gradient: Tensor) -> Linear:
    """Do one update of a parameter and its optimizer state, in place; returns it as a linear map."""
    weight = now["weight"]
    average = now["average"]
    shared = {name: now[name] for name in kind.shared}
    sign, decay, _ = outer(settings)
    pushed = gradient * sign + weight * decay
    linear = kind.linear(settings, shared, pushed)
    linear = at_rest(linear, kind, settings, shared, (weight, average), gradient)
    linear.apply(weight, average, gradient)
    return linear
