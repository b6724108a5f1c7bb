"""The mean that a loss takes, undone: by how many positions, or rows, the error signals of each call were divided.

A loss that is a mean over tokens divides every error signal by the number of tokens that have a loss in the batch. The same sample would then
count less beside longer ones. That number is read from the layer nearest to the loss, the one whose error signal arrives first in a
backward pass: its slots that are not silent. For a classifier these are the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.store.format import BLOCK_FIELDS, NO_ROW
from dualform.store.reader import Store
from dualform.store.records import Block
from dualform.store.slots import SlotChunk

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
LOSS_MEANS = ("tokens", "rows", "none")
"""What a loss may be a mean over: the positions that have a loss, the rows of the batch, or nothing (a sum)."""
RECORDED_MEAN = "tokens"
"""What the recorder takes the loss for a mean over, where it counts curvature."""


@dataclass(frozen=True)
class Calls:
    """What is known of some calls, an entry each."""

    step: Ints
    backward: Ints
    first_row: Ints
    rows: Ints
    layer: Ints
    arrival: Ints
    """In which order error signals arrived in the backward pass: the lowest is nearest to the loss."""
    written: Ints
    """How many slots are not silent."""


def calls_of_blocks(blocks: Sequence[Block]) -> Calls:
    """The calls of one step."""
    fields = [
        (0, b.backward, b.first_row, b.rows, b.layer, b.arrival, b.rows * b.positions - _silent(b)) for b in blocks
    ]
    return Calls(*np.array(fields, dtype=np.int64).reshape(-1, 7).T)


def _silent(block: Block) -> int:
    return 0 if block.silent is None else int(block.silent.sum())


def divisors(calls: Calls, mean: str) -> Floats:
    """By what the error signals of each call were divided, (calls,). mean: one of LOSS_MEANS.

    Calls of one backward pass and one batch() call share a mean. A call that serves all rows has that of the batch nearest to the loss.
    """
    found = np.ones(len(calls.step))
    if mean == "none":
        return found
    # In every batch of every backward pass, the call nearest to the loss comes first; of the layers of one module, the last
    order = np.lexsort((-calls.layer, calls.arrival, calls.first_row, calls.backward, calls.step))
    order = order[(calls.first_row[order] != NO_ROW) & (calls.rows[order] > 0)]
    begins = _begins(calls.step[order], calls.backward[order], calls.first_row[order])
    batches = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(order))))
    nearest = order[begins]
    counts = calls.rows[nearest].astype(np.float64)
    if mean == "tokens":
        at_output = calls.layer[order] == calls.layer[nearest][batches]
        counts = np.bincount(batches, calls.written[order] * at_output, minlength=len(begins))
    counts = np.maximum(counts, 1)
    found[order] = counts[batches]
    _add_shared(calls, nearest, counts, found)
    return found


def _add_shared(calls: Calls, nearest: Ints, counts: Floats, found: Floats) -> None:
    """Enter the divisors of calls that serve all rows. nearest, counts: of each batch, the call nearest to the loss and its divisor."""
    shared = np.flatnonzero(calls.first_row == NO_ROW)
    if not len(shared):
        return
    of_pass: dict[tuple[int, int], float] = {}
    for batch in np.argsort(calls.arrival[nearest], kind="stable").tolist():
        call = nearest[batch]
        of_pass.setdefault((int(calls.step[call]), int(calls.backward[call])), float(counts[batch]))
    for call in shared.tolist():
        found[call] = of_pass.get((int(calls.step[call]), int(calls.backward[call])), 1.0)


def _begins(*keys: Ints) -> Ints:
    """Where another key begins, if keys are sorted."""
    table = np.stack(keys)
    return np.flatnonzero(np.append(True, (table[:, 1:] != table[:, :-1]).any(0))[: table.shape[1]])


class LossMean:
    """The mean that the loss of a recording took, for each of its calls."""

    def __init__(self, store: Store, mean: str = "tokens"):
        """mean: one of LOSS_MEANS."""
        self.mean = mean
        chunks = [chunk for layer in store.manifest.layers for chunk in store.addresses(layer.name)]
        found = divisors(_calls(chunks), mean)
        ends = np.cumsum([len(chunk.blocks) for chunk in chunks])
        parts = np.split(found, ends[:-1]) if chunks else []
        self._of_chunk = {_key(chunk): part for chunk, part in zip(chunks, parts, strict=True)}

    def of_blocks(self, chunk: SlotChunk) -> Floats:
        """(blocks,): by what error signals were divided."""
        return self._of_chunk[_key(chunk)][: len(chunk.blocks)]

    def of_slots(self, chunk: SlotChunk, low: int, high: int, dtype: torch.dtype) -> Tensor:
        """(slots,): the same for the slots low to high."""
        return torch.from_numpy(chunk.per_slot(self.of_blocks(chunk))[low:high]).to(dtype)

    def of_some(self, chunk: SlotChunk, slots: Ints, dtype: torch.dtype) -> Tensor:
        """(slots,): the same for some slots, by their places in the chunk."""
        blocks = np.searchsorted(chunk.starts, slots, "right") - 1
        return torch.from_numpy(self.of_blocks(chunk)[blocks]).to(dtype)


def _key(chunk: SlotChunk) -> tuple[int, int]:
    return chunk.number, chunk.chunk.first_step


def _calls(chunks: Sequence[SlotChunk]) -> Calls:
    """The calls of some chunks, one chunk's after the other's. Those without slots count for nothing."""
    blocks = np.concatenate([np.zeros((0, len(BLOCK_FIELDS)), np.int64), *(chunk.blocks for chunk in chunks)])
    layers = np.repeat([chunk.number for chunk in chunks], [len(chunk.blocks) for chunk in chunks])
    written = np.concatenate([np.zeros(0, np.int64), *map(_written, chunks)])
    step, backward, _, first_row, rows, _, arrival = blocks.T
    return Calls(step, backward, first_row, rows, layers.astype(np.int64), arrival, written)


def _written(chunk: SlotChunk) -> Ints:
    """(blocks,): how many slots of each block are not silent."""
    if chunk.silent is None:
        return chunk.counts
    ends = np.append(0, np.cumsum(~chunk.silent))
    written: Ints = ends[chunk.starts + chunk.counts] - ends[chunk.starts]
    return written
