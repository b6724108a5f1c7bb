"""What the recorder hands to the writer, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Array, Bools
from dualform.layers.keys import Keys, RowGradients, keys_of
from dualform.layers.layer import Layer
from dualform.store.encoding import Encoded, decode
from dualform.store.format import Mark, RowEvidence
from dualform.store.memory import Pool

ColumnValues = Array | list[str] | int | float | str | bool


@dataclass(slots=True)
class Rows:
    """The rows of one batch() call: a scalar stands for all of them; 2-D arrays are (rows, positions)."""

    first_row: int
    count: int
    columns: dict[str, ColumnValues]


@dataclass(frozen=True, slots=True)
class RowSums:
    """What a block does not tell any more once its slots were summed row by row."""

    is_gradient: bool
    """Whether a row is now one gradient, in the place of keys; else it is still slots, but fewer."""
    positions: int
    """How many slots each row had."""
    written: int
    """How many of all slots had an error signal that is not zero."""


@dataclass(slots=True)
class Block:
    """The slots of one call of a layer in one backward pass, row-major over (row, position)."""

    layer: int
    backward: int
    call: int
    first_row: int
    """NO_ROW (store/format.py): the input serves all rows at once. Then `rows` is 1 and `positions` the number of slots."""
    rows: int
    positions: int
    keys: Encoded
    errors: Encoded | None
    may_repeat: bool
    """Whether the keys come from data and not from weights: then equal ones are stored once."""
    shape: tuple[int, ...] = ()
    """Of feature maps: how many there are for each row, and their size."""
    arrival: int = 0
    """The place of its error signal among those that arrive in the backward pass: the lowest is nearest to the loss."""
    silent: Bools | None = None
    """(slots,): which slots wrote nothing, because their error signal is zero (padding, ignored labels). None: no slot is
    silent, or the error signals were never computed."""
    sums: RowSums | None = None
    """How its slots were summed row by row; None: they are all there."""
    curvature: Sequence[tuple[Tensor, Tensor, int]] | None = None
    """Of each linear map Σ key ⊗ key, Σ error ⊗ error and how many slots, if that was counted before the slots were summed."""

    @property
    def is_gradient(self) -> bool:
        """Whether each of its rows is one gradient (in `keys`), without an error signal."""
        return self.sums is not None and self.sums.is_gradient

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return self.rows * self.positions

    def give_back(self, pool: Pool) -> None:
        """The vectors are stored, or no longer needed."""
        pool.give(self.keys, self.errors)


def written_slots(block: Block) -> int:
    """How many slots of a block had an error signal that is not zero, before any were summed."""
    if block.sums is not None:
        return block.sums.written
    silent = 0 if block.silent is None else int(block.silent.sum())
    return block.rows * block.positions - silent


def gradients_of_blocks(layer: Layer, blocks: Sequence[Block], dtype: torch.dtype) -> RowGradients:
    """Return the row gradients of some blocks of a layer, in a type that can be computed with."""
    stored = [decode(block.keys.data, block.keys.exponents, dtype) for block in blocks]
    return RowGradients.of(layer, torch.cat(stored))


def keys_of_blocks(layer: Layer, blocks: Sequence[Block], dtype: torch.dtype) -> Keys:
    """Return the keys of some blocks of a layer, of feature maps of one block at a time, in a type that can be computed with."""
    if layer.form == "numbers":
        stored = [block.keys.data for block in blocks]
    else:
        stored = [decode(block.keys.data, block.keys.exponents, dtype) for block in blocks]
    return keys_of(layer, torch.cat(stored), blocks[0].shape[1:], dtype)


@dataclass(slots=True)
class Update:
    """What one optimizer did to its parameters in one step; an entry for each of them."""

    optimizer: str
    parameters: Sequence[int]
    settings: Sequence[dict[str, float]]
    factors: Sequence[list[float]]
    """One for each backward pass: by what its gradient was multiplied before the optimizer saw it."""
    residuals: Sequence[float]
    """The part of the gradient that the slots do not explain, relative."""
    sizes: Sequence[float]
    """The norm of the gradient that the optimizer saw, estimated from its random projection."""
    gradients: Sequence[Array | None]
    """The gradient itself, kept for biases."""


@dataclass
class Step:
    """Everything recorded in one step."""

    number: int
    rows: list[Rows] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    log: dict[str, float] = field(default_factory=dict)
    after: dict[int, float] = field(default_factory=dict)
    """By parameter: one number that tells its weights after the update, r · (W R); of SGD, what they must be, to rounding."""
    marks: dict[str, Mark] = field(default_factory=dict)
    """Layers that are found to be inexact, from which step on, and why."""
    row_evidence: dict[str, RowEvidence] = field(default_factory=dict)
    """What has been found out about the rows of layers."""

    _nbytes: int = 0

    def copy(self) -> Step:
        """Another one, to be added to apart from this one; what log() adds is in both."""
        copied = Step(self.number, [*self.rows], [*self.blocks], [*self.updates], self.log)
        copied.after, copied.marks, copied.row_evidence = {**self.after}, {**self.marks}, {**self.row_evidence}
        return copied

    def drop_slots(self, pool: Pool) -> None:
        """Keep nothing that grows with the number of steps: the slots are in the totals. Doing so again changes nothing."""
        self.drop_blocks(pool)
        self.rows, self.updates, self.log = [], [], {}
        self._nbytes = 0

    def drop_blocks(self, pool: Pool) -> None:
        """Keep no slots of this step. Doing so again changes nothing."""
        while self.blocks:
            self.blocks.pop().give_back(pool)
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """How much memory it holds, roughly; to be asked once it is finished."""
        return self._nbytes or self._count()

    @nbytes.setter
    def nbytes(self, known: int) -> None:
        self._nbytes = known

    def _count(self) -> int:
        count = 256 * (len(self.blocks) + 1)
        for block in self.blocks:
            count += block.keys.nbytes + (0 if block.errors is None else block.errors.nbytes)
        for update in self.updates:
            for gradient in update.gradients:
                count += 256 if gradient is None else 256 + gradient.nbytes
        for rows in self.rows:
            for values in rows.columns.values():
                count += values.nbytes if isinstance(values, np.ndarray) else 64 * rows.count
        self._nbytes = count
        return count
