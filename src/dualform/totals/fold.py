"""Folding a stretch of training into totals.

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

from dualform.layers.keys import Keys, Numbers, Vectors
from dualform.layers.keys import part as columns
from dualform.layers.streams import Use
from dualform.recursions import KINDS, Floats, Kind, Linear, Walked, at_rest, outer, walk_back
from dualform.store.format import Grouping, Manifest
from dualform.totals.rounding import ROUNDED_WITHIN, ROUNDINGS_WITHIN, coarse_spread

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
OF = ("weight", "average")
"""What is kept of a group: its part of the parameter, and of the optimizer's running average."""
MAPS = ("initial.", "now.", "rounded.")
"""How the names of tensors begin that belong to no group."""


@dataclass(frozen=True)
class Piece:
    """Some slots of one layer in a stretch: all of one call, or several calls where keys are vectors."""

    keys: Keys
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


@dataclass(frozen=True)
class Rounded:
    """Gradients of some updates that were rounded to 16 bits (autocast)."""

    units: Floats
    """(updates,): the unit roundoff of the 16-bit type; 0: the gradient was not rounded so."""
    rests: Floats
    """(updates,): how far the gradient is from what its slots say, as a norm; 0 where it was not rounded so."""


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
    reaching: Mapping[str, Walked] | None = None
    """Their coefficients at the end of the run, by what is kept of a group, where they are known in advance."""
    rounded: Rounded | None = None
    """What rounding to 16 bits has done to their gradients; None: nothing, or it is not asked for, since all updates are kept."""

    def walked(self, of: str) -> Walked:
        """What becomes of the stretch's beginning and of its gradients."""
        return walk_back(self.kind, self.settings, len(self.steps), of)

    def of_slots(self, coefficients: Floats, slots: Piece) -> Floats:
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
            # NumPy's zeros take memory only when they are touched
            like = torch.empty(0, dtype=self._data.dtype).numpy().dtype
            grown = torch.from_numpy(np.zeros((room, *self._data.shape[1:]), dtype=like))
            grown[: self._used] = self._data[: self._used]
            self._data = grown
        self._used = max(self._used, count)
        return self._data[:count]


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
        self._manifest, self.groupings = manifest, tuple(groupings)
        self._numbers = {p.name: number for number, p in enumerate(manifest.parameters)}
        self._grown = {name: Grown.of(t) for name, t in (kept or {}).items() if name[0].isdigit()}
        self._maps = {name: t.clone() for name, t in (kept or {}).items() if name.startswith(MAPS)}
        self._beginning = beginning
        self._signs = {name: bool(t) for name, t in (kept or {}).items() if name.startswith("negative.")}
        self._groups = [0] * len(self.groupings)
        for name, value in (kept or {}).items():
            if name.endswith(".visits"):
                grouping = int(name.split(".")[0])
                self._groups[grouping] = max(self._groups[grouping], len(value))

    def fold(self, slots: Mapping[int, Sequence[Piece]], updates: Mapping[str, Updates]) -> None:
        """Fold a stretch. slots: by the layer's number; updates: by the parameter's full name."""
        for number, pieces in slots.items():
            for piece in pieces:
                if len(piece.steps):
                    self._fold_keys(number, piece)
        for name, some in updates.items():
            mine = [
                (use, piece)
                for number, layer in enumerate(self._manifest.layers)
                for use in layer.uses
                if use.parameter == name
                for piece in slots.get(number, ())
                if len(piece.steps)
            ]
            if KINDS[some.kind].elementwise:
                self._fold_elementwise(name, mine, some)
                continue
            self._fold_initial(name, some)
            for grouping in range(len(self.groupings)):
                if self.groupings[grouping].kind != "keys":
                    self._fold_deltas(grouping, name, mine, some)

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
        """Everything, as it is stored; not copied. groups: how many there are of each grouping."""
        found: dict[str, Tensor] = {
            name: grown.rows(groups[int(name.split(".")[0])] + name.endswith(".rest"))
            for name, grown in self._grown.items()
        }
        found.update(self._maps)
        found.update({name: torch.tensor([negative]) for name, negative in self._signs.items()})
        return found

    def _rows(self, name: str, count: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if name not in self._grown:
            self._grown[name] = Grown(shape, dtype)
        return self._grown[name].rows(count)

    def _fold_keys(self, number: int, slots: Piece) -> None:
        sign, layer = f"negative.{number}", self._manifest.layers[number]
        counted = None if slots.written is None else torch.from_numpy(np.flatnonzero(slots.written))
        places = slots.keys.places if isinstance(slots.keys, Numbers) else None
        vectors = slots.keys.vectors() if places is None else None
        if counted is not None:
            places = None if places is None else places[counted]
            vectors = None if vectors is None else vectors[counted]
        self._signs[sign] = self._signs.get(sign, False) or bool(vectors is not None and (vectors < 0).any())
        for grouping, codes in enumerate(slots.groups):
            count = self._seen(grouping, codes)
            which = torch.from_numpy(codes)
            which = which if counted is None else which[counted]
            visits = self._rows(f"{grouping}.{number}.visits", count, (), torch.int64)
            visits.index_add_(0, which, torch.ones_like(which))
            if self.groupings[grouping].kind == "deltas" or not layer.attends:
                continue
            if vectors is None:
                assert places is not None
                sums = self._rows(f"{grouping}.{number}.keys", count, (layer.d_in,), torch.float32)
                sums.index_put_((which, places), sums.new_ones(len(which)), accumulate=True)
                continue
            kind = torch.float64 if vectors.dtype == torch.float64 else torch.float32
            sums = self._rows(f"{grouping}.{number}.keys", count, vectors.shape[1:], kind)
            sums.index_add_(0, which, vectors.to(kind))

    def _seen(self, grouping: int, codes: Ints) -> int:
        self._groups[grouping] = max(self._groups[grouping], int(codes.max()) + 1)
        return self._groups[grouping]

    def _fold_initial(self, name: str, some: Updates) -> None:
        """X_T in terms of W_0 and average_0: one row of numbers for the parameter and for its average."""
        walked = [some.walked(of) for of in OF]
        stretch = torch.tensor([[w.a, w.b] for w in walked], dtype=torch.float64)
        key = f"initial.{self._numbers[name]}"
        self._maps[key] = stretch @ self._maps.get(key, torch.eye(2, dtype=torch.float64))
        rounded = f"rounded.{self._numbers[name]}"
        if rounded in self._maps:
            self._maps[rounded] = stretch @ self._maps[rounded] @ stretch.T
        if some.rounded is not None and not self._is_vector(name):  # the gradients of vectors are kept as they were
            # The roundings of different steps are independent of each other: their variances add up
            effects = torch.from_numpy(np.stack([w.c * some.rounded.rests for w in walked]))
            self._maps[rounded] = self._maps.get(rounded, torch.zeros(2, 2, dtype=torch.float64)) + effects @ effects.T

    def _is_vector(self, name: str) -> bool:
        return any(name in layer.vectors() for layer in self._manifest.layers)

    def _held(self, grouping: int, name: str) -> tuple[dict[str, Tensor], bool]:
        """The parts of a parameter and of its average that belong to each group; whether row 0 is the rest."""
        parameter = self._manifest.parameters[self._numbers[name]]
        dtype = torch.float64 if parameter.dtype == "float64" else torch.float32
        # A bias has one more row, the first: what its gradients hold beyond the sum of their slots (rounding)
        small = self._is_vector(name)
        prefix, suffix = f"{grouping}.p{self._numbers[name]}", ".rest" if small else ""
        count = self._groups[grouping] + small
        return {of: self._rows(f"{prefix}.{of}{suffix}", count, parameter.shape, dtype) for of in OF}, small

    def _fold_deltas(self, grouping: int, name: str, mine: Sequence[tuple[Use, Piece]], some: Updates) -> None:
        held, small = self._held(grouping, name)
        if some.reaching is None:
            before = {of: held[of].clone() for of in OF}
            for of in OF:
                held[of].copy_(before["weight"] * some.walked(of).a).add_(before["average"], alpha=some.walked(of).b)
        for of in OF:
            walked = some.walked(of) if some.reaching is None else some.reaching[of]
            if small and some.gradients is not None:
                written = torch.tensordot(torch.from_numpy(walked.c), some.gradients.double(), 1)
                held[of][0] -= written.to(held[of].dtype)
            for use, piece in mine:
                if piece.errors is not None:
                    self._write(held[of], small, grouping, use, piece, -some.of_slots(walked.c, piece))

    def _write(self, held: Tensor, small: bool, grouping: int, use: Use, piece: Piece, scale: Floats) -> None:
        """Add what each group's slots wrote, each slot scaled."""
        assert piece.errors is not None
        codes = piece.groups[grouping]
        order = np.argsort(codes, kind="stable")
        order = order[scale[order] != 0]
        for part in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1) if len(order) else ():
            group, taken = int(codes[part[0]]), np.zeros(len(codes))
            taken[part] = scale[part]
            found = _written(use, piece, part, torch.from_numpy(taken).to(held.dtype))
            place = group + small
            target = held[place]
            own = target[use.rows[0] : use.rows[1]] if use.rows else target
            own += found.reshape(own.shape)
            if small:
                rest = held[0][use.rows[0] : use.rows[1]] if use.rows else held[0]
                rest -= found.reshape(rest.shape)

    def _fold_elementwise(self, name: str, mine: Sequence[tuple[Use, Piece]], some: Updates) -> None:
        """Where coefficients are matrices, the optimizer's own recursion runs on every group, with what is shared."""
        number, kind = self._numbers[name], KINDS[some.kind]
        if f"now.{number}.weight" not in self._maps:
            self._begin(number, name, kind)
        states = ("weight", "average", *kind.shared)
        now = {of: self._maps[f"now.{number}.{of}"] for of in states}
        start = {of: self._maps[f"initial.{number}.{of}"] for of in OF}
        wanted = [g for g in range(len(self.groupings)) if self.groupings[g].kind != "keys"]
        held = {g: self._held(g, name) for g in wanted}
        small = self._is_vector(name)
        for place, step in enumerate(some.steps.tolist()):
            settings = {key: float(values[place]) for key, values in some.settings.items()}
            here = [(use, some_slots) for use, piece in mine if (some_slots := _of_step(piece, step)) is not None]
            factors = some.factors[place]
            parts = {g: torch.zeros_like(held[g][0]["weight"]) for g in wanted}
            full = torch.zeros_like(now["weight"])
            if small and some.gradients is not None:
                full = some.gradients[place].to(full.dtype)
            for g in wanted if small else ():
                parts[g].copy_(_parts_of_vector(g, here, factors, full, len(parts[g])))
            for use, piece in () if small else here:
                scale = np.append(factors, 0.0)[np.minimum(piece.backwards, len(factors))]
                for g in wanted:
                    self._write(parts[g], small, g, use, piece, scale)
                found = _written(use, piece, None, torch.from_numpy(scale).to(full.dtype))
                own = full[use.rows[0] : use.rows[1]] if use.rows else full
                own += found.reshape(own.shape)
            if not small:
                noise = self._noise(number, some, place, here, full)
                self._fold_rounding(number, kind, settings, full, noise)
            linear = _update(now, kind, settings, full)
            linear.apply(start["weight"], start["average"], None)
            for g in wanted:
                linear.apply(held[g][0]["weight"], held[g][0]["average"], parts[g])

    def _noise(
        self, number: int, some: Updates, place: int, here: Sequence[tuple[Use, Piece]], gradient: Tensor
    ) -> Tensor | None:
        """As much random noise as rounding to 16 bits has added to a gradient; None: it has not."""
        if some.rounded is None or not some.rounded.units[place]:
            return None
        name = self._manifest.parameters[number].name
        users = [layer for layer in self._manifest.layers if any(use.parameter == name for use in layer.uses)]
        within = any(layer.kind == ROUNDED_WITHIN for layer in users)
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
        """Take a parameter along whose gradients have noise, from the first one on that has."""
        states = ("weight", "average", *kind.shared)
        if f"rounded.{number}.weight" not in self._maps:
            if noise is None:
                return
            self._maps.update({f"rounded.{number}.{of}": self._maps[f"now.{number}.{of}"].clone() for of in states})
        disturbed = {of: self._maps[f"rounded.{number}.{of}"] for of in states}
        _update(disturbed, kind, settings, gradient if noise is None else gradient + noise)

    def _begin(self, number: int, name: str, kind: Kind) -> None:
        """A parameter and its optimizer state as they were when recording began."""
        assert self._beginning is not None
        first = self._beginning
        weight = first[f"model.{name}"]
        states = {"weight": weight, "average": first.get(f"state.{name}.{kind.average}", torch.zeros_like(weight))}
        states |= {of: first.get(f"state.{name}.{of}", torch.zeros_like(weight)) for of in kind.shared}
        self._maps.update({f"now.{number}.{of}": value.clone() for of, value in states.items()})
        self._maps.update({f"initial.{number}.{of}": states[of].clone() for of in OF})


