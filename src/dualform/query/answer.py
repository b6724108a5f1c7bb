"""What can be asked of scores: the best slots, totals by any column, or all of them.

An answer holds a scorer (what is computed) and turns what a scan or a search finds into tables. Nothing is computed until it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.arrays import Ints
from dualform.errors import NotRecordedError, QuestionError
from dualform.layers.layer import Layer
from dualform.query.conditions import Condition, Where
from dualform.query.executors import HERE, Runner
from dualform.query.groups import Groups
from dualform.query.ranking import Order, Ranking, side_by_side
from dualform.query.reducers import GroupSums, TopK, Totals
from dualform.query.scan import R, scan, scan_blocks, tiles
from dualform.query.scorer import Scorer, Selection
from dualform.query.search import top_k
from dualform.query.search.index import TopKRequest


class Scores(NamedTuple):
    """Some scores: the numbers of the slots (m,), and (*queries, m)."""

    slots: Tensor
    scores: Tensor


class Sums(NamedTuple):
    """Totals by group, groups in the order in which they first appeared. A group's position is a `slot_position`."""

    values: pl.DataFrame
    totals: Tensor
    """(queries, groups) float64"""
    visits: Tensor
    """(groups,)"""
    described: pl.DataFrame
    """The groups with those columns that are the same for all rows of a group."""
    errors: Tensor | None = None
    """(queries, groups): the standard errors of totals that are estimates; None: they are exact."""


