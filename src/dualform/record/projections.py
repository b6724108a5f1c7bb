"""An optimizer's parameters and gradients, seen through R: in one compiled loop where all of them are plain, else one by one.

Before an update, the gradients are compared with what their backward pass has added, and a part of each parameter with what it was
after the last update. After it, the parameters are remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.native.kernels import address, is_plain, kernels
from dualform.projection import Looked
from dualform.record.audit import Verdict
from dualform.record.parameters import PassShare, RecordedParameter

VERDICT = 5
"""How many numbers the loop gives for a gradient: factor, residual, whether it is explained, norm, signal (as audit.Verdict has them)."""
TENSOR, RANDOM, ROWS, INPUTS, COLUMNS, AT, KNOWN, PART, TURNS, SCALE, ROUNDOFF, FIELDS = (*range(11), 13)
"""The numbers that the loop is told of a tensor (struct Look in native/recording.c); the last two are its own."""


class Projections:
    """Sees the parameters of one optimizer, step after step: what stays the same is written down once."""

    def __init__(self, recorded: Sequence[RecordedParameter]):
        self.recorded = list(recorded)
        self.parameters = [one.tensor for one in recorded]
        self._loops: Any = kernels() if all(one.in_columns for one in recorded) else None
        sizes = np.array([one.rows * one.columns for one in recorded], np.int64)
        ends = np.cumsum(sizes)
        starts = ends - sizes
        self._places = [slice(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        size = int(sizes.sum())
        self._gradients = np.empty(size)
        """What was seen of the gradients, …"""
        self._remembered = np.empty(size)
        """… of the parameters after their last update, …"""
        self._now = np.empty(size)
        """… and of parts of them now."""
        self._mixed = np.concatenate([np.empty(0), *[one.mixed for one in recorded]])
        self._of_gradients = _described(recorded, starts)
        self._of_gradients.view(np.float64)[:, ROUNDOFF] = [one.roundoff for one in recorded]
        self._of_parts = _described(recorded, starts)
        self._of_parts[:, TURNS] = [one.turns for one in recorded]
        self._of_parts[:, KNOWN] = address(self._remembered) + 8 * starts
        self._of_all = _described(recorded, starts)
        self._of_all[:, KNOWN] = address(self._mixed) + 8 * starts  # gives r · (W R), the fingerprint
        self._turn = 1
        """Which part of each parameter is compared next."""
        self._marks: list[tuple[int, int]] | None = None
        """PyTorch's counts of changes when the parameters were remembered, and where they were; None: the recorded remember them."""
        self._verdicts: list[Verdict | None] = []
        self._looked: list[Looked | None] | None = None
        """What was seen of the gradients, if it was seen one by one."""

    def before_update(self, gradients: Sequence[Tensor | None], shares: Sequence[PassShare | None]) -> bool:
        """See the gradients, and a part of the parameters; gives whether nothing has changed the parameters, for sure.

        shares: the backward pass that made a gradient, if it was a single one.
        """
        self._see_gradients(gradients, shares)
        return self.unchanged()

    def _see_gradients(self, gradients: Sequence[Tensor | None], shares: Sequence[PassShare | None]) -> None:
        where = self._where(gradients)
        if where is None:
            pairs = zip(self.recorded, gradients, strict=True)
            self._looked = [None if gradient is None else parameter.look(gradient) for parameter, gradient in pairs]
            self._verdicts = [None] * len(self.recorded)
            return
        self._looked = None
        told = self._of_gradients
        told[:, TENSOR] = where
        told[:, KNOWN] = [0 if share is None else address(share.added) for share in shares]
        told.view(np.float64)[:, SCALE] = [0.0 if share is None else share.scale for share in shares]
        found, _ = self._run(told, self._gradients)
        self._verdicts = [
            None if share is None else Verdict([factor], residual, bool(explained), signal, size)
            for share, (factor, residual, explained, size, signal) in zip(shares, found.tolist(), strict=True)
        ]

    def verdict(self, place: int) -> Verdict | None:
        """How its only pass explains a gradient, if that is known."""
        return self._verdicts[place]

    def seen(self, place: int) -> Looked:
        """What was seen of a gradient before the update."""
        if self._looked is None:
            return self._gradients[self._places[place]]
        looked = self._looked[place]
        assert looked is not None
        return looked

    def remember(self) -> list[float]:
        """The parameters have just been updated. Gives their fingerprints."""
        where = self._where(self.parameters)
        if where is None:
            self._marks = None
            for parameter in self.recorded:
                parameter.remember()
            return [parameter.fingerprint for parameter in self.recorded]
        self._of_parts[:, TENSOR] = where
        self._of_all[:, TENSOR] = where
        found, _ = self._run(self._of_all, self._remembered)
        versions = [parameter._version for parameter in self.parameters]
        self._marks = list(zip(versions, where, strict=True))
        fingerprints: list[float] = found[:, 1].tolist()
        return fingerprints

    def unchanged(self) -> bool:
        """Whether nothing has changed the parameters, for sure. Else each is to be asked itself: it may be rounding, or a reverted edit."""
        if self._marks is None:
            return False
        now = [(parameter._version, parameter.data_ptr()) for parameter in self.parameters]
        is_same = now == self._marks and not self._run(self._of_parts, self._now)[1]
        if not is_same:
            self.hand_out()
        self._turn += 1
        return is_same

    def hand_out(self) -> None:
        """Let each parameter know what was remembered."""
        if self._marks is None:
            return
        for parameter, place, mark in zip(self.recorded, self._places, self._marks, strict=True):
            parameter.remembered(self._remembered[place].copy(), mark, self._turn % parameter.turns)

    def _where(self, tensors: Sequence[Tensor | None]) -> list[int] | None:
        """Where each begins in memory (0: it is not there); None: the loop cannot see all of them."""
        if self._loops is None:
            return None
        found = []
        for tensor, parameter in zip(tensors, self.parameters, strict=True):
            if tensor is None:
                found.append(0)
            elif is_plain(tensor) and tensor.numel() == parameter.numel():
                found.append(tensor.data_ptr())
            else:
                return None
        return found

    def _run(self, told: np.ndarray[Any, np.dtype[np.int64]], out: np.ndarray[Any, Any]) -> tuple[Any, int]:
        """Run the loop; gives what it has found of each, and how many parts are not what they were."""
        found = np.empty((len(told), VERDICT))
        addresses = address(told), address(out), address(found)
        changed: int = self._loops.looks(len(told), *addresses, self._turn, torch.get_num_threads())
        return found, changed


def _described(
    recorded: Sequence[RecordedParameter], starts: np.ndarray[Any, Any]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What the loop is told of each parameter, and of tensors like it. starts: where what is seen of each goes."""
    told = np.zeros((len(recorded), FIELDS), np.int64)
    told[:, RANDOM] = [one.random.data_ptr() if one.is_matrix else 0 for one in recorded]
    told[:, ROWS] = [one.rows for one in recorded]
    told[:, INPUTS] = [one.random.shape[0] for one in recorded]
    told[:, COLUMNS] = [one.columns for one in recorded]
    told[:, AT] = starts
    told[:, PART] = [one.part for one in recorded]
    return told
