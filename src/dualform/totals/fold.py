"""Folding a stretch of training into totals.

Over a stretch, the optimizer's recursion maps a group's part of the weights and of the state (ΔW_g, Δstate_g) linearly,
and adds the group's gradients with coefficients known at its end: one matrix product for each group, and the recursion
itself need not be run step by step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.recursions import RECURSIONS, STATE, Floats, Replayed
from dualform.store.format import Grouping, Layer, Manifest

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Slots:
    """The slots of one layer in a stretch."""

    keys: Tensor
    """(n, d_in)"""
    errors: Tensor | None
    """(n, d_out); None if only keys are wanted."""
    steps: Ints
    """(n,)"""
    backwards: Ints
    """(n,)"""
    groups: Sequence[Ints]
    """For each grouping: the group of each slot, (n,)."""


@dataclass(frozen=True)
class Updates:
    """The updates of one parameter in a stretch."""

    kind: str
    steps: Ints
    """(updates,)"""
    settings: dict[str, Floats]
    factors: Floats
    """(updates, backward passes)"""
    gradients: Tensor | None
    """(updates, d_out), for biases."""

    def replayed(self, of: str) -> Replayed:
        """What becomes of the stretch's beginning and of its gradients."""
        return RECURSIONS[self.kind](self.settings, len(self.steps), of)

    def of_slots(self, coefficients: Floats, slots: Slots) -> Floats:
        """(n,): coefficient × factor of each slot; 0 where the parameter was not updated."""
        table = np.zeros((len(self.steps) + 1, self.factors.shape[1] + 1))
        table[:-1, :-1] = coefficients[:, None] * self.factors
        place = np.searchsorted(self.steps, slots.steps)
        place[(place < len(self.steps)) & (self.steps[np.minimum(place, len(self.steps) - 1)] != slots.steps)] = len(
            self.steps
        )
        found: Floats = table[place, np.minimum(slots.backwards, self.factors.shape[1])]
        return found