class Answer:
    """The scores of slots for some queries. Threads may share it."""

    def __init__(self, scorer: Scorer, shape: dict[str, int], *, silent: bool = False, executor: Runner = HERE):
        """shape: how many queries there are along each part of their address, e.g. query and position.

        silent: whether slots that wrote nothing (padding, ignored labels) take part. executor: where scans run.
        """
        self._scorer = scorer
        self._shape = tuple(shape.values())
        self._silent = silent
        self._executor = executor
        self._names = tuple(shape)

    @cached_property
    def _address(self) -> dict[str, Ints]:
        """Where each query stands along each part of its address, (queries,)."""
        places = np.indices(self._shape).reshape(len(self._names), -1)
        return dict(zip(self._names, places, strict=True))

    @property
    def layer(self) -> Layer:
        """The layer that the slots are of."""
        return self._scorer.layer

    @property
    def value(self) -> str:
        """The name of a score in tables."""
        return self._scorer.value

    def top(
        self,
        k: int = 10,
        *,
        by: str | Sequence[str] | None = None,
        per: str | Sequence[str] | None = None,
        where: Where | None = None,
        absolute: bool = False,
        lowest: bool = False,
    ) -> pl.DataFrame:
        """Return the k slots with the highest scores for each query, or the k groups of `by` with the highest totals.

        per: the k best slots of each group that these columns make, e.g. of each label. absolute: rank by absolute value, and sum
        absolute values, as the paper's figures do. lowest: the lowest instead. Ties go to the lower slot number.
        """
        order = check_top(k, absolute=absolute, lowest=lowest)
        if by is not None and per is not None:
            raise QuestionError("top(): by and per do not go together.")
        if by is not None:
            return self._top_groups(k, by, where, absolute, order)
        self._needs_slots("single slots")
        groups = None if per is None else self.groups(per)
        selection = self._selection(where)
        request = TopKRequest(k, order, selection, groups)
        rankings = top_k(self._scorer, request, self._executor)
        if not rankings:  # no slots, hence no groups
            rankings = [Ranking.empty(self._scorer.queries, self._scorer.dtype)]
        # The ranks of each group begin at 1; groups follow each other in the order of their values
        ranks = [np.arange(1, ranking.slots.shape[1] + 1) for ranking in rankings]
        slots, scores = side_by_side(rankings)
        flat_slots = slots.reshape(-1).numpy()
        described = self._scorer.describe(flat_slots)
        return self._table(scores, np.concatenate(ranks), described, self._errors_of(slots))

    def _errors_of(self, slots: Tensor) -> Tensor | None:
        """Return the standard errors of the scores of some slots (queries, k); None: they are exact."""
        return None

    def best(self, k: int, *, where: Where | None = None, absolute: bool = False, lowest: bool = False) -> Ranking:
        """Return slot numbers and scores as top(k) does, without the slots' columns: for many queries."""
        order = check_top(k, absolute=absolute, lowest=lowest)
        self._needs_slots("single slots")
        request = TopKRequest(k, order, self._selection(where))
        [ranking] = top_k(self._scorer, request, self._executor)
        return ranking

    def total(self, by: str | Sequence[str], *, where: Where | None = None, absolute: bool = False) -> pl.DataFrame:
        """Return the sum of the scores of each group of slots, for each query; absolute: of their absolute values.

        Totals that were kept for these columns answer it without a scan. Where not all slots were kept as they were (every=, or
        keep="projected"), totals are estimates: the column `standard_error` says how far they may be off. NaN: no slot of the group was kept.
        """
        sums = self.sums(by, where=where, absolute=absolute)
        # Groups in the order of their values
        numbered = sums.values.with_row_index(" place")
        ordered = numbered.sort(sums.values.columns)
        order = ordered[" place"].to_numpy().astype(np.int64)
        values = ordered.drop(" place")
        totals = sums.totals[:, torch.from_numpy(order)]
        # Column by column: for a single query, a join of tables would take longer than the sums
        groups = list(values)
        if self._scorer.queries != 1:
            every_group = np.arange(len(order))
            repeated = np.tile(every_group, self._scorer.queries)
            groups = [column.gather(repeated) for column in values]
        numbers = [pl.Series("total", totals.reshape(-1).numpy(), pl.Float64)]
        if sums.errors is not None:
            errors = sums.errors[:, torch.from_numpy(order)]
            numbers.append(pl.Series("standard_error", errors.reshape(-1).numpy(), pl.Float64))
        return pl.DataFrame([*self._repeated_address(len(order)), *groups, *numbers])

    def scores(self, *, where: Where | None = None) -> Iterator[Scores]:
        """Return every score, a run of slots at a time: slot numbers (m,) and scores (*queries, m)."""
        self._needs_slots("single slots")
        pieces = self._selection(where).pieces()
        every_query = slice(0, self._scorer.queries)
        for tile in tiles(pieces, self._scorer, every_query):
            scores = tile.scores.reshape(*self._shape, len(tile.slots))
            yield Scores(tile.slots, scores)

    def groups(self, by: str | Sequence[str]) -> Groups:
        """Return the groups that columns make of the slots, for a reducer of your own: `groups(tile.piece.run)[tile.places]`
        are the group numbers of a tile's slots, and `groups.values` says which group a number is."""
        return self._scorer.groups(by)

    def reduce(self, reducer: R, *, where: Where | None = None) -> R:
        """Give every score to a reducer of your own (query/scan.py says what one is), and return it."""
        self._needs_slots("single slots")
        pieces = self._selection(where).pieces()
        return scan(pieces, self._scorer, reducer, self._executor)

    def sums(self, by: str | Sequence[str], *, where: Where | None = None, absolute: bool = False) -> Sums:
        """Return the same as total(by) as plain numbers, with visits: for millions of groups."""
        columns = [by] if isinstance(by, str) else list(by)
        stored = None
        if where is None and not self._counts_silent():
            stored = self._stored_sums(columns, absolute)
        if stored is not None:
            return stored
        question = f"totals by {'+'.join(columns)}"
        question += " of sizes (absolute)" if absolute else ""
        question += " with where=" if where is not None else ""
        question += " with silent=True" if self._silent else ""
        self._needs_slots(question)
        return self._scaled(self._scanned_sums(by, where, absolute), columns, where, absolute)

    def _scaled(self, found: Sums, columns: list[str], where: Where | None, absolute: bool) -> Sums:
        """Scale totals of some steps to all of them, if only the slots of one step in n were kept (`every=n`).

        As if steps were drawn one by one: their variance is that of the group's totals of single steps.
        """
        store = self._scorer.store
        every = store.manifest.every
        if every == 1 or "step" in columns:
            return found
        by_step = self._scanned_sums([*columns, "step"], where, absolute)
        places = found.values.with_row_index(" place")
        group_of = by_step.values.join(
            places, on=found.values.columns, how="left", nulls_equal=True, maintain_order="left"
        )
        squares = torch.zeros_like(found.totals)
        squares.index_add_(1, torch.from_numpy(group_of[" place"].to_numpy().astype(np.int64)), by_step.totals.square())
        steps = sum(map(store.manifest.keeps_step, range(self._scorer.end)))
        spread = (squares - found.totals.square() / max(steps, 1)).clamp(min=0)
        correction = (1 - 1 / every) * steps / (steps - 1) if steps > 1 else math.nan
        errors = every * (correction * spread).sqrt()
        # A zero would say that the total is known to be zero
        errors[:, found.visits == 0] = math.nan
        return found._replace(totals=every * found.totals, errors=errors)

    def _scanned_sums(self, by: str | Sequence[str], where: Where | None, absolute: bool) -> Sums:
        groups = self.groups(by)
        found = self._sums_of_groups(groups, self._selection(where), absolute)
        appeared = found.first.argsort(stable=True)
        values = _lines(groups.values, appeared)
        described = _lines(groups.described(), appeared)
        return Sums(values, found.totals[:, appeared], found.visits[appeared], described)

    def _sums_of_groups(self, groups: Groups, selection: Selection, absolute: bool) -> GroupSums:
        scorer = self._scorer
        totals = torch.zeros(scorer.queries, len(groups), dtype=torch.float64)
        found = Totals(groups, 0, absolute)

        def totals_of(count: int) -> Totals:
            return Totals(groups, count, absolute)

        for queries, found in scan_blocks(scorer, len(groups), selection.pieces, totals_of, self._executor):
            totals[queries] = found.totals.T
        return GroupSums(totals, found.visits, found.first)

    def _stored_sums(self, columns: list[str], absolute: bool) -> Sums | None:
        stored = self._scorer.stored_totals(columns, absolute)
        if stored is None:
            return None
        view, totals = stored
        values = view.groups.select(columns)
        visits = view.visits(self.layer)
        return _without_unused_null(Sums(values, totals, visits, values))

    def _counts_silent(self) -> bool:
        """Return whether silent slots take part, which stored totals leave out."""
        if not self._silent:
            return False
        # A store with totals only does not tell whether it had silent slots
        return self._scorer.store.manifest.keep == "totals" or self._scorer.has_silent()

    def _selection(self, where: Where | None) -> Selection:
        scorer = self._scorer
        condition = None if where is None else Condition(scorer.store, where, scorer.end)
        return Selection(scorer, condition, self._silent)

    def _needs_slots(self, question: str) -> None:
        manifest = self._scorer.store.manifest
        if manifest.keep != "totals":
            return
        groupings = manifest.totals.groupings if manifest.totals else ()
        kept = ", ".join(" + ".join(grouping.columns) for grouping in groupings)
        raise NotRecordedError(
            f"{question}: {self._scorer.store.location} keeps totals only, for {kept or 'nothing yet'}, and no slots. "
            f'Record with keep="slots", or with totals= for these columns.'
        )

    def _top_groups(
        self, k: int, by: str | Sequence[str], where: Where | None, absolute: bool, order: Order
    ) -> pl.DataFrame:
        sums = self.sums(by, where=where, absolute=absolute)
        visited = torch.nonzero(sums.visits > 0)[:, 0]
        if order == "absolute":  # totals of absolute values are ranked as they are
            order = "highest"
        best = TopK(len(sums.totals), k, order, torch.float64)
        best.insert(visited, sums.totals[:, visited])
        groups, scores = best.ranking
        visits = pl.Series("visits", sums.visits.numpy())
        described = sums.described.with_columns(visits)
        flat_groups = groups.reshape(-1).numpy()
        ranks = np.arange(1, scores.shape[1] + 1)
        errors = None if sums.errors is None else sums.errors.gather(1, groups)
        return self._table(scores, ranks, described[flat_groups], errors)

    def _table(self, scores: Tensor, ranks: Ints, described: pl.DataFrame, errors: Tensor | None) -> pl.DataFrame:
        """Return a line for each query and each of its best scores (queries, k). ranks: (k,). described: more columns.

        errors: the standard errors of scores that are estimates.
        """
        count, width = scores.shape
        all_ranks = np.tile(ranks, count)
        flat_scores = scores.reshape(-1).numpy()
        return pl.DataFrame(
            [
                *self._repeated_address(width),
                pl.Series("rank", all_ranks, pl.Int64),
                pl.Series(self.value, flat_scores),
                *([] if errors is None else [pl.Series("standard_error", errors.reshape(-1).numpy(), pl.Float64)]),
                *described.get_columns(),
            ]
        )

    def _repeated_address(self, times: int) -> Iterator[pl.Series]:
        """Return the columns that say which query a line is of, each query for so many lines."""
        for name, places in self._address.items():
            yield pl.Series(name, np.repeat(places, times), pl.Int64)


