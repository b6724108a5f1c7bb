"""Contributions where an optimizer's coefficients are matrices (the Adam family): they are known only while it is replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dualform.dual.coefficients import Updates, is_elementwise
from dualform.dual.gradients import calls_of_step, chunk_place
from dualform.dual.kept_coefficients import coefficient_matrices
from dualform.dual.rows import Rows, kept_rows
from dualform.dual.scores import scores
from dualform.dual.weights import scaled
from dualform.layers.layer import Use
from dualform.layers.written import used_rows
from dualform.progress import Progress
from dualform.store.slots import SlotChunk

if TYPE_CHECKING:
    from dualform.query.contribution_scorer import ContributionScorer


class ContributionReplay:
    """Scores all slots of a layer at once, from the last step of training to the first."""

    def __init__(self, scorer: ContributionScorer, progress: Progress | None):
        self._scorer = scorer
        self._progress = progress
        self._known: tuple[slice, Tensor] | None = None
        self._open_chunk: tuple[int, SlotChunk | None] | None = None

    def scores(self, queries: slice) -> Tensor:
        """Return the scores of some queries for all slots, (queries, slots); those of the last block are kept."""
        known = self._known  # read once: another thread may replace it at any time
        if known is not None and known[0] == queries:
            return known[1]
        dtype = self._scorer.dtype
        result = self._score(queries, dtype)
        if dtype != torch.float64 and not result.isfinite().all():
            # Coefficients may leave the range of float32 in weights that wrote next to nothing
            result = self._score(queries, torch.float64).to(dtype)
        self._known = (queries, result)
        return result

    def _score(self, queries: slice, dtype: torch.dtype) -> Tensor:
        scorer = self._scorer
        slots = scorer.store.slots(scorer.layer.name)
        total = torch.zeros(queries.stop - queries.start, slots, dtype=dtype)
        for query_use, slot_use in scorer.pairs():
            rows = scorer.rows_of(query_use) if slot_use is query_use else None
            if rows is None:
                rows = kept_rows(scorer.store, query_use.parameter)
            product = scorer.product_of(query_use, slot_use, queries, rows).to(dtype)
            if is_elementwise(scorer.updates[query_use.parameter]):
                self._add_replayed(total, query_use, slot_use, product, rows)
            else:
                self._add_scaled(total, query_use, slot_use, product, rows)
        return total

    def _add_scaled(
        self,
        total: Tensor,
        query_use: Use,
        slot_use: Use,
        product: Tensor,
        rows: Rows | None,
    ) -> None:
        """Add the scores of a parameter whose coefficients are numbers, beside others whose coefficients are matrices."""
        layer = self._scorer.layer
        coefficients = self._scorer.coefficients[query_use.parameter]
        for chunk in self._scorer.store.chunks(layer.name, end_step=self._scorer.end):
            for low, high in chunk.pieces(layer.d_in + layer.d_out):
                factors = scaled(chunk, coefficients, low, high, total.dtype)
                piece = _scores_of_piece(chunk, low, high, total.dtype, slot_use, product, rows)
                _columns(total, chunk, low, high).add_(piece * factors.T)

    def _add_replayed(
        self,
        total: Tensor,
        query_use: Use,
        slot_use: Use,
        product: Tensor,
        rows: Rows | None,
    ) -> None:
        """Add the scores of a parameter whose coefficients are matrices."""
        updates = self._scorer.updates[query_use.parameter]
        steps = len(updates.steps)
        # Of a bias the coefficients of all outputs are known, but only some of its error signals were kept
        outputs = list(self._scorer.layer.outputs) if slot_use.role == "bias" else []
        walk = coefficient_matrices(self._scorer.store, updates, rows, wide=total.dtype == torch.float64)
        for place, coefficients in walk:
            if self._progress is not None:
                self._progress(f"replaying {query_use.parameter}", steps - place, steps)
            if coefficients.dim() > 1:
                coefficients = coefficients.flatten(1)
            coefficients = used_rows(query_use, coefficients)
            if outputs:
                coefficients = coefficients[outputs]
            weighted = product * coefficients.reshape(product.shape[1:])
            self._add_step(total, slot_use, weighted, rows, updates, place)

    def _add_step(
        self,
        total: Tensor,
        slot_use: Use,
        product: Tensor,
        rows: Rows | None,
        updates: Updates,
        place: int,
    ) -> None:
        step = int(updates.steps[place])
        chunk = self._chunk_at(step)
        if chunk is None:
            return
        for factor, low, high in calls_of_step(chunk, step, updates.factors[place]):
            piece = _scores_of_piece(chunk, low, high, total.dtype, slot_use, product, rows)
            _columns(total, chunk, low, high).add_(piece, alpha=-factor)

    def _chunk_at(self, step: int) -> SlotChunk | None:
        """Return the chunk that holds a step; the last one stays open."""
        store = self._scorer.store
        place = chunk_place(store, step)
        known = self._open_chunk  # read once: another thread may replace it at any time
        if known is not None and known[0] == place:
            return known[1]
        chunk = store.chunk_of(self._scorer.layer.name, place)
        self._open_chunk = (place, chunk)
        return chunk


def _scores_of_piece(
    chunk: SlotChunk,
    low: int,
    high: int,
    dtype: torch.dtype,
    use: Use,
    product: Tensor,
    rows: Rows | None,
) -> Tensor:
    return scores(use, product, *chunk.pairs(dtype, low, high), rows)


def _columns(total: Tensor, chunk: SlotChunk, low: int, high: int) -> Tensor:
    """Return the scores of the slots low to high of a chunk, as a view."""
    return total[:, chunk.first_slot + low : chunk.first_slot + high]
