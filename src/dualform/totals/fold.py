"""Folding a stretch of training into totals: key sums, and each group's part of the weights.

Over a stretch, the optimizer's recursion is a linear map of a group's part of the weights and of the state (ΔW_g, Δstate_g), plus the
group's gradients, each times a coefficient that is known at the end of the stretch. So each group takes one matrix product, and the
recursion need not run step by step. Where coefficients are matrices it does: elementwise.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Floats
from dualform.layers.keys import KeysOrGradients, OneHot, RowGradients
from dualform.recursions import KINDS, Walked
from dualform.store.format import Grouping, Manifest
from dualform.totals.elementwise import ElementwiseFold
from dualform.totals.group_tensors import FOLDED, Deltas, GroupTensors
from dualform.totals.stretch import Piece, StretchUpdates, Uses
from dualform.totals.written import add_by_group

WITHOUT_GROUPS = ("initial.", "now.", "rounded.")
"""How the names of tensors begin that belong to no group."""


class Accumulated:
    """The totals of a recording, in memory.

    Its tensors, by the names that they have in the store; layers and parameters are numbers:

    - `{grouping}.{layer}.keys`, `{grouping}.{layer}.visits`: key sums and numbers of slots, one row a group.
    - `{grouping}.p{parameter}.weight`, `….average`: the group deltas. For biases the name ends in `.rest`, and row 0 is what their
      gradients hold beyond their slots.
    - `initial.{parameter}`: the coefficients of the initial part. Where coefficients are matrices, `initial.{parameter}.weight` and
      `….average` are the initial part itself, and `now.{parameter}.…` the parameter and its optimizer state.
    - `negative.{layer}`: whether any key has a negative element.
    - `rounded.{parameter}`, if slots are not kept: what rounding to 16 bits under autocast may have done, as the covariance of its effects on
      parameter and average. Where coefficients are matrices, `rounded.{parameter}.…` is `now` with gradients disturbed by as much.
    """

    def __init__(
        self,
        manifest: Manifest,
        groupings: Sequence[Grouping],
        kept: Mapping[str, Tensor] | None = None,
        beginning: Mapping[str, Tensor] | None = None,
    ):
        """kept: totals to continue. beginning: the snapshot that training began from, needed if there are none."""
        self.groupings = tuple(groupings)
        self._manifest = manifest
        self._numbers = {parameter.name: number for number, parameter in enumerate(manifest.parameters)}
        self._by_group = GroupTensors(len(self.groupings))
        self._without_groups: dict[str, Tensor] = {}
        self._negative: dict[str, bool] = {}
        self._beginning = beginning
        for name, tensor in (kept or {}).items():
            self._restore(name, tensor)

    def _restore(self, name: str, tensor: Tensor) -> None:
        if name.startswith("negative."):
            self._negative[name] = bool(tensor)
        elif name.startswith(WITHOUT_GROUPS):
            self._without_groups[name] = tensor.clone()
        else:
            self._by_group.restore(name, tensor)

    def fold(self, slots: Mapping[int, Sequence[Piece]], updates: Mapping[str, StretchUpdates]) -> None:
        """Fold a stretch. slots: by the layer's number; updates: by the parameter's full name."""
        for layer, pieces in slots.items():
            for piece in pieces:
                if len(piece):
                    self._fold_keys(layer, piece)
        for name, of_parameter in updates.items():
            uses = self._uses(name, slots)
            self._fold_updates(self._numbers[name], uses, of_parameter)

    def _fold_updates(self, number: int, uses: Uses, updates: StretchUpdates) -> None:
        """Fold the updates of one parameter."""
        deltas = {}
        for place, grouping in enumerate(self.groupings):
            if grouping.kind != "keys":
                deltas[place] = self._by_group.deltas(place, number, self._manifest)
        if KINDS[updates.kind].elementwise:
            fold = ElementwiseFold(self._manifest, number, updates, self._without_groups, self._beginning)
            fold.fold(uses, deltas)
            return
        self._fold_initial(number, updates)
        for place, held in deltas.items():
            _fold_deltas(held, place, uses, updates)

    def _uses(self, parameter: str, slots: Mapping[int, Sequence[Piece]]) -> Uses:
        """Return the slots that make up a parameter."""
        uses = []
        for number, layer in enumerate(self._manifest.layers):
            for use in layer.uses:
                if use.parameter != parameter:
                    continue
                pieces = slots.get(number, ())
                uses += [(use, piece) for piece in pieces if len(piece)]
        return uses

    def nbytes(self, groups: Sequence[int]) -> int:
        """Return how much memory the totals take with this many groups for each grouping."""
        key_bytes = 4 * sum(layer.d_in for layer in self._manifest.layers)
        delta_bytes = 0
        for parameter in self._manifest.parameters:
            item_size = 8 if parameter.dtype == "float64" else 4
            delta_bytes += len(FOLDED) * item_size * math.prod(parameter.shape)
        total = 0
        for grouping, count in zip(self.groupings, groups, strict=True):
            if grouping.kind != "deltas":
                total += count * key_bytes
            if grouping.kind != "keys":
                total += count * delta_bytes
        return total

    def tensors(self, groups: Sequence[int]) -> dict[str, Tensor]:
        """Return everything as it is stored; not copied. groups: how many there are of each grouping."""
        tensors = self._by_group.tensors(groups)
        tensors.update(self._without_groups)
        for name, is_negative in self._negative.items():
            tensors[name] = torch.tensor([is_negative])
        return tensors

    def _fold_keys(self, number: int, slots: Piece) -> None:
        """Add the keys of slots that wrote something to the sums of their groups, and count them."""
        layer = self._manifest.layers[number]
        is_one_hot = isinstance(slots.keys, OneHot)
        keys = _written_only(slots, _key_numbers(slots.keys))
        is_negative = not is_one_hot and bool((keys < 0).any())
        sign = f"negative.{number}"
        self._negative[sign] = self._negative.get(sign, False) or is_negative
        dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
        for grouping, codes in enumerate(slots.groups):
            groups_so_far = int(codes.max()) + 1
            self._by_group.count(grouping, groups_so_far)
            groups = _written_only(slots, torch.from_numpy(codes))
            visits = self._by_group.rows(f"{grouping}.{number}.visits", (), torch.int64)
            visits.index_add_(0, groups, torch.ones_like(groups))
            if self.groupings[grouping].kind == "deltas" or not layer.attends:
                continue
            sums = self._by_group.rows(f"{grouping}.{number}.keys", (layer.d_in,), dtype)
            if is_one_hot:
                ones = sums.new_ones(len(groups))
                sums.index_put_((groups, keys), ones, accumulate=True)
            else:
                sums.index_add_(0, groups, keys.to(dtype))

    def _fold_initial(self, number: int, updates: StretchUpdates) -> None:
        """Update the coefficients of the initial part: a row of two numbers for the parameter, and one for its average."""
        tensors = self._without_groups
        walked = [updates.walked(name) for name in FOLDED]
        stretch = torch.tensor([[one.a, one.b] for one in walked], dtype=torch.float64)
        nothing = torch.zeros_like(stretch)
        unchanged = torch.eye(2, dtype=torch.float64)
        initial = f"initial.{number}"
        before = tensors.get(initial, unchanged)
        tensors[initial] = stretch @ before
        rounded = f"rounded.{number}"
        if rounded in tensors:
            tensors[rounded] = stretch @ tensors[rounded] @ stretch.T
        name = self._manifest.parameters[number].name
        if updates.rounded is None or self._manifest.is_vector(name):
            return  # the gradients of vectors are recorded exactly
        # The roundings of different steps are independent of each other: their variances add up
        rests = updates.rounded.rests
        effects = torch.from_numpy(np.stack([one.c * rests for one in walked]))
        tensors[rounded] = tensors.get(rounded, nothing) + effects @ effects.T


def _fold_deltas(deltas: Deltas, grouping: int, uses: Uses, updates: StretchUpdates) -> None:
    """Add what a stretch's slots wrote to their groups' parts of a parameter, where coefficients are numbers."""
    coefficients = updates.at_end
    if coefficients is None:
        coefficients = {name: updates.walked(name) for name in FOLDED}
        _carry(deltas, coefficients)
    for name, target in deltas.items():
        by_update = coefficients[name].c
        rest = None
        if deltas.has_rest:
            rest = target[0]
            target = target[1:]
            _subtract_gradients(rest, updates, by_update)
        for use, piece in uses:
            if piece.errors is not None:
                scale = -updates.slot_scales(by_update, piece)
                add_by_group(target, rest, grouping, use, piece, scale)


def _carry(deltas: Deltas, coefficients: Mapping[str, Walked]) -> None:
    """Apply the updates of a stretch to what groups had before it."""
    weight = deltas.weight.clone()
    average = deltas.average.clone()
    for name, target in deltas.items():
        walked = coefficients[name]
        torch.mul(weight, walked.a, out=target)
        target.add_(average, alpha=walked.b)


def _subtract_gradients(rest: Tensor, updates: StretchUpdates, coefficients: Floats) -> None:
    """Subtract what the recorded gradients of a vector did to it, whether or not slots explain it."""
    if updates.gradients is not None:
        gradients = updates.gradients.double()
        written = torch.tensordot(torch.from_numpy(coefficients), gradients, 1)
        rest -= written.to(rest.dtype)


def _key_numbers(keys: KeysOrGradients) -> Tensor:
    """Return the numbers that are summed: vectors, or the places of one-hot keys. Gradients of rows have no keys to sum."""
    if isinstance(keys, RowGradients):
        return keys.data[:, :0]
    return keys.places if isinstance(keys, OneHot) else keys.vectors()


def _written_only(slots: Piece, values: Tensor) -> Tensor:
    """Return the entries of slots that wrote something. values: (n, …)."""
    if slots.written is None:
        return values
    places = np.flatnonzero(slots.written)
    return values[torch.from_numpy(places)]