def _squares_of_parts(
    here: Sequence[tuple[Use, Piece]], factors: Floats, like: Tensor, *, within: bool
) -> Iterator[Tensor]:
    """Squares of what each backward pass added to a gradient, for each use of the parameter; within: of what each slot added."""
    for use, piece in here:
        assert piece.errors is not None
        part = replace(piece, keys=piece.keys.squared(), errors=piece.errors.square()) if within else piece
        for backward in np.unique(piece.backwards).tolist():
            if backward >= len(factors):
                continue
            factor = factors[backward] ** 2 if within else factors[backward]
            scale = np.where(piece.backwards == backward, factor, 0.0)
            added = torch.zeros_like(like)
            own = added[use.rows[0] : use.rows[1]] if use.rows else added
            own += _written(use, part, None, torch.from_numpy(scale).to(like.dtype)).reshape(own.shape)
            yield added if within else added.square()


def _parts_of_vector(
    grouping: int, here: Sequence[tuple[Use, Piece]], factors: Floats, gradient: Tensor, count: int
) -> Tensor:
    """(1 + groups, *shape): what a bias's gradient holds beyond its slots, and what the slots of each group added to it.

    What slots write to a bias may cancel to rounding (before a normalisation, in an attention), and Adam divides that by its own size: the
    sums are made in a longer type, as they are for masks without totals.
    """
    longer: Any = np.longdouble if gradient.dtype == torch.float64 else np.float64
    parts = np.zeros((count, *gradient.shape), longer)
    for use, piece in here:
        assert piece.errors is not None
        written = piece.keys.vectors() if use.role == "scale" else columns(piece.errors, use.errors)
        scale = np.append(factors, 0.0)[np.minimum(piece.backwards, len(factors))].astype(longer)
        scaled = written.numpy().astype(longer) * scale[:, None]
        own = parts[:, use.rows[0] : use.rows[1]] if use.rows else parts
        np.add.at(own, piece.groups[grouping] + 1, scaled.reshape(len(scaled), *own.shape[1:]))
    parts[0] = gradient.numpy().astype(longer) - parts[1:].sum(0)
    return torch.from_numpy(parts.astype(np.float64)).to(gradient.dtype)


