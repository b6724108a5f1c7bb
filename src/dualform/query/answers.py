"""What every kind of answer shares: a score for each (query, slot), streamed; the best of them; their totals.

Attention, contributions and whatever comes later differ only in how a tile of scores is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.dual.totals import View
from dualform.errors import NotRecordedError, QuestionError
from dualform.layers.streams import Layer
from dualform.query.groups import Groups
from dualform.query.masks import Bools, Mask
from dualform.query.pruned import Bounds, Members, Wanted, best_of
from dualform.query.ranking import Best, Way, ranked_by
from dualform.query.remembered import remembered
from dualform.query.sketch import MOST
from dualform.query.slots import describe
from dualform.query.written import has_silent, written
from dualform.store.heap import Room
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk

TILE_BYTES = 64 << 20
"""How large a tile of scores (queries × slots) may be."""
WIDE = 1 << 21
"""So many scores are ranked at a time."""
SMALL = 1 << 14
"""Of fewer slots, all scores are computed."""
FEW_GROUPS = 64
"""Up to this many groups, sums are a product with a 0/1 matrix."""


class Scores(NamedTuple):
    """A stretch of scores: the numbers of the slots (m,), and (*queries, m)."""

    slots: Tensor
    scores: Tensor


class Ranked(NamedTuple):
    """The best slots of each query, best first: numbers and scores, both (queries, k)."""

    slots: Tensor
    scores: Tensor

    @staticmethod
    def join(pieces: Sequence[Ranked], dtype: torch.dtype) -> Ranked:
        """One below the other."""
        if not pieces:
            return Ranked(torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, 0, dtype=dtype))
        return Ranked(torch.cat([p.slots for p in pieces]), torch.cat([p.scores for p in pieces]))

    @staticmethod
    def beside(pieces: Sequence[Ranked]) -> Ranked:
        """Those of the same queries, one after the other."""
        return Ranked(torch.cat([p.slots for p in pieces], 1), torch.cat([p.scores for p in pieces], 1))


class Sorted(NamedTuple):
    """Groups by their values, ascending."""

    order: np.ndarray[Any, np.dtype[np.int64]]
    """Their places in the order in which they first appeared."""
    values: pl.DataFrame


class Sums(NamedTuple):
    """Totals by group, groups in the order in which they first appeared. A group's position is a `slot_position`."""

    values: pl.DataFrame
    totals: Tensor
    """(queries, groups) float64"""
    visits: Tensor
    """(groups,)"""
    described: pl.DataFrame
    """The groups with the columns that are one for all of a group's rows."""
    sorted: Sorted | None = None
    """The same by their values, if that is known."""


def _without_unused_null(sums: Sums) -> Sums:
    """Without the group of slots that have no row, unless the layer has such slots: kept totals have it for all layers."""
    is_null = sums.values.select(pl.all_horizontal(pl.all().is_null())).to_series()
    place = is_null.arg_max()
    if place is None or not is_null[place]:
        return sums
    if bool(sums.visits[place]) or bool(sums.totals[:, place].any()):
        return sums
    others = np.flatnonzero(~is_null.to_numpy())
    numbers = torch.from_numpy(others)
    return Sums(sums.values[others], sums.totals[:, numbers], sums.visits[numbers], sums.described[others])


def _sorted(values: pl.DataFrame) -> Sorted:
    found = values.with_row_index(" place").sort(values.columns)
    return Sorted(found[" place"].to_numpy().astype(np.int64), found.drop(" place"))


