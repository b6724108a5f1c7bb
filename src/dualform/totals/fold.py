"""Folding a stretch of training into totals: key sums, and each group's part of the weights.

Over a stretch, the optimizer's recursion maps a group's part of the weights and of the state (ΔW_g, Δstate_g) linearly,
and adds the group's gradients with coefficients known at its end: one matrix product for each group, and the recursion
itself need not be run step by step. (It is where coefficients are matrices: elementwise.py.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dualform.layers.keys import Numbers
from dualform.recursions import KINDS
from dualform.store.format import Grouping, Manifest
from dualform.totals.elementwise import ElementwiseFold
from dualform.totals.group_tensors import OF, Deltas, GroupTensors
from dualform.totals.stretch import Piece, StretchUpdates, Uses
from dualform.totals.written import add_by_group

WITHOUT_GROUPS = ("initial.", "now.", "rounded.")
"""How the names of tensors begin that belong to no group."""


class Accumulated:
    """The totals of a recording, in memory.

    Tensors, as in the store: `{grouping}.{layer}.keys` and `.visits`, one row a group; `{grouping}.p{parameter}.weight` and
    `.average`, the group deltas (for biases with `.rest` at the end: row 0 is what their gradients hold beyond the slots);
    `initial.{parameter}`, the initial part's numbers, or, where coefficients are matrices, `initial.{parameter}.weight` and
    `.average`, the initial part itself, and `now.{parameter}.…`, the parameter and its optimizer state; `negative.{layer}`,
    whether any key was. If slots are not kept, what rounding to 16 bits under autocast may have done: `rounded.{parameter}`, the covariance of
    its effects on parameter and average, or, where coefficients are matrices, `rounded.{parameter}.…`, the same as `now` with gradients that
    are disturbed by as much.
    """

    def __init__(
        self,
        manifest: Manifest,
        groupings: Sequence[Grouping],
        kept: Mapping[str, Tensor] | None = None,
        beginning: Mapping[str, Tensor] | None = None,
    ):
        """kept: totals to go on with. beginning: else the snapshot that training began from."""
        self.groupings = tuple(groupings)
        self._manifest = manifest
        self._numbers = {parameter.name: number for number, parameter in enumerate(manifest.parameters)}
        self._by_group = GroupTensors(len(self.groupings))
        self._without_groups: dict[str, Tensor] = {}
        self._negative: dict[str, bool] = {}
        self._elementwise = ElementwiseFold(manifest, self._without_groups, beginning)
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
        with_deltas = [number for number, grouping in enumerate(self.groupings) if grouping.kind != "keys"]
        for name, of_parameter in updates.items():
            number = self._numbers[name]
            uses = self._uses(name, slots)
            deltas = {grouping: self._by_group.deltas(grouping, number, self._manifest) for grouping in with_deltas}
            if KINDS[of_parameter.kind].elementwise:
                self._elementwise.fold(number, uses, of_parameter, deltas)
                continue
            self._fold_initial(number, of_parameter)
            for grouping, held in deltas.items():
                _fold_deltas(held, grouping, uses, of_parameter)

    def _uses(self, parameter: str, slots: Mapping[int, Sequence[Piece]]) -> Uses:
        """Return the slots that make up a parameter."""
        uses = []
        for number, layer in enumerate(self._manifest.layers):
            pieces = [piece for piece in slots.get(number, ()) if len(piece)]
            for use in layer.uses:
                if use.parameter == parameter:
                    uses += [(use, piece) for piece in pieces]
        return uses

    def nbytes(self, groups: Sequence[int]) -> int:
        """Return how much memory the totals take with this many groups for each grouping."""
        key_bytes = 4 * sum(layer.d_in for layer in self._manifest.layers)
        delta_bytes = 0
        for parameter in self._manifest.parameters:
            item_size = 8 if parameter.dtype == "float64" else 4
            delta_bytes += len(OF) * item_size * math.prod(parameter.shape)
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
        is_one_hot = isinstance(slots.keys, Numbers)
        keys = slots.keys.places if isinstance(slots.keys, Numbers) else slots.keys.vectors()
        keys = _written_only(slots, keys)
        dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
        sign = f"negative.{number}"
        is_negative = not is_one_hot and bool((keys < 0).any())
        self._negative[sign] = self._negative.get(sign, False) or is_negative
        for grouping, codes in enumerate(slots.groups):
            self._by_group.count(grouping, int(codes.max()) + 1)
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
        """Update X_T in terms of W_0 and average_0: one row of numbers for the parameter and for its average."""
        tensors = self._without_groups
        walked = [updates.walked(of) for of in OF]
        stretch = torch.tensor([[of.a, of.b] for of in walked], dtype=torch.float64)
        initial = f"initial.{number}"
        before = tensors.get(initial, torch.eye(2, dtype=torch.float64))
        tensors[initial] = stretch @ before
        rounded = f"rounded.{number}"
        if rounded in tensors:
            tensors[rounded] = stretch @ tensors[rounded] @ stretch.T
        name = self._manifest.parameters[number].name
        if updates.rounded is None or self._manifest.is_vector(name):
            return  # the gradients of vectors are kept as they were
        # The roundings of different steps are independent of each other: their variances add up
        effects = torch.from_numpy(np.stack([of.c * updates.rounded.rests for of in walked]))
        before = tensors.get(rounded, torch.zeros(2, 2, dtype=torch.float64))
        tensors[rounded] = before + effects @ effects.T


def _fold_deltas(deltas: Deltas, grouping: int, uses: Uses, updates: StretchUpdates) -> None:
    """Add what a stretch's slots wrote to their groups' parts of a parameter, where coefficients are numbers."""
    targets = {"weight": deltas.weight, "average": deltas.average}
    coefficients = updates.reaching
    if coefficients is None:
        # What there was before goes through the recursion of the stretch
        coefficients = {of: updates.walked(of) for of in OF}
        weight = deltas.weight.clone()
        average = deltas.average.clone()
        for of, target in targets.items():
            walked = coefficients[of]
            target.copy_(weight * walked.a).add_(average, alpha=walked.b)
    for of, target in targets.items():
        by_update = coefficients[of].c
        groups = target[1:] if deltas.has_rest else target
        rest = target[0] if deltas.has_rest else None
        if rest is not None and updates.gradients is not None:
            written = torch.tensordot(torch.from_numpy(by_update), updates.gradients.double(), 1)
            rest -= written.to(rest.dtype)
        for use, piece in uses:
            if piece.errors is not None:
                scale = -updates.slot_scales(by_update, piece)
                add_by_group(groups, rest, grouping, use, piece, scale)


def _written_only(slots: Piece, values: Tensor) -> Tensor:
    """Return the entries of slots that wrote something. values: (n, …)."""
    if slots.written is None:
        return values
    places = np.flatnonzero(slots.written)
    return values[torch.from_numpy(places)]