def _update(now: Mapping[str, Tensor], kind: Kind, settings: dict[str, float], gradient: Tensor) -> Linear:
    """Do one update of a parameter and its optimizer state, in place; gives it as a linear map."""
    sign, decay, _ = outer(settings)
    pushed = gradient * sign + now["weight"] * decay
    shared = {of: now[of] for of in kind.shared}
    linear = kind.linear(settings, shared, pushed)
    linear = at_rest(linear, kind, settings, shared, (now["weight"], now["average"]), gradient)
    linear.apply(now["weight"], now["average"], gradient)
    return linear


def _of_step(piece: Piece, step: int) -> Piece | None:
    """The slots of one step: a piece of feature maps is of one call, hence of one step."""
    low, high = np.searchsorted(piece.steps, [step, step + 1])
    if low == high:
        return None
    if high - low == len(piece.steps):
        return piece
    here = slice(int(low), int(high))
    assert isinstance(piece.keys, (Vectors, Numbers))
    errors = None if piece.errors is None else piece.errors[here]
    groups = [codes[here] for codes in piece.groups]
    return Piece(piece.keys.some(here), errors, piece.steps[here], piece.backwards[here], groups)


def _written(use: Use, piece: Piece, part: Ints | None, scale: Tensor) -> Tensor:
    """Σ over some slots of what a use makes of them, each scaled."""
    assert piece.errors is not None
    keys, errors = piece.keys, piece.errors
    if part is not None and isinstance(keys, (Vectors, Numbers)):
        which = torch.from_numpy(part)
        keys, errors, scale = keys.some(which), errors[which], scale[which]
    keys = keys.to(scale.dtype)
    errors = errors.to(scale.dtype)
    if use.role == "scale":
        return scale @ keys.vectors()
    errors = columns(errors, use.errors) * scale.unsqueeze(1)
    if use.role == "bias":
        return errors.sum(0)
    found = keys.outer(errors, use.keys, use.groups)
    return found.T if use.role == "table" else found
