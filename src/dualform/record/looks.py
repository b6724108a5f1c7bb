"""Looks at many parameters at once: in one compiled loop where all are plain, else one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.native.kernels import is_plain, kernels
from dualform.record.audit import Dots, Looked, Seen
from dualform.record.parameters import ParameterLedger, mark_of

TENSOR, ROWS, K, KNOWN, TURN = 0, 2, 4, 5, 7
"""Some of the numbers that the loop is told of each."""


Ints = np.ndarray[Any, np.dtype[np.int64]]


class Looks:
    """Looks at some parameters, step after step: what stays the same is written down once."""

    def __init__(self, ledgers: Sequence[ParameterLedger]):
        self.ledgers = list(ledgers)
        self._loops: Any = kernels() if all(one.in_columns for one in ledgers) else None
        told = [
            (
                0,
                one.random.data_ptr() if one.is_matrix else 0,
                one.rows,
                one.random.shape[0],
                one.columns,
                0,
                one.part,
                -1,
                0,
                0,
                0,
            )
            for one in ledgers
        ]
        self._told, self._sums = np.array(told, np.int64).reshape(-1, 11), np.zeros((len(told), 4))
        self._addresses = _address(self._told), _address(self._sums)
        sizes = self._told[:, ROWS] * self._told[:, K]
        ends = np.cumsum(sizes)
        self._starts, self._size = ends - sizes, int(sizes.sum())
        self._places = [slice(end - size, end) for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)]
        self._parameters = [one.parameter for one in ledgers]
        self._remembered: tuple[list[tuple[int, int]], Seen, Ints] | None = None
        """The parameters' marks after their last update, what they looked like, and where that is in memory."""

    def at(self, tensors: Sequence[Tensor], known: Sequence[Seen | None] = ()) -> list[tuple[Looked, Dots | None]]:
        """Tensors like the parameters, each as the audit sees it; shares no memory with them.

        known: what some of them are to be compared with.
        """
        seen = self._all_at(tensors, [0 if one is None else _address(one) for one in known] or 0)
        if seen is None:
            looked = [one.look(tensor) for one, tensor in zip(self.ledgers, tensors, strict=True)]
            return [
                (one if ledger.is_matrix else one.copy(), None)
                for ledger, one in zip(self.ledgers, looked, strict=True)
            ]
        parts = [seen[place] for place in self._places]
        if not known:
            return [(part, None) for part in parts]
        dots = self._sums.tolist()
        return [(part, None if one is None else sums) for part, one, sums in zip(parts, known, dots, strict=True)]

    def remember(self) -> None:
        """The parameters have just been updated."""
        seen = self._all_at(self._parameters, 0)
        if seen is None:
            self._remembered = None
            for ledger in self.ledgers:
                ledger.remember()
            return
        self._remembered = list(map(mark_of, self._parameters)), seen, _address(seen) + 8 * self._starts
        for ledger, place in zip(self.ledgers, self._places, strict=True):
            ledger.remember(seen=seen[place])

    def unchanged(self) -> bool:
        """Whether nothing has changed, for sure. Else each is to be asked itself: it may be rounding, or there and back."""
        if self._remembered is None:
            return False
        marks, _, known = self._remembered
        if list(map(mark_of, self._parameters)) != marks:
            return False
        self._run([at for _, at in marks], known, [one.next_turn for one in self.ledgers])
        if any(rest != 0 for *_, rest in self._sums.tolist()):
            return False
        for ledger in self.ledgers:
            ledger.turn()
        return True

    def _all_at(self, tensors: Sequence[Tensor], known: Any) -> Seen | None:
        """What is seen of all of them, one after the other; None: not all are plain."""
        if self._loops is None or not all(map(is_plain, tensors)):
            return None
        return self._run([tensor.data_ptr() for tensor in tensors], known)

    def _run(self, where: list[int], known: Any, turns: list[int] | int = -1) -> Seen:
        told, seen, (told_at, sums_at) = self._told, np.empty(self._size), self._addresses
        told[:, TENSOR], told[:, KNOWN], told[:, TURN] = where, known, turns
        self._loops.looks(len(where), told_at, _address(seen), sums_at, torch.get_num_threads())
        return seen


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
