"""The sketched path kernel: gradients of each linear map under two random projections, k × k numbers for each row.

With φ the sketch of a row's gradient and p the probability that it gave its label: score = −φ_qᵀ H⁻¹ φ_i, H = Σ_i p_i/(1 − p_i) φ_i φ_iᵀ + μI,
μ the mean of what is summed. That is the path kernel's answer (kernel.py) in the space of sketches, where it is linear in the
number of rows. Projections are new in each segment, so their noise averages out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.curvature.maps import LinearMap
from dualform.errors import QuestionError
from dualform.layers.keys import RowGradients
from dualform.layers.layer import Layer
from dualform.query.influence.problem import Problem
from dualform.query.influence.products import MapQuery, Question
from dualform.query.influence.scores import LinearScores
from dualform.query.influence.segments import Segment, Window, pieces_in
from dualform.query.influence.softmax import Misfit, softmax_parts

DAMPING = 1.0
"""λ: what is added to the mean eigenvalue's place, relative to the mean of the kernel's diagonal."""
ROWS = 1024
"""How many rows are sketched at a time."""
MEMORY = 1 << 30
"""How much the matrix of all sketches' products may take."""


@dataclass(frozen=True)
class Projections:
    """Of one linear map in one segment."""

    linear_map: LinearMap
    keys: Tensor
    """(groups, width + 1, k), the constant last; of one-hot keys (width, k)."""
    errors: Tensor
    """(groups, outputs, k)"""

    @property
    def size(self) -> int:
        """How many numbers a sketch has."""
        return self.keys.shape[-1] * self.errors.shape[-1]

    def of_rows(self, keys: Tensor, errors: Tensor, positions: int) -> Tensor:
        """Σ over positions and groups, (rows, size); keys (n, groups, width) or (n,), errors (n, groups, outputs)."""
        rows = len(errors) // positions
        projected_errors: Tensor = torch.einsum("ngo,gok->ngk", errors, self.errors)
        projected_keys = self._of_keys(keys)
        left = projected_errors.reshape(rows, -1, projected_errors.shape[2])
        right = projected_keys.reshape(rows, -1, projected_keys.shape[2])
        return torch.bmm(left.transpose(1, 2), right).reshape(rows, -1)

    def of_gradients(self, weights: Tensor, constants: Tensor) -> Tensor:
        """Of the gradients of rows, (rows, size); weights (rows, groups, outputs, width), constants (rows, groups, outputs)."""
        projected: Tensor = torch.einsum("rgow,gwk->rgok", weights, self.keys[:, :-1])
        projected = projected + self.linear_map.constant * torch.einsum("rgo,gk->rgok", constants, self.keys[:, -1])
        return torch.einsum("gol,rgok->rlk", self.errors, projected).reshape(len(weights), -1)

    def _of_keys(self, keys: Tensor) -> Tensor:
        """(n, groups, k)."""
        if self.linear_map.is_one_hot:
            known = self.keys[keys.clamp(min=0)]
            return torch.where(keys[:, None] >= 0, known, 0).unsqueeze(1)
        projected: Tensor = torch.einsum("ngw,gwk->ngk", keys, self.keys[:, :-1])
        return projected + self.linear_map.constant * self.keys[:, -1]

    def of_query(self, query: MapQuery) -> Tensor:
        """Return the sketch of a query's gradient, (examples, size)."""
        examples, positions = query.slopes.shape[:2]
        if not examples:
            return query.slopes.new_zeros(0, self.size)
        keys = query.queries.flatten(0, 1)
        errors = query.slopes.flatten(0, 1)
        return self.of_rows(keys, errors, positions)


class SketchedProducts:
    """As Products, through sketches. matrices (examples, size)."""

    def __init__(self, projections: Projections, matrices: Tensor):
        self._projections = projections
        self._matrices = matrices

    def of_slots(self, examples: slice, keys: Tensor, errors: Tensor) -> Tensor:
        """(examples, n)."""
        return self.of_rows(examples, keys, errors, 1)

    def of_rows(
        self,
        examples: slice,
        keys: Tensor,
        errors: Tensor,
        positions: int,
    ) -> Tensor:
        """(examples, n / positions)."""
        sketches = self._projections.of_rows(keys, errors, positions)
        return self._matrices[examples] @ sketches.T

    def of_gradients(self, examples: slice, weights: Tensor, constants: Tensor) -> Tensor:
        """(examples, rows)."""
        return self._matrices[examples] @ self._projections.of_gradients(weights, constants).T


