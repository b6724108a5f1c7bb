"""Undo the mean of a loss: how many positions, or rows, the error signals of each call were divided by.

A loss that is a mean over tokens divides every error signal by the number of tokens with a loss in the batch, so that a sample would count
less beside longer ones. That number is the number of slots, silent ones excluded, of the layer nearest to the loss, whose error signal
arrives first in a backward pass. For a classifier these are the rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.arrays import Floats, Ints
from dualform.store.format import NO_ROW
from dualform.store.reader import Store
from dualform.store.records import Block, written_slots
from dualform.store.slots import SlotChunk

LOSS_MEANS = ("tokens", "rows", "none")
"""What a loss may be a mean over: the positions that have a loss, the rows of the batch, or nothing (a sum)."""
RECORDED_MEAN = "tokens"
"""What the recorder assumes where it counts curvature."""


class Call(NamedTuple):
    """A call of a layer in a training step."""

    step: int
    backward: int
    first_row: int
    """NO_ROW: its slots belong to all rows."""
    rows: int
    layer: int
    arrival: int
    """The order in which its error signal arrived in the backward pass; the first is nearest to the loss."""
    written: int
    """How many of its slots are not silent."""


BACKWARD = ["step", "backward"]
"""The columns that identify a backward pass."""
BATCH = [*BACKWARD, "first_row"]
"""The columns that identify a batch in a backward pass."""


def table_of_calls(calls: Sequence[Sequence[int]] | Ints) -> pl.DataFrame:
    """Return a line for each call, with the fields of Call."""
    schema = dict.fromkeys(Call._fields, pl.Int64)
    numbers = np.asarray(calls, np.int64).reshape(-1, len(schema))
    return pl.DataFrame(numbers, schema=schema, orient="row")


def calls_of_blocks(blocks: Sequence[Block]) -> pl.DataFrame:
    """Return the calls of one step."""
    calls = []
    for block in blocks:
        call = Call(
            step=0,
            backward=block.backward,
            first_row=block.first_row,
            rows=block.rows,
            layer=block.layer,
            arrival=block.arrival,
            written=written_slots(block),
        )
        calls.append(call)
    return table_of_calls(calls)


def divisors(calls: pl.DataFrame, mean: str) -> Floats:
    """Return what the error signals of each call were divided by, (calls,). calls: from table_of_calls. mean: one of LOSS_MEANS.

    Calls of one backward pass and one batch() share a divisor. A call that serves all rows has that of the batch nearest to the loss.
    """
    if mean == "none":
        return np.ones(calls.height)
    is_shared = pl.col("first_row") == NO_ROW
    has_rows = ~is_shared & (pl.col("rows") > 0)
    of_batches = _means_of_batches(calls.filter(has_rows), mean)
    nearest_batch = pl.col("of_batch").sort_by("arrival").first()
    of_passes = of_batches.group_by(BACKWARD).agg(nearest_batch.alias("of_pass"))
    joined = calls.join(of_batches, on=BATCH, how="left", maintain_order="left")
    joined = joined.join(of_passes, on=BACKWARD, how="left", maintain_order="left")
    divisor = pl.when(is_shared).then("of_pass").when(has_rows).then("of_batch").fill_null(1.0)
    divided_by: Floats = joined.select(divisor.alias("divisor"))["divisor"].to_numpy()
    return divided_by


def _means_of_batches(calls: pl.DataFrame, mean: str) -> pl.DataFrame:
    """Return what the loss of each batch was divided by (`of_batch`), and when the call nearest to it arrived."""
    # Of the layers of one module, the last is nearest to the loss
    nearest_first = calls.sort([*BATCH, "arrival", "layer"], descending=[False] * 4 + [True])
    rows = pl.col("rows").first()
    is_at_loss = pl.col("layer") == pl.col("layer").first()
    tokens = pl.col("written").filter(is_at_loss).sum()
    count = tokens if mean == "tokens" else rows
    of_batch = count.clip(lower_bound=1).cast(pl.Float64)
    arrival = pl.col("arrival").first()
    return nearest_first.group_by(BATCH, maintain_order=True).agg(of_batch.alias("of_batch"), arrival)


class LossMean:
    """The divisors of a recording, call by call."""

    def __init__(self, store: Store, mean: str = "tokens"):
        """mean: one of LOSS_MEANS."""
        self.mean = mean
        layers = store.manifest.layers
        self._layers = len(layers)
        chunks = [chunk for layer in layers for chunk in store.addresses(layer.name)]
        of_calls = divisors(_calls(chunks), mean)
        self._of_chunk: dict[tuple[int, int], Floats] = {}
        start = 0
        for chunk in chunks:
            end = start + len(chunk.blocks)
            self._of_chunk[_key(chunk)] = of_calls[start:end]
            start = end

    def part(self, steps: Iterable[int]) -> LossMean:
        """Return what is known of the chunks that begin with these steps."""
        keys = {(layer, step) for layer in range(self._layers) for step in steps}
        found = copy.copy(self)
        found._of_chunk = {key: self._of_chunk[key] for key in keys & self._of_chunk.keys()}
        return found

    def of_blocks(self, chunk: SlotChunk) -> Floats:
        """Return what the error signals of each block were divided by, (blocks,)."""
        of_chunk = self._of_chunk[_key(chunk)]
        return of_chunk[: len(chunk.blocks)]

    def of_slots(self, chunk: SlotChunk, low: int, high: int, dtype: torch.dtype) -> Tensor:
        """Return the same for the slots low to high, (slots,)."""
        of_slots = chunk.per_slot(self.of_blocks(chunk))
        return torch.from_numpy(of_slots[low:high]).to(dtype)

    def of_some(self, chunk: SlotChunk, slots: Ints, dtype: torch.dtype) -> Tensor:
        """Return the same for some slots, given by their places in the chunk, (slots,)."""
        blocks = np.searchsorted(chunk.starts, slots, "right") - 1
        of_slots = self.of_blocks(chunk)[blocks]
        return torch.from_numpy(of_slots).to(dtype)


def _key(chunk: SlotChunk) -> tuple[int, int]:
    return chunk.number, chunk.chunk.first_step


def _calls(chunks: Sequence[SlotChunk]) -> pl.DataFrame:
    """Return the calls of some chunks, one chunk after the other."""
    tables = [np.zeros((0, len(Call._fields)), np.int64)]
    for chunk in chunks:
        step, backward, _, first_row, rows, _, arrival = chunk.blocks.T
        layer = np.full_like(step, chunk.number)
        columns = [step, backward, first_row, rows, layer, arrival, chunk.written_counts]
        tables.append(np.stack(columns, axis=1))
    return table_of_calls(np.concatenate(tables))