def check_top(k: object, *, absolute: bool, lowest: bool) -> Order:
    """Refuse a question for the best that makes no sense; return which scores are the best."""
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise QuestionError(f"top({k!r}): expected a whole number of at least 1.")
    if absolute and lowest:
        raise QuestionError("top(): absolute and lowest do not go together.")
    if absolute:
        return "absolute"
    return "lowest" if lowest else "highest"


def _without_unused_null(sums: Sums) -> Sums:
    """Drop the group of slots that have no row, unless this layer has such slots: stored totals have it for all layers."""
    all_null = pl.all_horizontal(pl.all().is_null())
    is_null = sums.values.select(all_null).to_series()
    place = is_null.arg_max()
    if place is None or not is_null[place]:
        return sums
    totals = sums.totals[:, place]
    if bool(sums.visits[place]) or bool(totals.any()):
        return sums
    others = np.flatnonzero(~is_null.to_numpy())
    numbers = torch.from_numpy(others)
    return Sums(
        sums.values[others],
        sums.totals[:, numbers],
        sums.visits[numbers],
        sums.described[others],
    )


def _lines(groups: pl.DataFrame, places: Tensor) -> pl.DataFrame:
    """Return some lines of a table of groups, in this order."""
    lines = groups[places.numpy()]
    return lines.rename({"position": "slot_position"}, strict=False)
