"""A condition that memory is edited by: over groups, where their deltas are kept, or over slots."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from dualform.dual.gradients import Keep
from dualform.dual.totals import View, find
from dualform.errors import NotRecordedError
from dualform.query.masks import Bools, Mask, condition_columns, over_groups
from dualform.store.reader import Store


@dataclass(frozen=True)
class Masking:
    """What is kept, or what is dropped, of a run up to step `end`."""

    store: Store
    condition: pl.Expr | str
    end: int
    name: str
    """keep | drop"""

    def from_groups(self) -> tuple[View, Bools] | None:
        """Group deltas that answer it, and which groups take part; None: slots are needed."""
        columns = condition_columns(self.condition, self.store, self.name)
        view = find(self.store, columns, self.end, deltas=True, subset=True)
        named = None if view is None else over_groups(self.condition, view.groups, self.name)
        if view is None or named is None:
            return None
        return view, named if self.name == "keep" else ~named

    def slots(self) -> Keep:
        """Which slots take part."""
        if self.store.manifest.keep == "totals":
            raise NotRecordedError(
                f"{self.store.folder} keeps totals only; this mask needs group deltas for its columns, or slots. Record with "
                f'totals= for them, or with keep="slots".'
            )
        mask = Mask(self.store, self.condition, self.end, name=self.name)
        return mask if self.name == "keep" else lambda chunk: ~mask(chunk)
