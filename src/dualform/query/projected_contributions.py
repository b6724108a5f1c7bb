"""Contributions of a projected layer: estimates, each with its standard error.

A group's contribution is Σ T_ab with T = P_outᵀ Q P_in ∘ P_outᵀ D P_in, Q the query's gradient and D what the group wrote. The columns of P are a
random sample, without replacement, of an orthonormal basis. So T is a sample of a table, of its rows and of its columns, and its own spread tells
how far the sum may be off: what its rows differ by, what its columns differ by, and what is left in its cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.arrays import Ints
from dualform.dual.weights import scaled
from dualform.errors import NotRecordedError
from dualform.layers.keys import KeysOrGradients, RowGradients, Vectors, select_columns
from dualform.layers.layer import Layer, Use
from dualform.layers.projected import SlotViews, View, project_queries
from dualform.query.answer import Sums
from dualform.query.conditions import Where
from dualform.query.contribution_scorer import ContributionScorer, shares_weights
from dualform.query.contributions import LayerContributions
from dualform.query.scan import Piece
from dualform.query.scorer import Selection
from dualform.store.reader import Store

AT_ONCE = 1 << 24
"""How many numbers of tables are held at a time."""
SLOTS_AT_ONCE = 256
"""Of slots that were not summed, so many outer products are held at a time."""
CodesOf = Callable[[Piece, Ints], Ints]
"""From some places of a piece to the numbers of their groups; −1: none."""


def refuse_not_linear(store: Store, layer: Layer, scorer: ContributionScorer) -> None:
    """Raise NotRecordedError where contributions cannot be told from projected gradients."""
    if scorer._is_replayed:
        raise NotRecordedError(
            f'layer {layer.name!r} keeps random projections of gradients (keep="projected"). Its optimizer (of the Adam family) multiplies each '
            f"number of a gradient by another one, which cannot be done to projections: there are no contributions. Ask influence(), or record with "
            f'keep="rows".'
        )
    uses = layer.in_network.uses
    known = [other for other in store.manifest.layers if other.name != layer.name]
    others = [other.name for other in known if shares_weights(uses, other.in_network.uses)]
    if others:
        raise NotRecordedError(
            f'layer {layer.name!r} keeps random projections of gradients (keep="projected") and shares a weight with {others[0]!r}, which is '
            f'projected in another way: there are no contributions. Record both with keep="rows".'
        )


class ProjectedScorer(ContributionScorer):
    """Scores the slots of a projected layer by queries that went through the same matrices."""

    @staticmethod
    def of(
        store: Store, layer: Layer, end: int, queries: Tensor, gradients: Tensor, dtype: torch.dtype
    ) -> ProjectedScorer:
        """queries and gradients: of the layer as the network has it."""
        seen = project_queries(layer, queries.to("cpu", dtype), gradients.to("cpu", dtype))
        scorer = ProjectedScorer(store, layer, end, *seen, dtype)
        refuse_not_linear(store, layer, scorer)
        return scorer

    @property
    def _units(self) -> list[int]:
        """Units of the network are not to be told apart any more."""
        return []

    @property
    def _sums_positions_first(self) -> bool:
        return True

    def index(self) -> None:
        """Return nothing: all scores are computed."""

    def tied_layers(self) -> list[Layer]:
        """Return none: such layers were refused."""
        return []


class ProjectedContributions(LayerContributions):
    """The contributions of a projected layer's rows: estimates that are right on average, with standard errors."""

    def _refuse(self, question: str) -> NotRecordedError:
        return NotRecordedError(
            f"{question} of layer {self.layer.name!r} needs exact sums, but it keeps random projections of gradients "
            f'(keep="projected"). Ask top() or total(), which say how far they may be off, or record with keep="rows".'
        )

    def parts(self) -> pl.DataFrame:
        """Raise an error: what is left over would be the error of estimates."""
        raise self._refuse("parts()")

    def part(self, name: str) -> LayerContributions:
        """Raise an error: the weights of a layer are projected together."""
        raise self._refuse(f"part({name!r})")

    def gate(self, name: str) -> LayerContributions:
        """Raise an error: so are its outputs."""
        raise self._refuse(f"gate({name!r})")

    def _scanned_sums(self, by: str | Sequence[str], where: Where | None, absolute: bool) -> Sums:
        if absolute:
            raise self._refuse("absolute=True")
        found = super()._scanned_sums(by, where, absolute)
        groups = self.groups(by)
        numbered = found.values.rename({"slot_position": "position"}, strict=False).with_row_index(" place")
        places = groups.values.join(
            numbered, on=groups.values.columns, how="left", nulls_equal=True, maintain_order="left"
        )
        place_of = places[" place"].to_numpy().astype(np.int64)

        def codes_of(piece: Piece, slots: Ints) -> Ints:
            codes: Ints = place_of[groups(piece.run)[slots]]
            return codes

        errors = standard_errors(self._scorer, self._selection(where), codes_of, len(found.values))
        return found._replace(errors=errors)

    def _errors_of(self, slots: Tensor) -> Tensor | None:
        wanted, places = torch.unique(slots, return_inverse=True)
        numbers = wanted.numpy()

        def codes_of(piece: Piece, here: Ints) -> Ints:
            own = here + piece.run.first_slot
            found = np.searchsorted(numbers, own).clip(max=max(len(numbers) - 1, 0))
            codes: Ints = np.where(numbers[found] == own, found, -1) if len(numbers) else np.full(len(own), -1)
            return codes

        errors = standard_errors(self._scorer, self._selection(None), codes_of, len(numbers))
        return errors.gather(1, places)


