"""Contributions of whole rows: what the slots of a row add to a target together.

Totals by columns of rows need these sums alone. They take one product for each call of a layer, where single slots take one score and one
group for each, and they are few enough to be kept: the same answer by another column takes no product.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Ints
from dualform.dual.coefficients import is_elementwise
from dualform.dual.gradients import calls_of_step, chunk_place
from dualform.dual.kept_coefficients import coefficient_matrices
from dualform.dual.rows import Rows, kept_rows
from dualform.dual.scores import row_scores
from dualform.layers.layer import Use
from dualform.layers.written import used_rows
from dualform.progress import Progress
from dualform.query.groups import Groups
from dualform.query.reducers import NO_SLOT, GroupSums
from dualform.query.scan import query_blocks
from dualform.query.scorer import Selection
from dualform.query.slots import Entries
from dualform.store.slots import PIECE_BYTES, SlotChunk

if TYPE_CHECKING:
    from dualform.query.contribution_scorer import ContributionScorer


class _Call(NamedTuple):
    """A call of the layer, and what became of its gradient."""

    chunk: int
    begin: int
    """Its first entry in the chunk."""
    end: int
    factor: float
    coefficients: Tensor | None
    """The matrix that multiplies its gradient, besides the factor; None: the factor is all."""


class RowContributions:
    """Scores the rows of a layer's calls, all of them at once. Threads may share it."""

    def __init__(self, scorer: ContributionScorer, progress: Progress | None):
        self._scorer = scorer
        self._progress = progress
        self._known: tuple[slice, list[Tensor]] | None = None

    @cached_property
    def chunks(self) -> list[SlotChunk]:
        """The layer's slots."""
        scorer = self._scorer
        return list(scorer.store.addresses(scorer.layer.name, end_step=scorer.end))

    @cached_property
    def entries(self) -> list[Entries]:
        """The rows of the calls in each chunk."""
        return [Entries(chunk) for chunk in self.chunks]

    @property
    def count(self) -> int:
        """How many entries there are."""
        return sum(map(len, self.entries))

    # Groups

    def sums(self, groups: Groups, selection: Selection) -> GroupSums:
        """Return the sums of groups of rows. Neither groups nor selection may tell positions apart."""
        scorer = self._scorer
        codes = [torch.from_numpy(groups.of_rows(here.rows(), here.steps)) for here in self.entries]
        visits = torch.zeros(len(groups), dtype=torch.int64)
        first = torch.full((len(groups),), NO_SLOT)
        taken = []
        for chunk, here, own_codes in zip(self.chunks, self.entries, codes, strict=True):
            counts, first_slots = _taken(chunk, here, selection)
            visits.index_add_(0, own_codes, counts)
            takes_part = torch.nonzero(counts)[:, 0]
            first.scatter_reduce_(0, own_codes[takes_part], first_slots[takes_part], "amin")
            taken.append(takes_part)
        totals = torch.zeros(scorer.queries, len(groups), dtype=torch.float64)
        for queries in query_blocks(scorer, max(len(groups), self.count)):
            for scores, own_codes, takes_part in zip(self.scores(queries), codes, taken, strict=True):
                totals[queries].index_add_(1, own_codes[takes_part], scores[:, takes_part].double())
        return GroupSums(totals, visits, first)

    # Scores

    def scores(self, queries: slice) -> list[Tensor]:
        """Return the scores of the entries of each chunk, (queries, entries); those of the last block of queries are kept."""
        known = self._known  # read once: another thread may replace it at any time
        if known is not None and known[0] == queries:
            return known[1]
        dtype = self._scorer.dtype
        result = self._score(queries, dtype)
        if dtype != torch.float64 and not all(scores.isfinite().all() for scores in result):
            # Coefficients may leave the range of float32 in weights that wrote next to nothing
            result = [scores.to(dtype) for scores in self._score(queries, torch.float64)]
        self._known = (queries, result)
        return result

    def _score(self, queries: slice, dtype: torch.dtype) -> list[Tensor]:
        scorer = self._scorer
        count = queries.stop - queries.start
        total = [torch.zeros(count, len(here), dtype=dtype) for here in self.entries]
        for query_use, slot_use in scorer.pairs():
            rows = scorer.rows_of(query_use) if slot_use is query_use else None
            if rows is None:
                rows = kept_rows(scorer.store, query_use.parameter)
            product = scorer.product_of(query_use, slot_use, queries, rows).to(dtype)
            for call in self._calls(query_use, slot_use, rows, dtype):
                weighted = product
                if call.coefficients is not None:
                    weighted = product * call.coefficients.reshape(product.shape[1:])
                scores = self._along(call, slot_use, weighted, rows)
                total[call.chunk][:, call.begin : call.end].add_(scores, alpha=-call.factor)
        return total

    def _along(self, call: _Call, use: Use, product: Tensor, rows: Rows | None) -> Tensor:
        """Return ⟨product, the gradient of each entry⟩, (queries, entries of the call)."""
        chunk = self.chunks[call.chunk]
        here = self.entries[call.chunk]
        positions = int(here.positions[call.begin])
        width = positions * (chunk.layer.d_in + chunk.layer.d_out)
        size = max(1, PIECE_BYTES // (product.element_size() * width))
        found = []
        for begin in range(call.begin, call.end, size):
            end = min(begin + size, call.end)
            low = int(here.starts[begin])
            high = low + (end - begin) * positions
            keys, errors = chunk.pairs(product.dtype, low, high)
            found.append(row_scores(use, product, keys, errors, rows, positions))
            self._scorer.store.decoded(product.element_size() * width * (end - begin))
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def _calls(self, query_use: Use, slot_use: Use, rows: Rows | None, dtype: torch.dtype) -> Iterator[_Call]:
        """Return every call that wrote something to a parameter."""
        if is_elementwise(self._scorer.updates[query_use.parameter]):
            return self._replayed_calls(query_use, slot_use, rows, dtype)
        return self._scaled_calls(query_use)

    def _scaled_calls(self, use: Use) -> Iterator[_Call]:
        """Return those of a parameter whose coefficients are numbers."""
        coefficients = self._scorer.coefficients[use.parameter]
        for number, (chunk, here) in enumerate(zip(self.chunks, self.entries, strict=True)):
            factors = coefficients.of_blocks(chunk).tolist()
            for block, factor in enumerate(factors):
                begin, end = here.blocks[block : block + 2].tolist()
                if factor and begin < end:
                    yield _Call(number, begin, end, factor, None)

    def _replayed_calls(
        self,
        query_use: Use,
        slot_use: Use,
        rows: Rows | None,
        dtype: torch.dtype,
    ) -> Iterator[_Call]:
        """Return those of a parameter whose coefficients are matrices, from the last to the first."""
        store = self._scorer.store
        updates = self._scorer.updates[query_use.parameter]
        numbers = {chunk.chunk.first_step: number for number, chunk in enumerate(self.chunks)}
        # Of a bias the coefficients of all outputs are known, but only some of its error signals were kept
        outputs = list(self._scorer.layer.outputs) if slot_use.role == "bias" else []
        steps = len(updates.steps)
        for place, coefficients in coefficient_matrices(store, updates, rows, wide=dtype == torch.float64):
            if self._progress is not None:
                self._progress(f"replaying {query_use.parameter}", steps - place, steps)
            step = int(updates.steps[place])
            number = numbers.get(store.manifest.chunks[chunk_place(store, step)].first_step)
            if number is None:
                continue
            if coefficients.dim() > 1:
                coefficients = coefficients.flatten(1)
            coefficients = used_rows(query_use, coefficients)
            if outputs:
                coefficients = coefficients[outputs]
            starts = self.entries[number].starts
            for factor, low, high in calls_of_step(self.chunks[number], step, updates.factors[place]):
                begin, end = np.searchsorted(starts, [low, high]).tolist()
                yield _Call(number, begin, end, factor, coefficients)


def _taken(chunk: SlotChunk, here: Entries, selection: Selection) -> tuple[Tensor, Tensor]:
    """Return for each entry how many of its slots take part, and the number of the first of these."""
    selected = selection(chunk)
    if selected is None:
        return torch.from_numpy(here.positions), torch.from_numpy(here.starts + chunk.first_slot)
    slots: Ints = np.flatnonzero(selected)
    begins = np.searchsorted(slots, here.starts)
    ends = np.searchsorted(slots, here.starts + here.positions)
    following = np.append(slots, 0)[begins]
    return torch.from_numpy(ends - begins), torch.from_numpy(following + chunk.first_slot)
