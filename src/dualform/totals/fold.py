"""Folding a stretch of training into totals: key sums, and each group's part of the weights.

Over a stretch, the optimizer's recursion maps a group's part of the weights and of the state (ΔW_g, Δstate_g) linearly,
and adds the group's gradients with coefficients known at its end: one matrix product for each group, and the recursion
itself need not be run step by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.layers.keys import KeysOrGradients, Numbers, RowGradients, Vectors
from dualform.layers.keys import part as columns
from dualform.layers.streams import Use
from dualform.recursions import KINDS, Floats, Ints, Kind, Linear, Updates, Walked, at_rest, outer
from dualform.store.format import Grouping, Manifest
from dualform.totals.rounding import ROUNDED_WITHIN, ROUNDINGS_WITHIN, coarse_spread

Uses = Sequence[tuple[Use, "Piece"]]
"""The slots that make up a parameter, each piece with how they do so."""
Bools = np.ndarray[Any, np.dtype[np.bool_]]
OF = ("weight", "average")
"""What is kept of a group: its part of the parameter, and of the optimizer's running average."""
MAPS = ("initial.", "now.", "rounded.")
"""How the names of tensors begin that belong to no group."""


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
    """(n,): which slots wrote something, so that their keys are counted; None: all of them, as far as is known."""

    def some(self, here: slice) -> Piece:
        """Return some of the slots. A piece of feature maps is of one call, and is not cut."""
        assert isinstance(self.keys, (Vectors, Numbers, RowGradients))
        errors = None if self.errors is None else self.errors[here]
        groups = [codes[here] for codes in self.groups]
        return Piece(self.keys.some(here), errors, self.steps[here], self.backwards[here], groups)


@dataclass(frozen=True)
class Rounded:
    """Gradients of some updates that were rounded to 16 bits (autocast)."""

    units: Floats
    """(updates,): the unit roundoff of the 16-bit type; 0: the gradient was not rounded so."""
    rests: Floats
    """(updates,): how far the gradient is from what its slots say, as a norm; 0 where it was not rounded so."""


@dataclass(frozen=True)
class StretchUpdates(Updates):
    """The updates of one parameter in a stretch, with what folding needs to know."""

    gradients: Tensor | None = None
    """(updates, d_out), for biases."""
    reaching: Mapping[str, Walked] | None = None
    """Their coefficients at the end of the run, by what is kept of a group, where they are known in advance."""
    rounded: Rounded | None = None
    """What rounding to 16 bits has done to their gradients; None: nothing, or it is not asked for, since all updates are kept."""

    def of_slots(self, coefficients: Floats, slots: Piece) -> Floats:
        """Return coefficient × factor of each slot, (n,); 0 where the parameter was not updated."""
        count, backward_passes = self.factors.shape
        # One more row and column of zeros, for slots of other steps and other backward passes
        table = np.zeros((count + 1, backward_passes + 1))
        table[:-1, :-1] = coefficients[:, None] * self.factors
        row = np.searchsorted(self.steps, slots.steps)
        is_updated = np.isin(slots.steps, self.steps)
        column = np.minimum(slots.backwards, backward_passes)
        scales: Floats = table[np.where(is_updated, row, count), column]
        return scales

    def scales_in(self, place: int, slots: Piece) -> Floats:
        """Return the factor of each slot of the step of one update, (n,)."""
        factors = np.append(self.factors[place], 0.0)
        scales: Floats = factors[np.minimum(slots.backwards, len(factors) - 1)]
        return scales


