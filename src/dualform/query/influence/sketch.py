"""The sketched path kernel: gradients of each linear map under two random projections, k × k numbers for each row.

With φ the sketch of a row's gradient and p the probability that it gave its label: score = −φ_qᵀ H⁻¹ φ_i, H = Σ_i p_i/(1 − p_i) φ_i φ_iᵀ + μI,
μ the mean of what is summed. That is the path kernel's answer (kernel.py) in the space of sketches, where it is linear in the
number of rows. Projections are new in each segment, so their noise averages out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.curvature.loss_mean import LossMean
from dualform.curvature.maps import LinearMap
from dualform.errors import QuestionError
from dualform.layers.streams import Layer
from dualform.query.influence.products import MapQuery, Question
from dualform.query.influence.segments import Segment, Window, pieces_in, windows
from dualform.query.influence.softmax import Misfit
from dualform.store.reader import Store

DAMPING = 1.0
"""λ: what is added to the mean eigenvalue's place, relative to the mean of the kernel's diagonal."""
ROWS = 1024
"""How many rows are sketched at a time."""
MEMORY = 1 << 30
"""How much the matrix of all sketches' products may take."""


@dataclass(frozen=True)
class Projections:
    """Of one linear map in one segment. keys (groups, width + 1, k), the constant last, of one-hot keys (width, k); errors
    (groups, outputs, k)."""

    linear_map: LinearMap
    keys: Tensor
    errors: Tensor

    @property
    def size(self) -> int:
        """How many numbers a sketch has."""
        return self.keys.shape[-1] * self.errors.shape[-1]

    def of_rows(self, keys: Tensor, errors: Tensor, positions: int) -> Tensor:
        """Σ over positions and groups, (rows, size); keys (n, groups, width) or (n,), errors (n, groups, outputs)."""
        if self.linear_map.is_one_hot:
            projected = torch.where(keys[:, None] >= 0, self.keys[keys.clamp(min=0)], 0).unsqueeze(1)
        else:
            projected = torch.einsum("ngw,gwk->ngk", keys, self.keys[:, :-1])
            projected = projected + self.linear_map.constant * self.keys[:, -1]
        projected_errors: Tensor = torch.einsum("ngo,gok->ngk", errors, self.errors)
        rows = len(errors) // positions
        left = projected_errors.reshape(rows, -1, projected_errors.shape[2])
        right = projected.reshape(rows, -1, projected.shape[2])
        return torch.bmm(left.transpose(1, 2), right).reshape(rows, -1)

    def of_query(self, query: MapQuery) -> Tensor:
        """The sketch of a query's gradient, (examples, size)."""
        examples, positions = query.slopes.shape[:2]
        if not examples:
            return query.slopes.new_zeros(0, self.size)
        return self.of_rows(query.queries.flatten(0, 1), query.slopes.flatten(0, 1), positions)


class SketchedProducts:
    """As Products, through sketches. matrices (examples, size)."""

    def __init__(self, projections: Projections, matrices: Tensor):
        self._projections = projections
        self._matrices = matrices

    def of_slots(self, examples: slice, keys: Tensor, errors: Tensor) -> Tensor:
        """(examples, n)."""
        return self.of_rows(examples, keys, errors, 1)

    def of_rows(self, examples: slice, keys: Tensor, errors: Tensor, positions: int) -> Tensor:
        """(examples, n / positions)."""
        return self._matrices[examples] @ self._projections.of_rows(keys, errors, positions).T


def projections(linear_map: LinearMap, size: int, seed: Sequence[int], dtype: torch.dtype) -> Projections:
    """Normal numbers, such that inner products of sketches are right on average. What is shorter than k stays as it is."""
    generator = torch.Generator().manual_seed(hash(tuple(seed)) & (2**62 - 1))

    def drawn(groups: int, length: int) -> Tensor:
        if groups * length <= size:
            return torch.eye(groups * length, dtype=dtype).reshape(groups, length, -1)
        numbers = torch.randn(groups, length, size, generator=generator, dtype=torch.float64)
        return (numbers / math.sqrt(size)).to(dtype)

    if linear_map.is_one_hot:
        return Projections(linear_map, drawn(1, linear_map.width)[0], drawn(1, linear_map.outputs))
    keys = drawn(linear_map.groups, linear_map.width + 1)
    return Projections(linear_map, keys, drawn(linear_map.groups, linear_map.outputs))


