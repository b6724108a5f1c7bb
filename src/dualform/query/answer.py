"""What can be asked of scores: the best slots, totals by any column, or all of them.

An answer holds a scorer (what is computed) and turns what a scan or a search finds into tables. Nothing is computed until it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.errors import NotRecordedError, QuestionError
from dualform.layers.streams import Layer
from dualform.query.conditions import Condition, Where
from dualform.query.ranking import Order, Ranking, side_by_side
from dualform.query.reducers import TopK, Totals
from dualform.query.scan import R, query_blocks, scan, tiles
from dualform.query.scorer import Scorer, Selection
from dualform.query.search import top_k
from dualform.query.search.index import TopKRequest

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Scores(NamedTuple):
    """Some scores: the numbers of the slots (m,), and (*queries, m)."""

    slots: Tensor
    scores: Tensor


class SortedGroups(NamedTuple):
    """Groups sorted by their values."""

    order: Ints
    """The place of each in the order in which groups first appeared."""
    values: pl.DataFrame


class Sums(NamedTuple):
    """Totals by group, groups in the order in which they first appeared. A group's position is a `slot_position`."""

    values: pl.DataFrame
    totals: Tensor
    """(queries, groups) float64"""
    visits: Tensor
    """(groups,)"""
    described: pl.DataFrame
    """The groups with those columns that are the same for all rows of a group."""
    sorted: SortedGroups | None = None
    """The groups sorted by their values, if that is known already."""