def standard_errors(scorer: ContributionScorer, selection: Selection, codes_of: CodesOf, groups: int) -> Tensor:
    """Return the standard error of each group's contribution, (queries, groups) float64."""
    views = SlotViews.of(scorer.layer)
    size = scorer.layer.gradient_size + scorer.layer.d_in
    variances = torch.zeros(scorer.queries, groups, dtype=torch.float64)
    groups_at_a_time = max(1, AT_ONCE // size)
    products = {use: scorer.product_of(use, use, slice(0, scorer.queries), None).double() for use in scorer.uses}
    for low in range(0, groups, groups_at_a_time):
        high = min(low + groups_at_a_time, groups)
        written = _written(scorer, selection, codes_of, low, high)
        for query in range(scorer.queries):
            spread = _Spread(views, high - low)
            for use in scorer.uses:
                spread.add(use, products[use][query] * written[use])
            variances[query, low:high] = spread.variance()
    return variances.sqrt()


def _written(
    scorer: ContributionScorer, selection: Selection, codes_of: CodesOf, low: int, high: int
) -> dict[Use, Tensor]:
    """Return what the groups low to high wrote through each use, projected, (groups, *its shape)."""
    count = high - low
    totals: dict[Use, Tensor] = {}
    for use in scorer.uses:
        shape = scorer.product_of(use, use, slice(0, 1), None).shape[1:]
        totals[use] = torch.zeros(count, *shape, dtype=torch.float64)
    for run, begin, end, codes in _stretches(scorer, selection, codes_of):
        is_mine = (codes >= low) & (codes < high)
        if not is_mine.any():
            continue
        mine = torch.from_numpy(np.flatnonzero(is_mine))
        own = torch.from_numpy(codes[is_mine] - low)
        keys, errors = run.pairs(scorer.dtype, begin, end)
        for use, total in totals.items():
            values = scaled(run, scorer.coefficients[use.parameter], begin, end, scorer.dtype)[mine, 0]
            added = _added(use, keys.select(mine), errors[mine]).double()
            total.index_add_(0, own, added * values.double().reshape(-1, *[1] * (added.dim() - 1)))
    return totals


def _stretches(
    scorer: ContributionScorer, selection: Selection, codes_of: CodesOf
) -> Iterator[tuple[Any, int, int, Ints]]:
    """Return stretches of slots that may be decoded at a time, with the group of each; −1: it takes no part."""
    for piece in selection.pieces():
        for first, last in piece.run.pieces(scorer.layer.gradient_size):
            for begin in range(first, last, SLOTS_AT_ONCE):
                end = min(begin + SLOTS_AT_ONCE, last)
                codes = codes_of(piece, np.arange(begin, end))
                if piece.selected is not None:
                    codes = np.where(piece.selected[begin:end], codes, -1)
                yield piece.run, begin, end, codes


def _added(use: Use, keys: KeysOrGradients, errors: Tensor) -> Tensor:
    """Return what each slot adds to a use of a parameter, projected."""
    if isinstance(keys, RowGradients):
        return keys.added_to(use)
    assert isinstance(keys, Vectors)
    if use.role == "scale":
        return keys.vectors()
    own = select_columns(errors, use.errors)
    if use.role == "bias":
        return own
    return own.unsqueeze(2) * select_columns(keys.vectors(), use.keys).unsqueeze(1)


class _Side(NamedTuple):
    """Sums of tables over the other side: a number for each column of a random matrix."""

    view: View
    sums: Tensor
    """(groups, size)"""
    shared: Tensor
    """(groups,): the part of their variance that the other side's sums have, too."""

    @staticmethod
    def of(view: View, groups: int) -> _Side:
        """Return one that has seen nothing."""
        sums = torch.zeros(groups, view.size, dtype=torch.float64)
        return _Side(view, sums, torch.zeros(groups, dtype=torch.float64))


class _Spread:
    """The spread of the tables of some groups."""

    def __init__(self, views: SlotViews, groups: int):
        self._keys = [_Side.of(view, groups) for view in views.of_keys.values()]
        self._errors = [_Side.of(view, groups) for view in views.of_errors.values()]
        self._of_cells = torch.zeros(groups, dtype=torch.float64)

    def add(self, use: Use, table: Tensor) -> None:
        """Take in the tables of one use: (groups, outputs, inputs), or (groups, d) of a vector."""
        if use.role == "scale":
            self._keys[0].sums.add_(table)
            return
        errors = _side(self._errors, use.errors)
        if use.role == "bias":
            errors.sums.add_(table)
            return
        keys = _side(self._keys, use.keys)
        by_output = table.sum(2)
        by_input = table.sum(1)
        errors.sums.add_(by_output)
        keys.sums.add_(by_input)
        outputs, inputs = table.shape[1:]
        if min(outputs, inputs) < 2:
            return
        # What is left of the table when the means of its rows and columns are taken away
        rest = table.square().sum((1, 2)) - by_output.square().sum(1) / inputs - by_input.square().sum(1) / outputs
        rest += table.sum((1, 2)).square() / (outputs * inputs)
        mean_square = rest.clamp(min=0) / ((outputs - 1) * (inputs - 1))
        of_cells = _left_out(errors.view) * _left_out(keys.view) * outputs * inputs * mean_square
        self._of_cells += of_cells
        errors.shared.add_(of_cells)
        keys.shared.add_(of_cells)

    def variance(self) -> Tensor:
        """(groups,)"""
        found = self._of_cells.clone()
        for view, sums, shared in (*self._keys, *self._errors):
            # An estimate of what one side adds alone may be negative, which no variance is
            found += (_left_out(view) * view.size * _variance(sums) - shared).clamp(min=0)
        sizes = [side.view.size for side in (*self._keys, *self._errors) if side.view.is_random]
        return found * _widening(min(sizes)) ** 2


def _side(sides: Sequence[_Side], columns: tuple[int, ...]) -> _Side:
    """Return the side that stands at these columns of a projected layer; empty: there is but one."""
    begin = columns[0] if columns else 0
    edge = 0
    for side in sides:
        if edge == begin:
            return side
        edge += side.view.size
    raise AssertionError(f"no part of the layer begins at column {begin}")


def _left_out(view: View) -> float:
    """The part of a basis that is not in the sample; 0 where nothing was projected."""
    return 1 - view.size / view.length


def _widening(size: int) -> float:
    """By how much 95 % of Student's t is wider than that of a normal number: a spread that is itself estimated is often too small."""
    return 1 + (1.96**2 + 1) / (4 * max(1, size - 1))


def _variance(sums: Tensor) -> Tensor:
    """Of a sample; a single number tells nothing of its spread: its square is taken."""
    if sums.shape[1] < 2:
        return sums.square().sum(1)
    return sums.var(1)