def sketched(
    store: Store,
    layers: Sequence[Layer],
    segment: Segment,
    question: Question,
    misfit: Misfit,
    loss_mean: LossMean,
    size: int,
    damping: float,
) -> dict[str, list[SketchedProducts]]:
    """For each layer the products of each of its maps."""
    rows = _SketchedRows(store, layers, segment, question, loss_mean, size)
    curvature = rows.curvature(misfit)
    mean = curvature.trace() / (segment.end_row - segment.first_row)
    curvature.diagonal().add_(torch.where(mean > 0, damping * mean, 1))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(curvature))
    asked = [projected.of_query(query) for projected, query in rows.with_queries(question)]
    solved = torch.cat(asked, 1) @ inverse
    matrices = iter(torch.split(-solved, [one.size for one in rows.projections], 1))
    return {
        layer.name: [SketchedProducts(one, next(matrices)) for one in rows.by_layer[layer.name]] for layer in layers
    }


class _SketchedRows:
    """The sketches of a segment's rows: those of all linear maps of all layers, one behind the other."""

    def __init__(
        self,
        store: Store,
        layers: Sequence[Layer],
        segment: Segment,
        question: Question,
        loss_mean: LossMean,
        size: int,
    ):
        self._store = store
        self._layers = layers
        self._segment = segment
        self._loss_mean = loss_mean
        self._dtype = question[layers[0].name][0].slopes.dtype
        self.by_layer = {layer.name: self._draw(layer, question[layer.name], size) for layer in layers}
        self.projections = [one for layer in layers for one in self.by_layer[layer.name]]
        self._width = sum(one.size for one in self.projections)

    def _draw(self, layer: Layer, queries: Sequence[MapQuery], size: int) -> list[Projections]:
        number, _ = self._store.layer(layer.name)
        return [
            projections(query.linear_map, size, (self._segment.begin, number, place), self._dtype)
            for place, query in enumerate(queries)
        ]

    def with_queries(self, question: Question) -> Iterator[tuple[Projections, MapQuery]]:
        """Each map's projections, with what is asked of it."""
        for layer in self._layers:
            yield from zip(self.by_layer[layer.name], question[layer.name], strict=True)

    def curvature(self, misfit: Misfit) -> Tensor:
        """Σ over rows of p / (1 − p) · sketch ⊗ sketch, (width, width)."""
        nbytes = self._width**2 * self._dtype.itemsize
        if nbytes > MEMORY:
            raise QuestionError(
                f"sketches of {len(self.projections)} linear maps have {self._width:,} numbers together; their products need "
                f"{nbytes / 1e9:.1f} GB, more than {MEMORY / 1e9:.1f}. Ask fewer layers (layers=) or smaller sketches (size=)."
            )
        total = torch.zeros(self._width, self._width, dtype=self._dtype)
        for window in windows(self._store, self._segment.first_row, self._segment.end_row, ROWS):
            rows = self._sketch(window) * misfit.weights(window, self._dtype)[:, None]
            total += rows.T @ rows
        return total

    def _sketch(self, window: Window) -> Tensor:
        """(rows, width)"""
        sketches = torch.zeros(window.end - window.begin, self._width, dtype=self._dtype)
        low = 0
        for layer in self._layers:
            maps = self.by_layer[layer.name]
            high = low + sum(one.size for one in maps)
            for here, piece, keys, errors in pieces_in(self._store, layer, window, self._dtype):
                parts = []
                for one in maps:
                    own_errors = one.linear_map.error_side(keys, errors)
                    parts.append(one.of_rows(one.linear_map.key_side(keys), own_errors, piece.positions))
                divisors = piece.loss_divisors(self._loss_mean, self._dtype)
                sketches[here, low:high] += torch.cat(parts, 1) * divisors[:, None]
            low = high
        return sketches
