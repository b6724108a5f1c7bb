"""Looks at an optimizer's parameters and their gradients: in one compiled loop where all of them are plain, else at each by itself."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.native.kernels import address, kernels
from dualform.projection import Looked
from dualform.record.audit import Verdict, shared_factors
from dualform.record.parameters import Link, ParameterLedger

Ints = np.ndarray[Any, np.dtype[np.int64]]
Sums = np.ndarray[Any, np.dtype[np.float64]]
Vector = np.ndarray[Any, np.dtype[np.float32]]
ROOMS = 64
"""For so many updates there is room for gradients at a time."""

VERDICT = 5
"""How many numbers the loop gives for a gradient: factor, residual, whether it is explained, norm, signal (as audit.Verdict has them)."""
CHANGED = 1 << 32
"""What the loop gives for each part of a parameter that is not what it was."""
TENSOR, AT, KNOWN, TURNS, SCALE, ROUNDOFF, FIELDS = 0, 5, 6, 8, 9, 10, 13
"""Some of the numbers that the loop is told of a tensor, and how many there are."""
SGD = ("lr", "weight_decay", "maximize", "momentum", "dampening", "nesterov", "fresh")
"""The settings by which a parameter goes on its way, …"""
WAY = 15
"""… and how many numbers the loop is told of it, these from place 7 on."""


class Looks:
    """Looks at some parameters, step after step: what stays the same is written down once."""

    def __init__(self, ledgers: Sequence[ParameterLedger]):
        self.ledgers, self.parameters = list(ledgers), [one.parameter for one in ledgers]
        self._numels = [one.parameter.numel() for one in ledgers]
        self._root_of_columns = np.sqrt([one.columns for one in ledgers])
        self._loops: Any = kernels() if all(one.in_columns for one in ledgers) else None
        sizes = np.array([one.rows * one.columns for one in ledgers], np.int64)
        ends, self._size, count = np.cumsum(sizes), int(sizes.sum()), len(self.ledgers)
        starts = ends - sizes
        self._places = [slice(end - size, end) for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)]
        self._mixed = np.concatenate([np.empty(0), *[one.mixed for one in ledgers]])
        told = np.array([_told(one, start) for one, start in zip(ledgers, starts, strict=True)], np.int64)
        told = told.reshape(count, FIELDS)
        # Before an update: the gradients, and parts of the parameters, which are compared with what they were
        self._before, self._after = np.concatenate([told, told]), told.copy()
        self._gradients, self._parts = self._before[:count], self._before[count:]
        self._at = self._gradients.reshape(-1).data[TENSOR::FIELDS]  # NumPy takes longer to write a few numbers
        self._bounds, self._bounds_of_parts = self._gradients.view(np.float64), self._parts.view(np.float64)
        self._bounds[:, ROUNDOFF] = [one.roundoff for one in ledgers]
        self._parts[:, AT] += self._size
        self._parts[:, TURNS] = [one.turns for one in ledgers]
        self._seen, self._found = np.empty(2 * self._size), np.zeros((2 * count, VERDICT))
        self._remembered, self._buffers = np.empty(self._size), np.zeros(self._size)
        """What the parameters looked like after their last update, and SGD's buffers."""
        self._parts[:, KNOWN] = address(self._remembered) + 8 * starts
        self._after[:, KNOWN] = address(self._mixed) + 8 * starts  # gives r · (W R)
        self._before_at, self._parts_at, self._after_at = map(address, (self._before, self._parts, self._after))
        self._seen_at, self._found_at, self._remembered_at = map(address, (self._seen, self._found, self._remembered))
        self._walks = self._ways(sizes, starts, count)
        self._fingerprints = np.empty(count)
        self._walks_at, self._fingerprints_at = address(self._walks), address(self._fingerprints)
        self._walking, self._turn, self._foretold = False, 1, 0
        self._marks: list[int] | None = None
        """PyTorch's counts of changes then; None: the ledgers know what their parameters looked like."""
        self._were: list[int] = []
        """Where they were in memory."""
        self._rooms: list[tuple[list[Vector | None], int]] = []
        """For the gradients of vectors in coming updates: themselves, and where they begin in memory."""
        self._kept: tuple[list[Vector | None], int] = ([], 0)
        self._settings: Sequence[Mapping[str, float]] | None = None
        """Those that the walks are told."""
        self._unknown: list[bool] | None = None
        """Of which gradients there was no single pass to compare them with; None: there was one of each."""
        self._verdicts = self._found[:0]
        """Of the gradients that were last looked at."""
        self._looked: list[Looked | None] | None = None

    def _ways(self, sizes: Ints, starts: Ints, count: int) -> Ints:
        """What is told of each parameter on its way."""
        told = np.zeros((count, WAY), np.int64)
        told[:, 0] = sizes
        for column, memory in enumerate((self._remembered, self._buffers, self._seen, self._mixed), 1):
            told[:, column] = address(memory) + 8 * starts
        told.view(np.float64)[:, 5] = [one.slack**2 for one in self.ledgers]
        told[:, 6] = address(self._parts) + 8 * (FIELDS * np.arange(count) + SCALE)
        return told

    def attach(self) -> None:
        """From now on, who takes slots tells what their gradients are to be compared with."""
        if self._loops is not None:
            for place, ledger in enumerate(self.ledgers):
                ledger.look_at, ledger.looks = self._before_at + 8 * FIELDS * place, self

    def before_update(
        self, gradients: Sequence[Tensor | None], links: Sequence[Link | None] | None
    ) -> tuple[bool, bool]:
        """Look at the gradients, and at a part of the parameters.

        links: the backward pass that made a gradient, if it was a single one; None: that is told already (`attach`). Gives whether each
        gradient is its pass's, times a factor that means something (`factors`; else see `verdict` and `seen` of each); and whether nothing
        has changed the parameters, for sure.
        """
        where = self._where(gradients) if self._loops is not None else None
        if where is None:
            pairs = zip(self.ledgers, gradients, strict=True)
            self._looked = [None if gradient is None else ledger.look(gradient) for ledger, gradient in pairs]
            return False, self.unchanged()
        self._looked, self._unknown = None, None if links is None else [link is None for link in links]
        self._at[:] = array(self._at.format, where)
        if links is not None:
            self._gradients[:, KNOWN] = [0 if link is None else link.at or address(link.added) for link in links]
            self._bounds[:, SCALE] = [0.0 if link is None else link.scale for link in links]
        may_be_same, count = self._may_be_same(), len(where)
        self._kept = self._rooms.pop() if self._rooms else self._more_rooms()
        found = self._run(2 * count if may_be_same else count, self._before_at, self._seen_at, self._kept[1])
        self._verdicts = self._found[:count].copy()
        return not found % CHANGED, may_be_same and self._same(found)

    def factors(self) -> Sums:
        """Of each gradient: the factor of its only pass, and the residual, (parameters, 2)."""
        found = self._verdicts[:, :2]
        found[:, 0] = shared_factors(found[:, 0], self._verdicts[:, 4])
        return found

    def sizes(self) -> Sums:
        """The norm of each gradient, as far as R shows it, (parameters,)."""
        return self._verdicts[:, 3] / self._root_of_columns

    def vectors(self) -> list[Vector | None]:
        """The gradients of vectors, which are seen as they are; None for those of matrices."""
        return self._kept[0]

    def verdict(self, place: int) -> Verdict | None:
        """How its only pass explains a gradient, if that is known."""
        if self._looked is not None or (self._unknown is not None and self._unknown[place]):
            return None
        factor, residual, explained, size, signal = self._verdicts[place].tolist()
        return Verdict([factor], residual, bool(explained), signal, size)

    def seen(self, place: int) -> Looked:
        """What a gradient looked like before the update."""
        looked = self._seen[self._places[place]] if self._looked is None else self._looked[place]
        assert looked is not None
        return looked

    def remember(
        self, settings: Sequence[Mapping[str, float]] | None = None, states: Sequence[Mapping[str, Any]] = ()
    ) -> list[float]:
        """The parameters have just been updated. Gives their fingerprints.

        settings: those of each parameter, if the update was one by SGD with the gradients that were looked at; states: SGD's, now.
        Then it is known what the parameters look like, and only parts of them need be looked at before the next update.
        """
        where = self._where(self.parameters) if self._loops is not None else None
        if where is None:
            self._marks, self._walking, self._foretold = None, False, 0
            for ledger in self.ledgers:
                ledger.remember()
            return [ledger.fingerprint for ledger in self.ledgers]
        if where != self._were:
            self._parts[:, TENSOR] = self._were = where
        self._marks = [one._version for one in self.parameters]
        if settings and self._walking and self._looked is None:
            if settings is not self._settings:
                self._walks.view(np.float64)[:, 7:14] = [[one[name] for name in SGD] for one in settings]
                self._settings = settings
            self._loops.walked(len(where), self._walks_at, self._fingerprints_at)
            fingerprints: list[float] = self._fingerprints.tolist()
            # Else something has overflowed here that may not have done so there
            if all(map(math.isfinite, fingerprints)):
                self._foretold += 1
                return fingerprints
        self._after[:, TENSOR] = where
        self._run(len(where), self._after_at, self._remembered_at)
        found = self._found[: len(where)].tolist()
        self._bounds_of_parts[:, SCALE] = 0.0  # what is seen again is the same to the last bit
        self._walking, self._foretold = settings is not None and self._see_buffers(states), 0
        return [one[1] for one in found]

    def _see_buffers(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Look at SGD's buffers; False: they are none that can be looked at."""
        where = self._where([state.get("momentum_buffer") for state in states])
        if where is None:
            return False
        self._buffers[:] = 0
        self._walks.view(np.float64)[:, 14] = 0.0
        self._after[:, TENSOR] = where
        self._run(len(where), self._after_at, address(self._buffers))
        return True

    def unchanged(self) -> bool:
        """Whether nothing has changed, for sure. Else each is to be asked itself: it may be rounding, or there and back."""
        if not self._may_be_same():
            return False
        return self._same(self._run(len(self._parts), self._parts_at, self._seen_at))

    def hand_out(self) -> None:
        """Let each ledger know what was remembered."""
        if self._marks is not None:
            for ledger, place, mark in zip(
                self.ledgers, self._places, zip(self._marks, self._were, strict=True), strict=True
            ):
                ledger.remembered(self._remembered[place].copy(), mark, self._turn % ledger.turns, self._foretold)

    def _may_be_same(self) -> bool:
        """Whether PyTorch has counted no change since the parameters were remembered."""
        if self._marks is None:
            return False
        for parameter, version, at in zip(self.parameters, self._marks, self._were, strict=True):
            if parameter._version != version or parameter.data_ptr() != at:
                return self._ask_each()
        return True

    def _where(self, tensors: Sequence[Tensor | None]) -> list[int] | None:
        """Where each begins in memory (0: it is not there); None: not all of them are plain."""
        found = []
        for tensor, numel in zip(tensors, self._numels, strict=True):
            if tensor is None:
                found.append(0)
            elif (  # as `is_plain`: a function is too much here
                tensor.dtype is torch.float32
                and tensor.is_cpu
                and tensor.layout is torch.strided
                and tensor.is_contiguous()
                and tensor.numel() == numel
            ):
                found.append(tensor.data_ptr())
            else:
                return None
        return found

    def _same(self, found: int) -> bool:
        """Whether the parts that were just compared are what they were. found: what the loop gave."""
        if found >= CHANGED:
            return self._ask_each()
        self._turn += 1
        return True

    def _ask_each(self) -> bool:
        self.hand_out()
        self._turn += 1
        return False

    def _run(self, count: int, told: int, out: int, kept: int = 0) -> int:
        found: int = self._loops.looks(count, told, out, self._found_at, self._turn, torch.get_num_threads(), kept)
        return found

    def _more_rooms(self) -> tuple[list[Vector | None], int]:
        """Room for the gradients of vectors, for some updates: they are stored, so each needs its own."""
        sizes = [0 if one.is_matrix else one.rows for one in self.ledgers]
        memory = np.empty((ROOMS, sum(sizes)), np.float32)
        ends = np.cumsum(sizes).tolist()
        shapes = [None if one.is_matrix else one.shape for one in self.ledgers]
        for row in memory[::-1]:
            parts = zip(sizes, ends, shapes, strict=True)
            vectors = [None if shape is None else row[end - size : end].reshape(shape) for size, end, shape in parts]
            self._rooms.append((vectors, address(row)))
        return self._rooms.pop()


def _told(one: ParameterLedger, at: int) -> list[int]:
    random = one.random.data_ptr() if one.is_matrix else 0
    return [0, random, one.rows, one.random.shape[0], one.columns, at, 0, one.part, 0, 0, 0, 0, 0]