class Grown:
    """A tensor with one row for each group, which grows as groups appear."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype):
        self._data = torch.zeros(0, *shape, dtype=dtype)
        self._used = 0

    @classmethod
    def of(cls, data: Tensor) -> Grown:
        """From what was kept."""
        grown = cls(data.shape[1:], data.dtype)
        grown._data, grown._used = data.clone(), len(data)
        return grown

    def rows(self, count: int) -> Tensor:
        """The first `count` rows, new ones zero."""
        if count > len(self._data):
            room = max(count, 2 * len(self._data))
            grown = torch.zeros(room, *self._data.shape[1:], dtype=self._data.dtype)
            grown[: self._used] = self._data[: self._used]
            self._data = grown
        self._used = max(self._used, count)
        return self._data[:count]


class Accumulated:
    """The totals of a recording, in memory.

    Tensors, as in the store: `{grouping}.{layer}.keys` and `.visits`, one row a group; `{grouping}.p{parameter}.weight` and
    `.{state}`, the group deltas (for biases with `.rest` at the end: row 0 is what their gradients hold beyond the slots);
    `initial.{parameter}`, the initial part's numbers; `negative.{layer}`, whether any key was.
    """

    def __init__(self, manifest: Manifest, groupings: Sequence[Grouping], kept: Mapping[str, Tensor] | None = None):
        self._manifest, self.groupings = manifest, tuple(groupings)
        self._numbers = {p.name: number for number, p in enumerate(manifest.parameters)}
        self._grown = {name: Grown.of(t) for name, t in (kept or {}).items() if name[0].isdigit()}
        self._maps = {name: t.clone() for name, t in (kept or {}).items() if name.startswith("initial.")}
        self._signs = {name: bool(t) for name, t in (kept or {}).items() if name.startswith("negative.")}
        self._groups = [0] * len(self.groupings)
        for name, value in (kept or {}).items():
            if name.endswith(".visits"):
                grouping = int(name.split(".")[0])
                self._groups[grouping] = max(self._groups[grouping], len(value))

    def fold(self, number: int, layer: Layer, slots: Slots | None, updates: Mapping[str, Updates]) -> None:
        """Fold a stretch of one layer. updates: by the parameter's full name."""
        if slots is not None and len(slots.steps):
            self._fold_keys(number, slots)
        for name, some in updates.items():
            self._fold_initial(name, some)
            for grouping in range(len(self.groupings)):
                if self.groupings[grouping].kind != "keys":
                    self._fold_deltas(grouping, name, slots, some, is_bias=name == layer.bias)

    def nbytes(self, groups: Sequence[int]) -> int:
        """How much memory the totals take with so many groups for each grouping."""
        total = 0
        for grouping, count in zip(self.groupings, groups, strict=True):
            for layer in self._manifest.layers:
                total += 4 * count * layer.d_in if grouping.kind != "deltas" else 0
            for p in self._manifest.parameters:
                size = 8 if p.dtype == "float64" else 4
                total += 2 * size * count * int(np.prod(p.shape)) if grouping.kind != "keys" else 0
        return total

    def tensors(self, groups: Sequence[int]) -> dict[str, Tensor]:
        """Everything, as it is stored. groups: how many there are of each grouping."""
        found: dict[str, Tensor] = {
            name: grown.rows(groups[int(name.split(".")[0])] + name.endswith(".rest")).clone()
            for name, grown in self._grown.items()
        }
        found.update({name: value.clone() for name, value in self._maps.items()})
        found.update({name: torch.tensor([negative]) for name, negative in self._signs.items()})
        return found

    def _rows(self, name: str, count: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if name not in self._grown:
            self._grown[name] = Grown(shape, dtype)
        return self._grown[name].rows(count)

    def _fold_keys(self, number: int, slots: Slots) -> None:
        sign = f"negative.{number}"
        self._signs[sign] = self._signs.get(sign, False) or bool((slots.keys < 0).any())
        for grouping, codes in enumerate(slots.groups):
            count = self._seen(grouping, codes)
            which = torch.from_numpy(codes)
            visits = self._rows(f"{grouping}.{number}.visits", count, (), torch.int64)
            visits.index_add_(0, which, torch.ones_like(which))
            if self.groupings[grouping].kind != "deltas":
                wide = slots.keys.dtype == torch.float64
                kind = torch.float64 if wide else torch.float32
                sums = self._rows(f"{grouping}.{number}.keys", count, slots.keys.shape[1:], kind)
                sums.index_add_(0, which, slots.keys.to(kind))

    def _seen(self, grouping: int, codes: Ints) -> int:
        self._groups[grouping] = max(self._groups[grouping], int(codes.max()) + 1)
        return self._groups[grouping]

    def _fold_initial(self, name: str, some: Updates) -> None:
        """X_T in terms of W_0 and state_0: one row of numbers for the parameter and for each state tensor."""
        states = ("weight", *STATE[some.kind])
        stretch = torch.zeros(len(states), len(states), dtype=torch.float64)
        for row, target in enumerate(states):
            replayed = some.replayed(target)
            numbers = [replayed.a, *(replayed.b[s] for s in STATE[some.kind])]
            stretch[row] = torch.tensor(numbers, dtype=torch.float64)
        key = f"initial.{self._numbers[name]}"
        before = self._maps.get(key, torch.eye(len(states), dtype=torch.float64))
        self._maps[key] = stretch @ before

    def _fold_deltas(self, grouping: int, name: str, slots: Slots | None, some: Updates, *, is_bias: bool) -> None:
        parameter = self._manifest.parameters[self._numbers[name]]
        dtype = torch.float64 if parameter.dtype == "float64" else torch.float32
        count, extra = self._groups[grouping], 1 if is_bias else 0
        states = ("weight", *STATE[some.kind])
        prefix = f"{grouping}.p{self._numbers[name]}"
        # A bias has one more row, the first: what its gradients hold beyond the sum of their slots (rounding)
        names = {of: f"{prefix}.{of}{'.rest' if is_bias else ''}" for of in states}
        held = {of: self._rows(names[of], count + extra, parameter.shape, dtype) for of in states}
        before = {of: held[of].clone() for of in states}
        scales = []
        for of in states:
            replayed = some.replayed(of)
            held[of].copy_(before["weight"] * replayed.a)
            for state, b in replayed.b.items():
                held[of].add_(before[state], alpha=b)
            if slots is not None and slots.errors is not None:
                scales.append(-some.of_slots(replayed.c, slots))
            if is_bias and some.gradients is not None:
                held[of][0] -= (torch.from_numpy(replayed.c) @ some.gradients.double()).to(dtype)
        if slots is None or slots.errors is None or not len(slots.steps):
            return
        codes = slots.groups[grouping]
        order = np.argsort(codes, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
            group, which = int(codes[part[0]]), torch.from_numpy(part)
            errors = slots.errors[which].to(dtype)
            for of, scale in zip(states, scales, strict=True):
                written = errors * torch.from_numpy(scale[part]).to(dtype).unsqueeze(1)
                if is_bias:
                    total = written.sum(0)
                    held[of][group + 1] += total
                    held[of][0] -= total
                else:
                    held[of][group] += written.T @ slots.keys[which].to(dtype)