class Answer(ABC):
    """The scores of one layer's slots for some queries. Threads may share it."""

    value: str
    """The name of a score in frames."""
    _bounded = False
    """Whether something is known of scores before they are computed."""
    _terms = 1
    """How many numbers are held at a time for each score."""

    def __init__(
        self, store: Store, layer: Layer, end: int, shape: dict[str, int], dtype: torch.dtype, *, silent: bool = False
    ):
        """shape: how many queries there are along each part of their address, e.g. query and position.

        silent: whether slots that wrote nothing (padding, ignored labels) take part.
        """
        self._store, self.layer, self._end = store, layer, end
        self._silent = silent
        self._names, self._shape = tuple(shape), tuple(shape.values())
        self._dtype = dtype

    @cached_property
    def _address(self) -> pl.DataFrame:
        """One line for each query."""
        places = np.indices(self._shape).reshape(len(self._names), -1)
        return pl.DataFrame(dict(zip(self._names, places, strict=True)), schema=dict.fromkeys(self._names, pl.Int64))

    @abstractmethod
    def _tile(self, queries: slice, chunk: SlotChunk, low: int, high: int, scratch: Room) -> Tensor:
        """The scores of some queries for the slots low to high of a chunk, (queries, slots).

        scratch: memory to decode vectors in, good until the next tile of the same scan. It belongs to the scan, not to the answer, since
        several threads may scan for one answer at the same time.
        """

    def top(
        self,
        k: int = 10,
        *,
        by: str | Sequence[str] | None = None,
        per: str | Sequence[str] | None = None,
        where: pl.Expr | str | None = None,
        absolute: bool = False,
        lowest: bool = False,
    ) -> pl.DataFrame:
        """The k slots with the highest scores for each query, or the k groups of `by` with the highest totals.

        per: the k best slots of each group that these columns make, e.g. of each label, in one scan. absolute: rank by size and
        sum sizes, as the paper's figures do. lowest: from the other end. Ties go to the lower slot number.
        """
        way = check(k, absolute, lowest)
        if by is not None:
            if per is not None:
                raise QuestionError("top(): by and per do not go together.")
            return self._top_groups(k, by, where, absolute, lowest)
        if per is not None:
            return self._top_per(k, per, where, way)
        ranked = self.best(k, where=where, absolute=absolute, lowest=lowest)
        return self._described(self._frame(ranked))

    def best(
        self, k: int, *, where: pl.Expr | str | None = None, absolute: bool = False, lowest: bool = False
    ) -> Ranked:
        """As top(k), but bare numbers: for many queries, where a frame with every slot's columns would be too much."""
        way = check(k, absolute, lowest)
        self._needs_scan("single slots")
        found = self._pruned(k, way, where, None)
        return self._multiplied(k, way, where) if found is None else Ranked(found[0].numbers, found[0].values)

    def _multiplied(self, k: int, way: Way, where: pl.Expr | str | None) -> Ranked:
        """The best slots of each query: all scores are computed."""
        pieces = []
        for queries in self._query_blocks(k):
            best = Best(queries.stop - queries.start, k, self._dtype)
            for numbers, scores, _ in self._wide(queries, where):
                best.add(ranked_by(scores, way), numbers, scores)
            pieces.append(Ranked(best.numbers, best.values))
        return Ranked.join(pieces, self._dtype)

    def _bounds(self, slots: Tensor, way: Way) -> Bounds | None:
        """What is known of the scores of some slots beforehand, if anything."""
        return None

    def _pruned(self, k: int, way: Way, where: pl.Expr | str | None, groups: Groups | None) -> list[Best] | None:
        """The best slots of each query, in each group if there are any; None: compute all scores."""
        fits = self._bounded and SMALL <= self._store.slots(self.layer.name) <= MOST
        if not fits or (groups is not None and len(groups) > FEW_GROUPS):
            return None
        members = self._members(where, groups)
        bounds = self._bounds(members.numbers, way) if len(members.numbers) else None
        if bounds is None:
            return None
        return best_of(bounds, self._address.height, Wanted(k, way, members), self._dtype)

    def _members(self, where: pl.Expr | str | None, groups: Groups | None) -> Members:
        """The slots that take part, with their groups."""
        if where is not None:
            return self._chosen_members(where, groups)
        key = ("members", self.layer.name, _columns(groups), self._leaves_out_silent)
        return remembered(self._store, key, lambda: self._chosen_members(None, groups), self._end)

    def _chosen_members(self, where: pl.Expr | str | None, groups: Groups | None) -> Members:
        chunks = list(self._store.addresses(self.layer.name, end_step=self._end))
        codes = None if groups is None else self._codes(groups, chunks)
        count = 1 if groups is None else len(groups)
        mask = self._mask(where)
        if mask is None:
            return Members(torch.arange(sum(chunk.slots for chunk in chunks)), codes, count)
        kept = [mask(chunk) for chunk in chunks]
        numbers = torch.from_numpy(np.flatnonzero(np.concatenate([np.zeros(0, dtype=bool), *kept])))
        return Members(numbers, None if codes is None else codes[numbers], count)

    def _codes(self, groups: Groups, chunks: Sequence[SlotChunk]) -> Tensor:
        """(slots,) int32: the group of each slot of the layer."""
        key = ("group codes", self.layer.name, _columns(groups))
        return remembered(self._store, key, lambda: groups.of_slots(chunks).int(), self._end)

    def _top_per(self, k: int, per: str | Sequence[str], where: pl.Expr | str | None, way: Way) -> pl.DataFrame:
        self._needs_scan("single slots")
        groups = self._groups(per)
        found = self._pruned(k, way, where, groups)
        blocks = [] if found is not None else self._query_blocks(k * len(groups))
        pieces = [found or [], *(self._multiplied_per(queries, k, way, where, groups) for queries in blocks)]
        # The best of one group beside those of the next, for groups are in the order of their values
        ranked = [Ranked.beside([Ranked(b.numbers, b.values) for b in bests]) for bests in pieces if bests]
        widths = [best.scores.shape[1] for best in next(filter(None, pieces), [])]
        ranks = np.concatenate([np.arange(1, width + 1) for width in (0, *widths)])
        return self._described(self._frame(Ranked.join(ranked, self._dtype), ranks))

    def _groups(self, by: str | Sequence[str]) -> Groups:
        store, name, end = self._store, self.layer.name, self._end
        key = by if isinstance(by, str) else tuple(by)
        return remembered(store, ("groups", name, key), lambda: Groups(store, name, by, end), end)

    def _multiplied_per(
        self, queries: slice, k: int, way: Way, where: pl.Expr | str | None, groups: Groups
    ) -> list[Best]:
        bests = [Best(queries.stop - queries.start, k, self._dtype) for _ in range(len(groups))]
        for numbers, scores, codes in self._wide(queries, where, groups):
            ranked = ranked_by(scores, way)
            for code in np.unique(codes):
                here = torch.from_numpy(np.flatnonzero(codes == code))
                bests[code].add(ranked[:, here], numbers[here], scores[:, here])
        return bests

    def _described(self, frame: pl.DataFrame) -> pl.DataFrame:
        found = describe(self._store, self.layer.name, frame["slot"].to_numpy(), self._end)
        return frame.hstack(found.get_columns()[1:])

    def total(
        self, by: str | Sequence[str], *, where: pl.Expr | str | None = None, absolute: bool = False
    ) -> pl.DataFrame:
        """The sum of the scores of each group of slots, for each query; absolute: of their sizes.

        Totals that were kept for these columns answer it without a scan.
        """
        sums = self.sums(by, where=where, absolute=absolute)
        order, values = sums.sorted or _sorted(sums.values)
        count = self._address.height
        totals = sums.totals[:, torch.from_numpy(order)]
        # Column by column: for one query, a frame's own ways would take longer than the answer
        address = [pl.Series(one.name, np.repeat(one.to_numpy(), len(order))) for one in self._address]
        places = np.tile(np.arange(len(order)), count) if count != 1 else None
        groups = [one if places is None else one.gather(places) for one in values]
        return pl.DataFrame([*address, *groups, pl.Series("total", totals.reshape(-1).numpy(), pl.Float64)])

    def _scores(self, where: pl.Expr | str | None) -> Iterator[Scores]:
        """Everything, chunk by chunk, all queries at once."""
        self._needs_scan("single slots")
        for numbers, scores, _, _ in self._stream(slice(0, self._address.height), where):
            yield Scores(numbers, scores.reshape(*self._shape, len(numbers)))

    def _query_blocks(self, width: int) -> Iterator[slice]:
        """Stretches of queries, such that `width` float64 numbers each stay within memory."""
        count = self._address.height
        size = max(1, min(16384, 4 * TILE_BYTES // (8 * max(width, 1))))
        for low in range(0, count, size):
            yield slice(low, min(low + size, count))

    def _stream(
        self, queries: slice, where: pl.Expr | str | None
    ) -> Iterator[tuple[Tensor, Tensor, SlotChunk, np.ndarray[tuple[int], np.dtype[np.int64]]]]:
        """Tiles in the order of slot numbers: numbers (m,), scores (queries, m), the chunk, places in it."""
        mask = self._mask(where)
        width = max(self.layer.d_in + self.layer.d_out, (queries.stop - queries.start) * self._terms)
        scratch = Room(self._dtype)
        for chunk in self._chunks():
            kept = None if mask is None else mask(chunk)
            if kept is not None and not kept.any():
                continue
            for low, high in chunk.pieces(width):
                places = np.arange(low, high)
                if kept is not None:
                    places = places[kept[low:high]]
                    if not len(places):
                        continue
                scores = self._tile(queries, chunk, low, high, scratch)
                if len(places) < high - low:
                    scores = scores[:, torch.from_numpy(places - low)]
                yield torch.from_numpy(places + chunk.first_slot), scores, chunk, places

    def _chunks(self) -> Iterator[Any]:
        """What is scanned: chunks of slots, or what stands in their place."""
        return self._store.chunks(self.layer.name, end_step=self._end)

    def _mask(self, where: pl.Expr | str | None) -> Callable[[Any], Bools] | None:
        """Which slots of a chunk take part; None: all."""
        asked = None if where is None else Mask(self._store, where, self._end)
        if not self._leaves_out_silent:
            return asked
        return self._written if asked is None else lambda chunk: asked(chunk) & self._written(chunk)

    def _written(self, chunk: Any) -> Bools:
        """Which slots of a chunk wrote something."""
        return written(chunk)

    @property
    def _leaves_out_silent(self) -> bool:
        """Whether there are silent slots that take no part."""
        return not self._silent and has_silent(self._store, self.layer.name, self._end)

    def _wide(
        self, queries: slice, where: pl.Expr | str | None, groups: Groups | None = None
    ) -> Iterator[tuple[Tensor, Tensor, np.ndarray[Any, np.dtype[np.int64]]]]:
        """The same in wider tiles, to be ranked in fewer calls: numbers (m,), scores (queries, m), groups (m,)."""
        held: list[tuple[Tensor, Tensor, Any]] = []
        width = 0
        for numbers, scores, chunk, places in self._stream(queries, where):
            held.append((numbers, scores, places if groups is None else groups(chunk)[places]))
            width += scores.numel()
            if width >= WIDE:
                yield _joined(held)
                held, width = [], 0
        if held:
            yield _joined(held)

    def sums(self, by: str | Sequence[str], *, where: pl.Expr | str | None = None, absolute: bool = False) -> Sums:
        """As total(by), but bare numbers, with visits: for millions of groups. Kept totals answer it, or a scan."""
        columns = [by] if isinstance(by, str) else list(by)
        if where is None and not self._counts_silent:
            kept = self._kept(columns, absolute)
            if kept is not None:
                view, totals = kept
                known, ordered = remembered(
                    self._store,
                    ("groups of totals", *columns),
                    lambda: ((chosen := view.groups.select(columns)), _sorted(chosen)),
                    self._end,
                )
                return _without_unused_null(Sums(known, totals, view.visits(self.layer), known, ordered))
        also = (" of sizes (absolute)" if absolute else "") + (" with where=" if where is not None else "")
        also += " with silent=True" if self._silent else ""
        self._needs_scan(f"totals by {'+'.join(columns)}{also}")
        groups = self._groups(by)
        totals, visits, first = self._scanned(groups, where, absolute)
        appeared = first.argsort(stable=True)
        values, described = (
            frame[appeared.numpy()].rename({"position": "slot_position"}, strict=False)
            for frame in (groups.values, groups.described())
        )
        return Sums(values, totals[:, appeared], visits[appeared], described)

    @property
    def _counts_silent(self) -> bool:
        """Whether silent slots take part, which kept totals leave out. Where only totals were kept, nobody knows if there were any."""
        totals_only = self._store.manifest.keep == "totals"
        return self._silent and (totals_only or has_silent(self._store, self.layer.name, self._end))

    @abstractmethod
    def _kept(self, columns: list[str], absolute: bool) -> tuple[View, Tensor] | None:
        """Totals that were kept for these columns, (queries, groups) float64, if they answer this."""

    def _needs_scan(self, question: str) -> None:
        if self._store.manifest.keep == "totals":
            kept = (
                [" + ".join(g.columns) for g in self._store.manifest.totals.groupings]
                if self._store.manifest.totals
                else []
            )
            raise NotRecordedError(
                f"{question}: {self._store.folder} keeps totals only, for {', '.join(kept) or 'nothing yet'}, and no slots. "
                f'Record with keep="slots", or with totals= for these columns.'
            )

    def _scanned(self, groups: Groups, where: pl.Expr | str | None, absolute: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Totals (queries, groups) float64, visits (groups,), first slots (groups,)."""
        totals = torch.zeros(self._address.height, len(groups), dtype=torch.float64)
        visits = torch.zeros(len(groups), dtype=torch.int64)
        first = torch.full((len(groups),), torch.iinfo(torch.int64).max)
        for queries in self._query_blocks(len(groups)):
            sums = torch.zeros(len(groups), queries.stop - queries.start, dtype=torch.float64)
            for numbers, scores, chunk, places in self._stream(queries, where):
                codes = torch.from_numpy(groups(chunk)[places])
                scores = scores.abs() if absolute else scores
                if len(groups) <= FEW_GROUPS:
                    sums += (torch.nn.functional.one_hot(codes, len(groups)).to(scores.dtype).T @ scores.T).double()
                else:
                    sums.index_add_(0, codes, scores.T.double())
                if queries.start == 0:
                    visits.index_add_(0, codes, torch.ones_like(codes))
                    first.scatter_reduce_(0, codes, numbers, "amin")
            totals[queries] = sums.T
        return totals, visits, first

    def _top_groups(
        self, k: int, by: str | Sequence[str], where: pl.Expr | str | None, absolute: bool, lowest: bool
    ) -> pl.DataFrame:
        sums = self.sums(by, where=where, absolute=absolute)
        there = torch.nonzero(sums.visits > 0)[:, 0]
        best = Best(len(sums.totals), k, torch.float64)
        ranked = sums.totals[:, there]
        best.add(-ranked if lowest else ranked, torch.arange(len(there)), ranked)
        frame = self._frame(Ranked(best.numbers, best.values))
        described = sums.described.with_columns(pl.Series("visits", sums.visits.numpy()))
        found = described[there[torch.from_numpy(frame["slot"].to_numpy().copy())].numpy()]
        return pl.concat([frame.drop("slot"), found], how="horizontal")

    def _frame(self, ranked: Ranked, ranks: np.ndarray[Any, np.dtype[np.int64]] | None = None) -> pl.DataFrame:
        """A line for each query and one of its best slots. ranks: (k,), if they are not 1 to k."""
        count, k = ranked.slots.shape
        address = [pl.Series(one.name, np.repeat(one.to_numpy(), k), pl.Int64) for one in self._address]
        return pl.DataFrame(
            [
                *address,
                pl.Series("rank", np.tile(np.arange(1, k + 1) if ranks is None else ranks, count), pl.Int64),
                pl.Series(self.value, ranked.scores.reshape(-1).numpy()),
                pl.Series("slot", ranked.slots.reshape(-1).numpy(), pl.Int64),
            ]
        )


def _columns(groups: Groups | None) -> tuple[str, ...]:
    return () if groups is None else tuple(groups.by)


def _joined(tiles: list[tuple[Tensor, Tensor, Any]]) -> tuple[Tensor, Tensor, Any]:
    numbers, scores, codes = zip(*tiles, strict=True)
    return torch.cat(numbers), torch.cat(scores, 1), np.concatenate(codes)


def check(k: object, absolute: bool, lowest: bool) -> Way:
    """Refuse a question for the best that makes no sense; else say which are the best."""
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise QuestionError(f"top({k!r}): expected a whole number of at least 1.")
    if absolute and lowest:
        raise QuestionError("top(): absolute and lowest do not go together.")
    return "absolute" if absolute else "lowest" if lowest else "highest"
