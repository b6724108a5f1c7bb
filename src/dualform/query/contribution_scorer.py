"""Scores slots by what they add to a target: value · (key · query), along ∂target/∂output."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Bools
from dualform.dual.coefficients import Coefficients, Updates, is_elementwise, updates_of, walked
from dualform.dual.gradients import description
from dualform.dual.rows import Rows, chosen_rows
from dualform.dual.scores import inner, products, scores
from dualform.dual.totals import GroupTotals, find_totals
from dualform.dual.weights import initial, rebuilt, scaled
from dualform.errors import NotRecordedError
from dualform.layers.keys import select_columns
from dualform.layers.layer import Layer, Use
from dualform.layers.written import used_rows
from dualform.progress import Progress
from dualform.query.contribution_replay import ContributionReplay
from dualform.query.contribution_rows import RowContributions
from dualform.query.ranking import Order
from dualform.query.scan import query_blocks
from dualform.query.scorer import Scorer
from dualform.query.search.bounds import ContributionBounds, Products, StoredVectors, key_numbers
from dualform.query.search.index import SlotIndex
from dualform.store.reader import Store
from dualform.store.slots import SlotChunk

Uses = Sequence[Use]


class ContributionScorer(Scorer):
    """Scores slots by their contributions to a target, summed over each query's positions."""

    value = "contribution"

    def __init__(
        self,
        store: Store,
        layer: Layer,
        end: int,
        queries: Tensor,
        gradients: Tensor,
        dtype: torch.dtype,
        *,
        query_layer: Layer | None = None,
        uses: Uses | None = None,
        progress: Progress | None = None,
    ):
        """queries (examples, positions, d_in); gradients (examples, positions, d_out): ∂target/∂output.

        query_layer: the layer that the queries are of, if it shares a parameter with the layer whose slots these are. uses: which
        of its parameters count; default: all. progress: called while an optimizer is replayed.
        """
        super().__init__(store, layer, end, len(queries), dtype)
        self.inputs = queries.to("cpu", dtype)
        self.gradients = gradients.to("cpu", dtype)
        self.query_layer = layer if query_layer is None else query_layer
        self.uses = self.query_layer.uses if uses is None else uses
        self._progress = progress

    @cached_property
    def _replay(self) -> ContributionReplay:
        return ContributionReplay(self, self._progress)

    @cached_property
    def rows(self) -> RowContributions:
        """The same for whole rows."""
        return RowContributions(self, self._progress)

    @property
    def is_tied(self) -> bool:
        """Whether the slots are of another layer than the queries."""
        return self.query_layer is not self.layer

    def for_uses(self, uses: Uses, gradients: Tensor | None = None) -> ContributionScorer:
        """Return a scorer for some uses of parameters alone, along other gradients if there are any."""
        gradients = self.gradients if gradients is None else gradients
        return self._scorer(self.layer, self.layer, uses, gradients)

    def for_tied_layer(self, layer: Layer) -> ContributionScorer:
        """Return a scorer for the slots of another layer that shares parameters with this one."""
        uses = [use for use in self.uses if use.parameter in layer.parameters]
        return self._scorer(layer, self.query_layer, uses, self.gradients)

    def _scorer(
        self,
        layer: Layer,
        query_layer: Layer,
        uses: Uses,
        gradients: Tensor,
    ) -> ContributionScorer:
        return ContributionScorer(
            self.store,
            layer,
            self.end,
            self.inputs,
            gradients,
            self.dtype,
            query_layer=query_layer,
            uses=uses,
            progress=self._progress,
        )

    # Tasks

    sent = ("_is_replayed", "_sums_positions_first", "_rows", "coefficients")
    not_sent = ("_progress",)

    @property
    def is_divisible(self) -> bool:
        """A replay scores all slots in one walk through training, which every task would have to take again."""
        return not self._is_replayed

    def part(self, runs: Sequence[Any]) -> ContributionScorer:
        """Return a scorer with the coefficients of the runs' steps alone."""
        begin = runs[0].chunk.first_step
        end = runs[-1].chunk.end_step
        scorer = copy.copy(self)
        scorer.coefficients = {name: found.between(begin, end) for name, found in self.coefficients.items()}
        return scorer

    # Scores

    @property
    def numbers_per_score(self) -> int:
        """One for each position: they are summed last."""
        return max(1, self.inputs.shape[1])

    @property
    def numbers_per_query(self) -> int:
        """∂target/∂parameter is held, and where an optimizer is replayed, all scores are."""
        if not self.store.manifest.keeps_gradients:
            return self._largest_product
        if self._is_replayed:
            return max(2 * self._largest_product, self.store.slots(self.layer.name))
        return 2 * self._largest_product if self._sums_positions_first else 0

    def score(
        self,
        queries: slice,
        run: SlotChunk,
        low: int,
        high: int,
    ) -> Tensor:
        """Return the contributions of the slots low to high of a chunk, (queries, slots)."""
        if self._is_replayed:
            return self._replay.scores(queries)[:, run.first_slot + low : run.first_slot + high]
        if not self._sums_positions_first:
            return self._score_by_position(queries, run, low, high)
        keys, errors = run.pairs(self.dtype, low, high)
        total = torch.zeros(queries.stop - queries.start, high - low, dtype=self.dtype)
        for query_use, slot_use in self.pairs():
            rows = self.rows_of(query_use) if slot_use is query_use else None
            product = self.product_of(query_use, slot_use, queries, rows)
            values = scaled(run, self.coefficients[query_use.parameter], low, high, self.dtype)
            total += scores(slot_use, product, keys, errors, rows) * values.T
        return total

    @property
    def sums_rows(self) -> bool:
        """Whether the sums over the positions of each row cost no more than single slots."""
        return self._is_replayed or self._sums_positions_first

    def _score_by_position(
        self,
        queries: slice,
        run: SlotChunk,
        low: int,
        high: int,
    ) -> Tensor:
        """Multiply attention weights and slopes at each position, and sum over the positions last."""
        keys = run.keys(self.dtype, low, high)
        errors = run.errors(self.dtype, low, high)
        inputs = self.inputs[queries]
        count, positions, width = inputs.shape
        total = torch.zeros(count, high - low, dtype=self.dtype)
        for columns, uses in self._uses_by_errors.items():
            weights = torch.zeros((), dtype=self.dtype)  # (examples, positions, slots)
            for use in uses:
                value = scaled(run, self.coefficients[use.parameter], low, high, self.dtype)[:, 0]
                if use.role != "bias":
                    attention = keys.dot(inputs.reshape(-1, width), use.keys) * value
                    value = attention.reshape(count, positions, high - low)
                weights = weights + value
            slopes = select_columns(self.gradients[queries], columns) @ select_columns(errors, columns).T
            total += (weights * slopes).sum(1)
        return total

    @cached_property
    def _uses_by_errors(self) -> dict[tuple[int, ...], list[Use]]:
        """The uses that share a part of the error signal, by that part."""
        groups: dict[tuple[int, ...], list[Use]] = {}
        for use in self.uses:
            groups.setdefault(use.errors, []).append(use)
        return groups

    @cached_property
    def _sums_positions_first(self) -> bool:
        """Whether summing ∂target/∂parameter over the query's positions first is cheaper, or needed."""
        layer = self.query_layer
        if self.is_tied or layer.form != "vectors" or layer.outputs or self.store.is_summed(layer.name):
            return True
        positions = self.inputs.shape[1]
        return positions * (layer.d_in + layer.d_out) > 2 * layer.d_in * layer.d_out

    # Parameters

    def pairs(self) -> list[tuple[Use, Use]]:
        """Return (how the query uses a parameter, how the slots use it)."""
        if not self.is_tied:
            return [(use, use) for use in self.uses]
        return _pairs(self.uses, self.layer.uses)

    def product_of(
        self,
        query_use: Use,
        slot_use: Use,
        queries: slice,
        rows: Rows | None,
    ) -> Tensor:
        """Return ∂target/∂parameter, (examples, *shape); of a bias, only for outputs whose error signals were kept."""
        inputs = self.inputs[queries]
        slopes = self.gradients[queries]
        product = products(query_use, self.query_layer, inputs, slopes, rows)
        if slot_use.role == "bias" and self.layer.outputs:
            return product[:, list(self.layer.outputs)]
        return product

    @cached_property
    def _units(self) -> list[int]:
        """The outputs that the target depends on, if they are few; else none: all are taken."""
        is_needed = (self.gradients != 0).any(0).any(0)
        units: list[int] = torch.nonzero(is_needed)[:, 0].tolist()
        layer = self.query_layer
        if not layer.outputs:
            return units if 0 < 2 * len(units) <= layer.d_out else []
        missing = sorted(set(units) - set(layer.outputs))
        if missing:
            raise NotRecordedError(
                f"the target depends on output {missing[0]} of layer {layer.name!r}, whose error signals were not kept "
                f"(outputs=). Kept: {len(layer.outputs)} of {layer.d_out}."
            )
        return units or list(layer.outputs[:1])

    def rows_of(self, use: Use) -> Rows | None:
        """Return the rows of a weight that the target depends on; None: all."""
        return self._rows.get(use)

    @cached_property
    def _rows(self) -> dict[Use, Rows | None]:
        """By the use of a weight: the rows of it that the target depends on."""
        weights = [use for use in self.uses if use.role == "weight"]
        if not weights or not self._units:
            return {}
        return {use: chosen_rows(self.store, use.parameter, self._units) for use in weights}

    @cached_property
    def _largest_product(self) -> int:
        """How many numbers ∂target/∂parameter takes, for one query."""
        sizes = [0]
        for use in self.uses:
            height, *rest = description(self.store, use.parameter).shape
            if self.rows_of(use) is not None:
                height = len(self._units)
            sizes.append(height * math.prod(rest))
        return max(sizes)

    @cached_property
    def updates(self) -> dict[str, Updates]:
        """The updates of each parameter."""
        return {name: updates_of(self.store, name, end=self.end) for name in self._parameters}

    @property
    def _parameters(self) -> set[str]:
        return {use.parameter for use, _ in self.pairs()}

    @cached_property
    def _is_replayed(self) -> bool:
        """Whether any coefficient is a matrix, which is known only while the optimizer is replayed."""

        def find() -> bool:
            return any(is_elementwise(updates) for updates in self.updates.values())

        # Once for an open store: a question that an index answers needs nothing else of the updates, which are read from tables
        key = ("is replayed", *sorted(self._parameters))
        return self.store.cached(key, find, self.end)

    @cached_property
    def coefficients(self) -> dict[str, Coefficients]:
        """The coefficients of each parameter, where they are numbers."""
        return {name: walked(updates) for name, updates in self.updates.items() if not is_elementwise(updates)}

    # The best without all scores

    def index(self) -> SlotIndex | None:
        """Return an index of keys and error signals, if the layer is one matrix with or without a bias, and a query one vector."""
        if not self._is_one_matrix or self.inputs.shape[1] != 1:
            return None
        if self._is_replayed or self._sums_positions_first:
            return None
        return SlotIndex(self.store, self.layer.name, self.end, self.queries, self.dtype, self._bounds)

    @property
    def _is_one_matrix(self) -> bool:
        roles = [use.role for use in self.uses]
        is_partial = any(use.keys or use.errors or use.rows or use.groups > 1 for use in self.uses)
        return not is_partial and roles in (["weight"], ["weight", "bias"])

    def _bounds(self, slots: Tensor, order: Order) -> ContributionBounds:
        weight, *biases = (self._coefficients_of_slots(use.parameter)[slots] for use in self.uses)
        bias = biases[0] if biases else torch.zeros_like(weight)
        numbers = key_numbers(self.store, self.layer.name, self.end, slots)
        keys = StoredVectors(self.store, self.layer, "key", self.dtype)
        errors = StoredVectors(self.store, self.layer, "error", self.dtype)
        return ContributionBounds(
            Products(self.inputs[:, 0], keys, numbers),
            Products(self.gradients[:, 0], errors, slots),
            weight,
            bias,
            order,
        )

    def _coefficients_of_slots(self, parameter: str) -> Tensor:
        """Return the negative coefficient of each slot, (slots,); found once for an open store."""

        def find() -> Tensor:
            coefficients = self.coefficients[parameter]
            chunks = self.store.addresses(self.layer.name, end_step=self.end)
            return torch.cat([scaled(chunk, coefficients, 0, chunk.slots, self.dtype)[:, 0] for chunk in chunks])

        key = ("coefficients of slots", self.layer.name, parameter, self.dtype)
        return self.store.cached(key, find, self.end)

    # Totals and initial parts

    def stored_totals(self, columns: list[str], absolute: bool) -> tuple[GroupTotals, Tensor] | None:
        """Return totals from what each group wrote to the parameters."""
        if absolute:
            return None
        # Deltas are of all layers that share a parameter
        shares_parameters = self.is_tied or bool(self.tied_layers())
        if shares_parameters and self.store.manifest.keep != "totals":
            return None
        view = find_totals(self.store, columns, self.end, deltas=True)
        return None if view is None else (view, self.along_deltas(view))

    def tied_layers(self) -> list[Layer]:
        """Return the other layers whose slots write to the same parts of this layer's parameters (tied embeddings)."""
        others = [layer for layer in self.store.manifest.layers if layer is not self.layer]
        return [layer for layer in others if shares_weights(self.uses, layer.uses)]

    def along_deltas(self, view: GroupTotals) -> Tensor:
        """Return ⟨∂target/∂parameter, what each group wrote⟩, (examples, groups) float64."""
        totals = torch.zeros(self.queries, view.groups.height, dtype=torch.float64)
        for use in self.uses:
            for group, delta in enumerate(view.deltas(use.parameter).to(self.dtype)):
                totals[:, group] += self._along(use, delta, self.dtype)
        return totals

    def along_initial(self, view: GroupTotals | None) -> Tensor:
        """Return ⟨∂target/∂parameter, initial part⟩, (examples,) float64. view: stored totals that hold it, if there are any."""
        total = torch.zeros(self.queries, dtype=torch.float64)
        for use in self.uses:
            rows = None
            if view is not None:
                matrix = view.initial(use.parameter)
            elif use.role in ("bias", "scale"):
                # What bias gradients hold beyond the sum of their slots is rounding: it stays with the initial part
                matrix = rebuilt(self.store, use.parameter, begin=0, end=self.end, keep=_no_slots)
            else:
                rows = self.rows_of(use)
                matrix = initial(self.store, use.parameter, self.end, rows)
            total += self._along(use, matrix, torch.float64, rows)
        return total

    def along_trained(self) -> Tensor | None:
        """Return ⟨∂target/∂parameter, trained parameter⟩, (examples,) float64; None if there is no snapshot of it at this step."""
        if self.end not in self.store.snapshot_steps():
            return None
        snapshot = self.store.snapshot(self.end)
        total = torch.zeros(self.queries, dtype=torch.float64)
        for use in self.uses:
            rows = self.rows_of(use)
            matrix = snapshot[f"model.{use.parameter}"].double()
            if rows is not None:
                matrix = rows.of(matrix)
            total += self._along(use, matrix, torch.float64, rows)
        return total

    def _along(
        self,
        use: Use,
        matrix: Tensor,
        dtype: torch.dtype,
        rows: Rows | None = None,
    ) -> Tensor:
        """Return ⟨∂target/∂parameter, matrix⟩, (examples,) float64."""
        matrix = used_rows(use, matrix)
        result = torch.zeros(self.queries, dtype=torch.float64)
        for queries in query_blocks(self, 1):
            inputs = self.inputs[queries].to(dtype)
            slopes = self.gradients[queries].to(dtype)
            result[queries] = inner(use, self.query_layer, inputs, slopes, matrix, rows).double()
        return result


def shares_weights(uses: Uses, others: Uses) -> bool:
    """Return whether two layers use the same rows of a parameter. The parts of an attention use different rows of one."""
    shared = [(use.rows, other.rows) for use, other in _pairs(uses, others)]
    return not all(a and b and (a[1] <= b[0] or b[1] <= a[0]) for a, b in shared)


def _pairs(uses: Uses, others: Uses) -> list[tuple[Use, Use]]:
    """Return the uses of the same parameters."""
    return [(use, other) for use in uses for other in others if use.parameter == other.parameter]


def _no_slots(chunk: SlotChunk) -> Bools:
    return np.zeros(chunk.slots, np.bool_)