def draw_projections(
    linear_map: LinearMap,
    size: int,
    seed: Sequence[int],
    dtype: torch.dtype,
) -> Projections:
    """Draw normal numbers, such that inner products of sketches are right on average. What is shorter than k stays as it is."""
    generator = torch.Generator().manual_seed(hash(tuple(seed)) & (2**62 - 1))

    def draw(groups: int, length: int) -> Tensor:
        if groups * length <= size:
            return torch.eye(groups * length, dtype=dtype).reshape(groups, length, -1)
        numbers = torch.randn(groups, length, size, generator=generator, dtype=torch.float64)
        return (numbers / math.sqrt(size)).to(dtype)

    # Keys are drawn first: the numbers of a seed depend on the order
    if linear_map.is_one_hot:
        [keys] = draw(1, linear_map.width)
    else:
        keys = draw(linear_map.groups, linear_map.width + 1)
    return Projections(linear_map, keys, draw(linear_map.groups, linear_map.outputs))


def sketched_scores(problem: Problem) -> LinearScores:
    """Return −φ_qᵀ H⁻¹ φ_i in every segment."""
    products = []
    for segment, question, misfit in softmax_parts(problem, "sketch"):
        products.append(_sketched_products(problem, segment, question, misfit))
    return LinearScores(problem.store, problem.segments, problem.loss_mean, problem.dtype, products)


def _sketched_products(
    problem: Problem,
    segment: Segment,
    question: Question,
    misfit: Misfit,
) -> dict[str, list[SketchedProducts]]:
    """Return for each layer the products of each of its maps."""
    sketcher = _Sketcher(problem, segment, question)
    curvature = sketcher.curvature(misfit)
    damping = problem.damping or DAMPING
    mean = curvature.trace() / segment.rows  # of the kernel's diagonal
    curvature.diagonal().add_(torch.where(mean > 0, damping * mean, 1))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(curvature))
    solved = sketcher.of_queries(question) @ inverse
    products = {}
    for layer, maps in sketcher.split(-solved).items():
        products[layer] = [SketchedProducts(projections, matrices) for projections, matrices in maps]
    return products


class _Sketcher:
    """Sketches of a segment's rows and queries: those of all linear maps of all layers, one behind the other."""

    def __init__(self, problem: Problem, segment: Segment, question: Question):
        self._problem = problem
        self._segment = segment
        self._by_layer = {layer.name: self._draw(layer, question[layer.name]) for layer in problem.layers}
        self._sizes = [projections.size for maps in self._by_layer.values() for projections in maps]

    def _draw(self, layer: Layer, queries: Sequence[MapQuery]) -> list[Projections]:
        number, _ = self._problem.store.layer(layer.name)
        drawn = []
        for place, query in enumerate(queries):
            seed = (self._segment.begin, number, place)
            drawn.append(draw_projections(query.linear_map, self._problem.size, seed, self._problem.dtype))
        return drawn

    def split(self, sketches: Tensor) -> dict[str, list[tuple[Projections, Tensor]]]:
        """Split sketches (n, width) into views, by layer one for each linear map."""
        columns = iter(torch.split(sketches, self._sizes, 1))
        return {layer: [(projections, next(columns)) for projections in maps] for layer, maps in self._by_layer.items()}

    def of_queries(self, question: Question) -> Tensor:
        """(examples, width)"""
        sketches = []
        for layer, maps in self._by_layer.items():
            for projections, query in zip(maps, question[layer], strict=True):
                sketches.append(projections.of_query(query))
        return torch.cat(sketches, 1)

    def curvature(self, misfit: Misfit) -> Tensor:
        """Return Σ over rows of p / (1 − p) · sketch ⊗ sketch, (width, width)."""
        dtype = self._problem.dtype
        width = sum(self._sizes)
        nbytes = width**2 * dtype.itemsize
        if nbytes > MEMORY:
            raise QuestionError(
                f"sketches of {len(self._sizes)} linear maps have {width:,} numbers together; their products need "
                f"{nbytes / 1e9:.1f} GB, more than {MEMORY / 1e9:.1f}. Ask fewer layers (layers=) or smaller sketches (size=)."
            )
        total = torch.zeros(width, width, dtype=dtype)
        for window in self._segment.windows(self._problem.store, ROWS):
            weights = misfit.weights(window.begin, window.end)
            rows = self._of_rows(window) * weights[:, None]
            total += rows.T @ rows
        return total

    def _of_rows(self, window: Window) -> Tensor:
        """(rows, width)"""
        problem = self._problem
        sketches = torch.zeros(window.rows, sum(self._sizes), dtype=problem.dtype)
        by_layer = self.split(sketches)
        for layer in problem.layers:
            for slots in pieces_in(problem.store, layer, window, problem.dtype):
                divisors = slots.piece.loss_divisors(problem.loss_mean, problem.dtype)
                for projections, columns in by_layer[layer.name]:
                    linear_map = projections.linear_map
                    if isinstance(slots.keys, RowGradients):
                        own = projections.of_gradients(*linear_map.of_gradients(slots.keys))
                    else:
                        own = projections.of_rows(*slots.sides(linear_map), slots.piece.positions)
                    columns[slots.here] += own * divisors[:, None]
        return sketches