class Answer:
    """The scores of slots for some queries. Threads may share it."""

    def __init__(
        self, scorer: Scorer, shape: dict[str, int], *, silent: bool = False, executor: Executor | None = None
    ):
        """shape: how many queries there are along each part of their address, e.g. query and position.

        silent: whether slots that wrote nothing (padding, ignored labels) take part. executor: runs scans; None: this thread.
        """
        self._scorer = scorer
        self._shape = tuple(shape.values())
        self._silent = silent
        self._executor = executor
        places = np.indices(self._shape).reshape(len(shape), -1)
        self._address = [pl.Series(name, values, pl.Int64) for name, values in zip(shape, places, strict=True)]

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
        groups = None if per is None else self._scorer.groups(per)
        request = TopKRequest(k, order, self._selection(where), groups)
        rankings = top_k(self._scorer, request, self._executor)
        if not rankings:  # no slots, hence no groups
            rankings = [Ranking.empty(self._scorer.queries, self._scorer.dtype)]
        # The ranks of each group begin at 1; groups follow each other in the order of their values
        ranks = [np.arange(1, ranking.slots.shape[1] + 1) for ranking in rankings]
        ranking = side_by_side(rankings)
        described = self._scorer.describe(ranking.slots.reshape(-1).numpy())
        return self._table(ranking.scores, np.concatenate(ranks), described)

    def best(self, k: int, *, where: Where | None = None, absolute: bool = False, lowest: bool = False) -> Ranking:
        """Return slot numbers and scores as top(k) does, without the slots' columns: for many queries."""
        order = check_top(k, absolute=absolute, lowest=lowest)
        self._needs_slots("single slots")
        [ranking] = top_k(self._scorer, TopKRequest(k, order, self._selection(where)), self._executor)
        return ranking

    def total(self, by: str | Sequence[str], *, where: Where | None = None, absolute: bool = False) -> pl.DataFrame:
        """Return the sum of the scores of each group of slots, for each query; absolute: of their absolute values.

        Totals that were kept for these columns answer it without a scan.
        """
        sums = self.sums(by, where=where, absolute=absolute)
        order, values = sums.sorted or _sorted_groups(sums.values)
        totals = sums.totals[:, torch.from_numpy(order)]
        # Column by column: for a single query, a join of tables would take longer than the sums
        address = [pl.Series(one.name, np.repeat(one.to_numpy(), len(order))) for one in self._address]
        groups = list(values)
        if self._scorer.queries != 1:
            repeated = np.tile(np.arange(len(order)), self._scorer.queries)
            groups = [column.gather(repeated) for column in values]
        return pl.DataFrame([*address, *groups, pl.Series("total", totals.reshape(-1).numpy(), pl.Float64)])

    def scores(self, *, where: Where | None = None) -> Iterator[Scores]:
        """Return every score, a run of slots at a time: slot numbers (m,) and scores (*queries, m)."""
        self._needs_slots("single slots")
        pieces = self._selection(where).pieces()
        for tile in tiles(pieces, self._scorer, slice(0, self._scorer.queries)):
            yield Scores(tile.slots, tile.scores.reshape(*self._shape, len(tile.slots)))

    def reduce(self, reducer: R, *, where: Where | None = None) -> R:
        """Give every score to a reducer of your own (query/scan.py says what one is), and return it."""
        self._needs_slots("single slots")
        return scan(self._selection(where).pieces(), self._scorer, reducer, self._executor)

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
        return self._scanned_sums(by, where, absolute)

    def _scanned_sums(self, by: str | Sequence[str], where: Where | None, absolute: bool) -> Sums:
        scorer = self._scorer
        groups = scorer.groups(by)
        selection = self._selection(where)
        totals = torch.zeros(scorer.queries, len(groups), dtype=torch.float64)
        found = Totals(groups, 0, absolute)
        for queries in query_blocks(scorer, len(groups)):
            found = Totals(groups, queries.stop - queries.start, absolute)
            scan(selection.pieces(), scorer, found, self._executor, queries=queries)
            totals[queries] = found.totals.T
        appeared = found.first.argsort(stable=True)
        values, described = (
            table[appeared.numpy()].rename({"position": "slot_position"}, strict=False)
            for table in (groups.values, groups.described())
        )
        return Sums(values, totals[:, appeared], found.visits[appeared], described)

    def _stored_sums(self, columns: list[str], absolute: bool) -> Sums | None:
        stored = self._scorer.stored_totals(columns, absolute)
        if stored is None:
            return None
        view, totals = stored

        def sorted_values() -> tuple[pl.DataFrame, SortedGroups]:
            values = view.groups.select(columns)
            return values, _sorted_groups(values)

        key = ("groups of totals", *columns)
        values, ordered = self._scorer.store.cached(key, sorted_values, self._scorer.end)
        return _without_unused_null(Sums(values, totals, view.visits(self.layer), values, ordered))

    def _counts_silent(self) -> bool:
        """Return whether silent slots take part, which stored totals leave out."""
        if not self._silent:
            return False
        # A store with totals only does not tell whether it had silent slots
        return self._scorer.store.manifest.keep == "totals" or self._scorer.has_silent()

    def _selection(self, where: Where | None) -> Selection:
        condition = None if where is None else Condition(self._scorer.store, where, self._scorer.end)
        return Selection(self._scorer, condition, self._silent)

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
        # Totals of absolute values are ranked as they are
        best = TopK(len(sums.totals), k, "lowest" if order == "lowest" else "highest", torch.float64)
        best.insert(visited, sums.totals[:, visited])
        slots, scores = best.ranking
        described = sums.described.with_columns(pl.Series("visits", sums.visits.numpy()))
        return self._table(scores, np.arange(1, scores.shape[1] + 1), described[slots.reshape(-1).numpy()])

    def _table(self, scores: Tensor, ranks: Ints, described: pl.DataFrame) -> pl.DataFrame:
        """Return a line for each query and each of its best scores (queries, k). ranks: (k,). described: more columns."""
        count, width = scores.shape
        address = [pl.Series(one.name, np.repeat(one.to_numpy(), width), pl.Int64) for one in self._address]
        return pl.DataFrame(
            [
                *address,
                pl.Series("rank", np.tile(ranks, count), pl.Int64),
                pl.Series(self.value, scores.reshape(-1).numpy()),
                *described.get_columns(),
            ]
        )


def check_top(k: object, *, absolute: bool, lowest: bool) -> Order:
    """Refuse a question for the best that makes no sense; return which scores are the best."""
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise QuestionError(f"top({k!r}): expected a whole number of at least 1.")
    if absolute and lowest:
        raise QuestionError("top(): absolute and lowest do not go together.")
    if absolute:
        return "absolute"
    return "lowest" if lowest else "highest"


def _sorted_groups(values: pl.DataFrame) -> SortedGroups:
    numbered = values.with_row_index(" place").sort(values.columns)
    return SortedGroups(numbered[" place"].to_numpy().astype(np.int64), numbered.drop(" place"))


def _without_unused_null(sums: Sums) -> Sums:
    """Drop the group of slots that have no row, unless this layer has such slots: stored totals have it for all layers."""
    is_null = sums.values.select(pl.all_horizontal(pl.all().is_null())).to_series()
    place = is_null.arg_max()
    if place is None or not is_null[place]:
        return sums
    if bool(sums.visits[place]) or bool(sums.totals[:, place].any()):
        return sums
    others = np.flatnonzero(~is_null.to_numpy())
    numbers = torch.from_numpy(others)
    return Sums(sums.values[others], sums.totals[:, numbers], sums.visits[numbers], sums.described[others])
