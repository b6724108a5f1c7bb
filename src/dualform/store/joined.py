"""Tensors that lie in several files and are read as one.

The slots of a step are in the files of all ranks. A chunk of the whole run has them in the order (step, rank), and reads each part from
where it is: nothing is copied before it is asked for, and no more than was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Ints


class JoinedTensor:
    """Tensors one after the other along their first axis: has the methods of a tensor by which stored vectors are read."""

    def __init__(self, pieces: Sequence[Tensor]):
        """pieces: at least one; all of one type, and of one shape but for the first axis."""
        filled = [piece for piece in pieces if len(piece)]
        self.pieces = filled or [pieces[0]]
        self.dtype = self.pieces[0].dtype
        self._ends = np.cumsum([len(piece) for piece in self.pieces])
        self.shape = (int(self._ends[-1]), *self.pieces[0].shape[1:])
        self.nbytes = sum(piece.nbytes for piece in self.pieces)

    def __len__(self) -> int:
        return int(self.shape[0])

    def size(self, axis: int) -> int:
        """Return the size of an axis."""
        return int(self.shape[axis])

    def __getitem__(self, places: slice | Tensor) -> Tensor | JoinedTensor:
        """Return some rows: a view, if they lie in one tensor; all of them: this object."""
        if isinstance(places, Tensor):
            return self.index_select(0, places)
        low, high, _ = places.indices(len(self))
        if low == 0 and high == len(self):
            return self
        return self._between(low, max(low, high))

    def _between(self, low: int, high: int) -> Tensor:
        first = int(np.searchsorted(self._ends, low, side="right"))
        last = int(np.searchsorted(self._ends, high, side="left"))
        pieces = []
        for place in range(first, min(last + 1, len(self.pieces))):
            piece = self.pieces[place]
            begin = int(self._ends[place]) - len(piece)
            pieces.append(piece[max(0, low - begin) : max(0, high - begin)])
        if not pieces:
            return self.pieces[0][:0]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def index_select(self, _: int, places: Tensor) -> Tensor:
        """Return the rows at these places, copied."""
        wanted: Ints = places.numpy()
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"a row was asked for that is not there: there are {len(self)}")
        found = torch.empty(len(wanted), *self.shape[1:], dtype=self.dtype)
        homes = np.searchsorted(self._ends, wanted, side="right")
        for home in np.unique(homes).tolist():
            here = np.flatnonzero(homes == home)
            piece = self.pieces[home]
            first = int(self._ends[home]) - len(piece)
            found[torch.from_numpy(here)] = piece[torch.from_numpy(wanted[here] - first)]
        return found

    def whole(self) -> Tensor:
        """Return everything as one tensor; a copy, if there are several pieces."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return everything as one tensor of another type."""
        return self.whole().to(dtype)

    def view(self, dtype: torch.dtype) -> JoinedTensor:
        """Return the same bytes as another type of the same size."""
        return JoinedTensor([piece.view(dtype) for piece in self.pieces])

    def any(self) -> bool:
        """Whether any number is not zero."""
        return any(bool(piece.any()) for piece in self.pieces)

    def numpy(self) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        """Return everything as one array."""
        return self.whole().numpy()
