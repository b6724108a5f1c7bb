"""The mean that a loss takes, undone: by how many positions, or rows, the error signals of each call were divided.

A loss that is a mean over tokens divides every error signal by the number of tokens that have a loss in the batch. The same sample would then
count less beside longer ones. That number is read from the layer nearest to the loss, the one whose error signal arrives first in a
backward pass: its slots that are not silent. For a classifier these are the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.store.format import NO_ROW
from dualform.store.reader import Store
from dualform.store.records import Block
from dualform.store.slots import SlotChunk

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
LOSS_MEANS = ("tokens", "rows", "none")
"""What a loss may be a mean over: the positions that have a loss, the rows of the batch, or nothing (a sum)."""
RECORDED_MEAN = "tokens"
"""What the recorder takes the loss for a mean over, where it counts curvature."""


CALLS = ("step", "backward", "first_row", "rows", "layer", "arrival", "written")
"""What is known of a call. arrival: the place of its error signal among those of the backward pass, the lowest is nearest to the loss; written: how
many of its slots are not silent."""


def table_of_calls(calls: Sequence[Sequence[int]] | Ints) -> pl.DataFrame:
    """A line for each call, with the numbers of CALLS."""
    numbers = np.asarray(calls, np.int64).reshape(-1, len(CALLS))
    return pl.DataFrame(numbers, schema=dict.fromkeys(CALLS, pl.Int64), orient="row")


def calls_of_blocks(blocks: Sequence[Block]) -> pl.DataFrame:
    """The calls of one step."""
    calls = []
    for block in blocks:
        silent = 0 if block.silent is None else int(block.silent.sum())
        written = block.rows * block.positions - silent
        calls.append((0, block.backward, block.first_row, block.rows, block.layer, block.arrival, written))
    return table_of_calls(calls)


def divisors(calls: pl.DataFrame, mean: str) -> Floats:
    """By what the error signals of each call were divided, (calls,). calls: as table_of_calls gives them. mean: one of LOSS_MEANS.

    Calls of one backward pass and one batch() call share a mean. A call that serves all rows has that of the batch nearest to the loss.
    """
    if mean == "none":
        return np.ones(calls.height)
    backward = ["step", "backward"]
    batch = [*backward, "first_row"]
    has_rows = (pl.col("first_row") != NO_ROW) & (pl.col("rows") > 0)
    # In every batch of every backward pass, the call nearest to the loss comes first; of the layers of one module, the last
    nearest_first = calls.filter(has_rows).sort([*batch, "arrival", "layer"], descending=[False] * 4 + [True])
    at_output = pl.col("layer") == pl.col("layer").first()
    count = pl.col("written").filter(at_output).sum() if mean == "tokens" else pl.col("rows").first()
    of_batches = nearest_first.group_by(batch, maintain_order=True).agg(
        count.clip(lower_bound=1).cast(pl.Float64).alias("of_batch"), pl.col("arrival").first()
    )
    of_passes = of_batches.group_by(backward).agg(pl.col("of_batch").sort_by("arrival").first().alias("of_pass"))
    known = calls.join(of_batches, on=batch, how="left", maintain_order="left")
    known = known.join(of_passes, on=backward, how="left", maintain_order="left")
    is_shared = pl.col("first_row") == NO_ROW
    divisor = pl.when(is_shared).then("of_pass").when(has_rows).then("of_batch").fill_null(1.0)
    found: Floats = known.select(divisor.alias("divisor"))["divisor"].to_numpy()
    return found


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


def _calls(chunks: Sequence[SlotChunk]) -> pl.DataFrame:
    """The calls of some chunks, one chunk's after the other's. Those without slots count for nothing."""
    found = [np.zeros((0, len(CALLS)), np.int64)]
    for chunk in chunks:
        step, backward, _, first_row, rows, _, arrival = chunk.blocks.T
        layer = np.full_like(step, chunk.number)
        found.append(np.stack([step, backward, first_row, rows, layer, arrival, _written(chunk)], 1))
    return table_of_calls(np.concatenate(found))


def _written(chunk: SlotChunk) -> Ints:
    """(blocks,): how many slots of each block are not silent."""
    if chunk.silent is None:
        return chunk.counts
    ends = np.append(0, np.cumsum(~chunk.silent))
    written: Ints = ends[chunk.starts + chunk.counts] - ends[chunk.starts]
    return written