class Grown:
    """A tensor with one row for each group, which grows as groups appear."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype):
        self._data = torch.zeros(0, *shape, dtype=dtype)
        self._used = 0

    @classmethod
    def of(cls, data: Tensor) -> Grown:
        """Go on with a tensor that was kept."""
        grown = cls(data.shape[1:], data.dtype)
        grown._data = data.clone()
        grown._used = len(data)
        return grown

    def rows(self, count: int) -> Tensor:
        """Return the first `count` rows, new ones zero."""
        if count > len(self._data):
            capacity = max(count, 2 * len(self._data))
            # NumPy's zeros take memory only when they are touched
            dtype = torch.empty(0, dtype=self._data.dtype).numpy().dtype
            larger = torch.from_numpy(np.zeros((capacity, *self._data.shape[1:]), dtype=dtype))
            larger[: self._used] = self._data[: self._used]
            self._data = larger
        self._used = max(self._used, count)
        return self._data[:count]


@dataclass(frozen=True)
class Deltas:
    """The parts of a parameter, and of the optimizer's running average of it, that belong to each group."""

    weight: Tensor
    """(groups, *shape)"""
    average: Tensor
    """(groups, *shape)"""
    has_rest: bool
    """Of a bias: there is one more row, the first, for what its gradients hold beyond the sum of their slots (rounding)."""


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
        self._manifest = manifest
        self.groupings = tuple(groupings)
        self._with_deltas = [n for n, grouping in enumerate(self.groupings) if grouping.kind != "keys"]
        """The numbers of the groupings that keep each group's part of the weights."""
        self._numbers = {parameter.name: number for number, parameter in enumerate(manifest.parameters)}
        self._beginning = beginning
        self._grown: dict[str, Grown] = {}
        self._maps: dict[str, Tensor] = {}
        self._signs: dict[str, bool] = {}
        self._groups = [0] * len(self.groupings)
        """How many groups of each grouping have appeared."""
        for name, tensor in (kept or {}).items():
            self._restore(name, tensor)

    def _restore(self, name: str, tensor: Tensor) -> None:
        if name.startswith("negative."):
            self._signs[name] = bool(tensor)
        elif name.startswith(MAPS):
            self._maps[name] = tensor.clone()
        else:
            self._grown[name] = Grown.of(tensor)
        if name.endswith(".visits"):
            grouping = int(name.split(".")[0])
            self._groups[grouping] = max(self._groups[grouping], len(tensor))

    def fold(self, slots: Mapping[int, Sequence[Piece]], updates: Mapping[str, StretchUpdates]) -> None:
        """Fold a stretch. slots: by the layer's number; updates: by the parameter's full name."""
        for number, pieces in slots.items():
            for piece in pieces:
                if len(piece.steps):
                    self._fold_keys(number, piece)
        for name, some in updates.items():
            uses = self._uses(name, slots)
            if KINDS[some.kind].elementwise:
                self._fold_elementwise(name, uses, some)
                continue
            self._fold_initial(name, some)
            for grouping in self._with_deltas:
                self._fold_deltas(grouping, name, uses, some)

    def _uses(self, parameter: str, slots: Mapping[int, Sequence[Piece]]) -> Uses:
        uses = []
        for number, layer in enumerate(self._manifest.layers):
            pieces = [piece for piece in slots.get(number, ()) if len(piece.steps)]
            for use in layer.uses:
                if use.parameter == parameter:
                    uses += [(use, piece) for piece in pieces]
        return uses

    def nbytes(self, groups: Sequence[int]) -> int:
        """Return how much memory the totals take with this many groups for each grouping."""
        key_numbers = sum(layer.d_in for layer in self._manifest.layers)
        delta_bytes = 0
        for parameter in self._manifest.parameters:
            item_size = 8 if parameter.dtype == "float64" else 4
            delta_bytes += len(OF) * item_size * int(np.prod(parameter.shape))
        total = 0
        for grouping, count in zip(self.groupings, groups, strict=True):
            if grouping.kind != "deltas":
                total += 4 * count * key_numbers
            if grouping.kind != "keys":
                total += count * delta_bytes
        return total

    def tensors(self, groups: Sequence[int]) -> dict[str, Tensor]:
        """Return everything as it is stored; not copied. groups: how many there are of each grouping."""
        tensors = {}
        for name, grown in self._grown.items():
            count = groups[int(name.split(".")[0])]
            tensors[name] = grown.rows(count + 1 if name.endswith(".rest") else count)
        tensors.update(self._maps)
        tensors.update({name: torch.tensor([negative]) for name, negative in self._signs.items()})
        return tensors

    def _rows(self, name: str, count: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if name not in self._grown:
            self._grown[name] = Grown(shape, dtype)
        return self._grown[name].rows(count)

    # Keys

    def _fold_keys(self, number: int, slots: Piece) -> None:
        """Add the keys of slots that wrote something to the sums of their groups, and count them."""
        layer = self._manifest.layers[number]
        is_one_hot = isinstance(slots.keys, Numbers)
        keys = _written_only(slots, _key_numbers(slots.keys))
        sign = f"negative.{number}"
        is_negative = not is_one_hot and bool((keys < 0).any())
        self._signs[sign] = self._signs.get(sign, False) or is_negative
        for grouping, codes in enumerate(slots.groups):
            self._groups[grouping] = max(self._groups[grouping], int(codes.max()) + 1)
            count = self._groups[grouping]
            groups = _written_only(slots, torch.from_numpy(codes))
            visits = self._rows(f"{grouping}.{number}.visits", count, (), torch.int64)
            visits.index_add_(0, groups, torch.ones_like(groups))
            if self.groupings[grouping].kind == "deltas" or not layer.attends:
                continue
            dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
            sums = self._rows(f"{grouping}.{number}.keys", count, (layer.d_in,), dtype)
            if is_one_hot:
                sums.index_put_((groups, keys), sums.new_ones(len(groups)), accumulate=True)
            else:
                sums.index_add_(0, groups, keys.to(dtype))

    # Optimizers whose coefficients are numbers

    def _fold_initial(self, name: str, some: StretchUpdates) -> None:
        """Update X_T in terms of W_0 and average_0: one row of numbers for the parameter and for its average."""
        walked = [some.walked(of) for of in OF]
        stretch = torch.tensor([[w.a, w.b] for w in walked], dtype=torch.float64)
        initial = f"initial.{self._numbers[name]}"
        self._maps[initial] = stretch @ self._maps.get(initial, torch.eye(2, dtype=torch.float64))
        rounded = f"rounded.{self._numbers[name]}"
        if rounded in self._maps:
            self._maps[rounded] = stretch @ self._maps[rounded] @ stretch.T
        if some.rounded is not None and not self._is_vector(name):  # the gradients of vectors are kept as they were
            # The roundings of different steps are independent of each other: their variances add up
            effects = torch.from_numpy(np.stack([w.c * some.rounded.rests for w in walked]))
            before = self._maps.get(rounded, torch.zeros(2, 2, dtype=torch.float64))
            self._maps[rounded] = before + effects @ effects.T

    def _is_vector(self, name: str) -> bool:
        return any(name in layer.vectors() for layer in self._manifest.layers)

    def _deltas(self, grouping: int, name: str) -> Deltas:
        """Return the parts of a parameter that belong to each group, to be changed in place."""
        number = self._numbers[name]
        parameter = self._manifest.parameters[number]
        dtype = torch.float64 if parameter.dtype == "float64" else torch.float32
        has_rest = self._is_vector(name)
        count = self._groups[grouping] + has_rest
        suffix = ".rest" if has_rest else ""
        weight, average = (self._rows(f"{grouping}.p{number}.{of}{suffix}", count, parameter.shape, dtype) for of in OF)
        return Deltas(weight, average, has_rest)

    def _fold_deltas(self, grouping: int, name: str, uses: Uses, some: StretchUpdates) -> None:
        deltas = self._deltas(grouping, name)
        targets = dict(zip(OF, (deltas.weight, deltas.average), strict=True))
        if some.reaching is None:
            weight = deltas.weight.clone()
            average = deltas.average.clone()
            for of, target in targets.items():
                walked = some.walked(of)
                target.copy_(weight * walked.a).add_(average, alpha=walked.b)
        for of, target in targets.items():
            coefficients = (some.walked(of) if some.reaching is None else some.reaching[of]).c
            if deltas.has_rest and some.gradients is not None:
                written = torch.tensordot(torch.from_numpy(coefficients), some.gradients.double(), 1)
                target[0] -= written.to(target.dtype)
            for use, piece in uses:
                if piece.errors is not None:
                    scale = -some.of_slots(coefficients, piece)
                    _add_by_group(target, deltas.has_rest, grouping, use, piece, scale)

    # Optimizers whose coefficients are matrices

    def _fold_elementwise(self, name: str, uses: Uses, some: StretchUpdates) -> None:
        """Run the optimizer's own recursion on every group, with the state that all groups share."""
        number = self._numbers[name]
        kind = KINDS[some.kind]
        if f"now.{number}.weight" not in self._maps:
            self._begin(number, name, kind)
        now = self._states("now", number, kind)
        initial = self._maps[f"initial.{number}.weight"], self._maps[f"initial.{number}.average"]
        deltas = {grouping: self._deltas(grouping, name) for grouping in self._with_deltas}
        for place, step in enumerate(some.steps.tolist()):
            settings = some.at(place)
            here = _of_step(uses, step)
            if self._is_vector(name):
                gradient, parts = _vector_gradient(here, some, place, now["weight"], deltas)
            else:
                gradient, parts = _matrix_gradient(here, some, place, now["weight"], deltas)
                noise = self._noise(number, some, place, here, gradient)
                self._fold_rounding(number, kind, settings, gradient, noise)
            linear = _update(now, kind, settings, gradient)
            linear.apply(*initial, None)
            for grouping, held in deltas.items():
                linear.apply(held.weight, held.average, parts[grouping])

    def _states(self, prefix: str, number: int, kind: Kind) -> dict[str, Tensor]:
        """Return a parameter and its optimizer state, to be changed in place."""
        return {of: self._maps[f"{prefix}.{number}.{of}"] for of in (*OF, *kind.shared)}

    def _noise(self, number: int, some: StretchUpdates, place: int, here: Uses, gradient: Tensor) -> Tensor | None:
        """Return as much random noise as rounding to 16 bits has added to a gradient; None: it has not."""
        if some.rounded is None or not some.rounded.units[place]:
            return None
        name = self._manifest.parameters[number].name
        within = ROUNDED_WITHIN in {layer.kind for layer in self._manifest.layers if name in layer.parameters}
        squares = _squares_of_parts(here, some.factors[place], gradient, within=within)
        rest = float(some.rounded.rests[place])
        unit = float(some.rounded.units[place])
        spread = coarse_spread(squares, rest, unit, ROUNDINGS_WITHIN if within else 1)
        # The same in a recording that was interrupted and resumed
        seed = int(some.steps[place]) * len(self._numbers) + number
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype) * spread.sqrt()

    def _fold_rounding(
        self, number: int, kind: Kind, settings: dict[str, float], gradient: Tensor, noise: Tensor | None
    ) -> None:
        """Update a copy of the parameter whose gradients have noise, from the first one on that has."""
        if f"rounded.{number}.weight" not in self._maps:
            if noise is None:
                return
            for of, state in self._states("now", number, kind).items():
                self._maps[f"rounded.{number}.{of}"] = state.clone()
        disturbed = self._states("rounded", number, kind)
        _update(disturbed, kind, settings, gradient if noise is None else gradient + noise)

    def _begin(self, number: int, name: str, kind: Kind) -> None:
        """Take a parameter and its optimizer state as they were when recording began."""
        assert self._beginning is not None
        weight = self._beginning[f"model.{name}"]
        states = {"weight": weight}
        for of, stored in (("average", kind.average), *((of, of) for of in kind.shared)):
            states[of] = self._beginning.get(f"state.{name}.{stored}", torch.zeros_like(weight))
        for of, state in states.items():
            self._maps[f"now.{number}.{of}"] = state.clone()
        for of in OF:
            self._maps[f"initial.{number}.{of}"] = states[of].clone()


