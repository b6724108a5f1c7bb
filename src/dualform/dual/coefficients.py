"""The coefficients of one parameter over a stretch of training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from dualform.errors import NotRecordedError
from dualform.recursions import RECURSIONS, Floats, Replayed
from dualform.store.reader import SlotChunk, Store


@dataclass(frozen=True)
class Coefficients:
    """What became of each gradient of a parameter between two moments of training.

    W_end = a·W_begin + Σ b·state_begin − Σ_s c_s Σ_backward factor·gradient.
    """

    begin: int
    end: int
    steps: np.ndarray[tuple[int], np.dtype[np.int64]]
    """(updates,): the steps in which the parameter was updated."""
    replayed: Replayed
    factors: Floats
    """(updates, backward passes), 0 where there was none."""

    @cached_property
    def _table(self) -> Floats:
        """(steps + 1, backward passes + 1): coefficient × factor; the last row and column are zero."""
        table = np.zeros((self.end - self.begin + 1, self.factors.shape[1] + 1))
        table[self.steps - self.begin, :-1] = self.replayed.c[:, None] * self.factors
        return table

    def of_blocks(self, chunk: SlotChunk) -> Floats:
        """(blocks,): coefficient × factor of each block's slots; 0 for blocks outside the stretch."""
        step = np.clip(chunk.blocks[:, 0] - self.begin, -1, self.end - self.begin)
        backward = np.minimum(chunk.blocks[:, 1], self.factors.shape[1])
        found: Floats = self._table[step, backward]
        return found


def coefficients(store: Store, parameter: str, *, begin: int = 0, end: int | None = None) -> Coefficients:
    """The coefficients of a parameter from `begin` to `end` (in steps; default: all that is sealed)."""
    if store.manifest.keep == "totals":
        raise NotRecordedError(
            f"{store.folder} keeps totals only, no slots: it answers totals, masks and contributions by the columns they "
            f'were kept for. Record with keep="slots" for the rest.'
        )
    if store.manifest.keep == "keys":
        raise NotRecordedError(
            f"{store.folder} keeps keys only: it answers attention weights, not values, contributions, masks or the "
            f'certificate. Record with keep="slots" for those.'
        )
    number = store.parameter(parameter)
    end = store.end_step if end is None else end
    here = (pl.col("parameter") == number) & (pl.col("step") >= begin) & (pl.col("step") < end)
    updates = store.updates.filter(here)
    steps = updates["step"].to_numpy().astype(np.int64)
    kinds = updates["optimizer"].unique().to_list()
    if len(kinds) > 1:
        raise NotRecordedError(f"{parameter!r} was trained by several kinds of optimizers: {kinds}.")
    kind = kinds[0] if kinds else "sgd"
    fixed = {"step", "parameter", "optimizer", "factors", "residual", "after", "gradient_kept"}
    settings = {name: updates[name].to_numpy().astype(np.float64) for name in updates.columns if name not in fixed}
    replayed = RECURSIONS[kind](settings, len(steps)) if len(steps) else Replayed(1.0, {}, np.zeros(0))
    return Coefficients(begin, end, steps, replayed, _factors(updates["factors"]))


def _factors(lists: pl.Series) -> Floats:
    lengths = lists.list.len().to_numpy().astype(np.int64)
    table = np.zeros((len(lists), int(lengths.max()) if len(lists) else 0))
    rows = np.repeat(np.arange(len(lists)), lengths)
    places = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if len(rows):
        table[rows, places] = lists.explode().drop_nulls().to_numpy()
    return table
