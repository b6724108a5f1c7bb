"""A stretch of training, as totals fold it: the slots of each layer, and the updates of each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Bools, Floats, Ints
from dualform.layers.keys import KeysOrGradients, Patches
from dualform.layers.layer import Use
from dualform.recursions import Updates, Walked


@dataclass(frozen=True)
class Piece:
    """Some slots of one layer in a stretch: all of one call, or several calls where keys are vectors."""

    keys: KeysOrGradients
    errors: Tensor | None
    """(n, d_out); None if only keys are wanted."""
    steps: Ints
    """(n,)"""
    backwards: Ints
    """(n,)"""
    groups: Sequence[Ints]
    """For each grouping: the group of each slot, (n,)."""
    written: Bools | None = None
    """(n,): which slots wrote something; only their keys are summed. None: all of them."""

    def __len__(self) -> int:
        return len(self.steps)

    def select(self, places: slice | Ints) -> Piece:
        """Return some of the slots. A piece of feature maps is of one call, and is not cut."""
        assert not isinstance(self.keys, Patches)
        which = torch.from_numpy(places) if isinstance(places, np.ndarray) else places
        return Piece(
            keys=self.keys.select(which),
            errors=None if self.errors is None else self.errors[which],
            steps=self.steps[places],
            backwards=self.backwards[places],
            groups=[codes[places] for codes in self.groups],
        )


Uses = Sequence[tuple[Use, Piece]]
"""The slots that make up a parameter, each piece with the use that says how."""


@dataclass(frozen=True)
class Rounded:
    """Gradients of some updates that were rounded to 16 bits (autocast)."""

    units: Floats
    """(updates,): the unit roundoff of the 16-bit type; 0: the gradient was not rounded so."""
    rests: Floats
    """(updates,): how far the gradient is from what its slots say, as a norm; 0 where it was not rounded so."""


@dataclass(frozen=True)
class StretchUpdates(Updates):
    """The updates of one parameter in a stretch, with what folding needs besides."""

    gradients: Tensor | None = None
    """(updates, d_out), for biases."""
    at_end: Mapping[str, Walked] | None = None
    """Their coefficients at the end of the run, for the weight and its average (FOLDED); None: not known yet."""
    rounded: Rounded | None = None
    """What rounding to 16 bits did to their gradients; None: nothing, or all updates are stored, so that it can be computed later."""

    def slot_scales(self, coefficients: Floats, slots: Piece) -> Floats:
        """Return coefficient × factor of each slot, (n,); 0 where the parameter was not updated."""
        updates, backward_passes = self.factors.shape
        # The last row and column are zeros, for slots of other steps and other backward passes
        table = np.zeros((updates + 1, backward_passes + 1))
        table[:-1, :-1] = coefficients[:, None] * self.factors
        is_updated = np.isin(slots.steps, self.steps)
        update = np.searchsorted(self.steps, slots.steps)
        row = np.where(is_updated, update, updates)
        column = np.minimum(slots.backwards, backward_passes)
        scales: Floats = table[row, column]
        return scales

    def slot_factors(self, update: int, slots: Piece) -> Floats:
        """Return the factor of each slot of the step of one update, (n,)."""
        factors = np.append(self.factors[update], 0.0)
        last = len(factors) - 1
        slot_factors: Floats = factors[np.minimum(slots.backwards, last)]
        return slot_factors