def _key_numbers(keys: KeysOrGradients) -> Tensor:
    """Return what is summed of keys: vectors, or of one-hot keys their places. Of the gradients of rows, nothing is."""
    if isinstance(keys, RowGradients):
        return keys.data[:, :0]
    return keys.places if isinstance(keys, Numbers) else keys.vectors()


def _written_only(slots: Piece, values: Tensor) -> Tensor:
    """Return the entries of slots that wrote something. values: (n, …)."""
    if slots.written is None:
        return values
    return values[torch.from_numpy(np.flatnonzero(slots.written))]


def _of_step(uses: Uses, step: int) -> Uses:
    """Return the slots of one step."""
    here = []
    for use, piece in uses:
        low, high = np.searchsorted(piece.steps, [step, step + 1]).tolist()
        if low < high:
            here.append((use, piece if high - low == len(piece.steps) else piece.some(slice(low, high))))
    return here


def _own_rows(use: Use, tensor: Tensor) -> Tensor:
    """Return the rows of a parameter that a use makes up, as a view."""
    return tensor[use.rows[0] : use.rows[1]] if use.rows else tensor


def _add_by_group(target: Tensor, has_rest: bool, grouping: int, use: Use, piece: Piece, scale: Floats) -> None:
    """Add what each group's slots wrote, each slot scaled. target: (groups, *shape), one more row if it has a rest."""
    codes = piece.groups[grouping]
    order = np.argsort(codes, kind="stable")
    order = order[scale[order] != 0]
    if not len(order):
        return
    cuts = np.flatnonzero(np.diff(codes[order])) + 1
    for slots in np.split(order, cuts):
        group_scale = np.zeros(len(codes))
        group_scale[slots] = scale[slots]
        written = _written(use, piece, slots, torch.from_numpy(group_scale).to(target.dtype))
        own = _own_rows(use, target[int(codes[slots[0]]) + has_rest])
        own += written.reshape(own.shape)
        if has_rest:
            rest = _own_rows(use, target[0])
            rest -= written.reshape(rest.shape)


def _vector_gradient(
    here: Uses, some: StretchUpdates, place: int, like: Tensor, deltas: Mapping[int, Deltas]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the gradient of a bias in one update, and by grouping, what each group's slots added to it."""
    gradient = torch.zeros_like(like) if some.gradients is None else some.gradients[place].to(like.dtype)
    parts = {
        grouping: _parts_of_vector(grouping, here, some, place, gradient, len(held.weight))
        for grouping, held in deltas.items()
    }
    return gradient, parts


def _parts_of_vector(
    grouping: int, here: Uses, some: StretchUpdates, place: int, gradient: Tensor, count: int
) -> Tensor:
    """Return what a bias's gradient holds beyond its slots, and what the slots of each group added to it, (1 + groups, *shape).

    What slots write to a bias may cancel to rounding (before a normalisation, in an attention), and Adam divides that by its own size: the
    sums are made in a longer type, as they are for masks without totals.
    """
    longer: Any = np.longdouble if gradient.dtype == torch.float64 else np.float64
    parts = np.zeros((count, *gradient.shape), longer)
    for use, piece in here:
        assert piece.errors is not None
        written = _vectors_of_slots(use, piece)
        scale = some.scales_in(place, piece).astype(longer)
        scaled = written.numpy().astype(longer) * scale[:, None]
        own = parts[:, use.rows[0] : use.rows[1]] if use.rows else parts
        np.add.at(own, piece.groups[grouping] + 1, scaled.reshape(len(scaled), *own.shape[1:]))
    parts[0] = gradient.numpy().astype(longer) - parts[1:].sum(0)
    return torch.from_numpy(parts.astype(np.float64)).to(gradient.dtype)


def _matrix_gradient(
    here: Uses, some: StretchUpdates, place: int, like: Tensor, deltas: Mapping[int, Deltas]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the gradient of a matrix in one update, from its slots, and by grouping, what each group's slots added to it."""
    gradient = torch.zeros_like(like)
    parts = {grouping: torch.zeros_like(held.weight) for grouping, held in deltas.items()}
    for use, piece in here:
        scale = some.scales_in(place, piece)
        for grouping, part in parts.items():
            _add_by_group(part, False, grouping, use, piece, scale)
        own = _own_rows(use, gradient)
        own += _written(use, piece, None, torch.from_numpy(scale).to(like.dtype)).reshape(own.shape)
    return gradient, parts


def _squares_of_parts(here: Uses, factors: Floats, like: Tensor, *, within: bool) -> Iterator[Tensor]:
    """Yield squares of what each backward pass added to a gradient, for each use of the parameter; within: of what each slot added."""
    for use, piece in here:
        assert piece.errors is not None
        part = replace(piece, keys=piece.keys.squared(), errors=piece.errors.square()) if within else piece
        for backward in np.unique(piece.backwards).tolist():
            if backward >= len(factors):
                continue
            factor = factors[backward] ** 2 if within else factors[backward]
            scale = np.where(piece.backwards == backward, factor, 0.0)
            added = torch.zeros_like(like)
            own = _own_rows(use, added)
            own += _written(use, part, None, torch.from_numpy(scale).to(like.dtype)).reshape(own.shape)
            yield added if within else added.square()


def _update(now: Mapping[str, Tensor], kind: Kind, settings: dict[str, float], gradient: Tensor) -> Linear:
    """Do one update of a parameter and its optimizer state, in place; returns it as a linear map."""
    sign, decay, _ = outer(settings)
    pushed = gradient * sign + now["weight"] * decay
    shared = {of: now[of] for of in kind.shared}
    linear = kind.linear(settings, shared, pushed)
    linear = at_rest(linear, kind, settings, shared, (now["weight"], now["average"]), gradient)
    linear.apply(now["weight"], now["average"], gradient)
    return linear


def _vectors_of_slots(use: Use, piece: Piece) -> Tensor:
    """Return what each slot writes to a bias or an elementwise weight, (slots, d)."""
    assert piece.errors is not None
    if isinstance(piece.keys, RowGradients):
        return piece.keys.added_to(use)
    return piece.keys.vectors() if use.role == "scale" else columns(piece.errors, use.errors)


def _written(use: Use, piece: Piece, places: Ints | None, scale: Tensor) -> Tensor:
    """Return Σ over some slots of what a use makes of them, each scaled. places: of these slots; None: all of them."""
    assert piece.errors is not None
    keys = piece.keys
    errors = piece.errors
    if places is not None and isinstance(keys, (Vectors, Numbers, RowGradients)):
        which = torch.from_numpy(places)
        keys = keys.some(which)
        errors = errors[which]
        scale = scale[which]
    keys = keys.to(scale.dtype)
    if isinstance(keys, RowGradients):
        return keys.summed(use, scale)
    if use.role == "scale":
        return scale @ keys.vectors()
    errors = columns(errors.to(scale.dtype), use.errors) * scale.unsqueeze(1)
    if use.role == "bias":
        return errors.sum(0)
    written = keys.outer(errors, use.keys, use.groups)
    return written.T if use.role == "table" else written
