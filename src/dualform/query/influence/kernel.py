"""The path kernel: inner products of the gradients of all rows of a segment, for a softmax cross-entropy.

K_ij = Σ over linear maps ⟨G_i, G_j⟩ with G a row's gradient; D = √(p / (1 − p)), p the probability that a row gave its label. The scores of a
query solve a ridge regression among the rows: a = (DKD + μI)⁻¹ D k_q, score = −a / D = −(k_q − K D a) / μ, μ a part λ of the mean
diagonal. The last form adds up over layers. It costs N³/3 for each segment and N² numbers of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.curvature.maps import LinearMap, linear_maps
from dualform.errors import QuestionError
from dualform.layers.keys import RowGradients
from dualform.layers.layer import Layer
from dualform.query.influence.problem import Problem
from dualform.query.influence.products import Question, plain_products
from dualform.query.influence.rows import slices
from dualform.query.influence.scores import RowScores
from dualform.query.influence.segments import DecodedPiece, Segment, one_slot_a_row, pieces_in
from dualform.query.influence.softmax import softmax_parts

DAMPING = 1.0
"""λ"""
MEMORY = 1 << 30
"""How much the kernel of a segment may take, in bytes."""
ROWS = 1024
"""How many rows are read at a time."""
GRADIENT_BYTES = 256 << 20
"""How much the gradients of all rows may take, where rows have several positions: a part of the outputs at a time."""


def kernel_scores(problem: Problem) -> RowScores:
    """Return the scores of all rows, by layer: they add up over layers."""
    scores = []
    for segment, question, misfit in softmax_parts(problem, "kernel"):
        _check_memory(segment, problem.dtype, problem.memory)
        weights = misfit.weights(segment.first_row, segment.end_row)
        by_layer = [LayerRows(problem, segment, layer) for layer in problem.layers]
        scores.append(_solve(by_layer, weights, question, problem.damping or DAMPING))
    return RowScores(problem.segments, [layer.name for layer in problem.layers], scores)


def _check_memory(segment: Segment, dtype: torch.dtype, memory: int) -> None:
    count = segment.rows
    nbytes = count**2 * dtype.itemsize
    if nbytes > memory:
        most = int((memory / dtype.itemsize) ** 0.5)
        raise QuestionError(
            f"the segment from step {segment.begin} to {segment.end} has {count:,} rows, and their kernel needs "
            f'{nbytes / 1e9:.1f} GB; with memory={memory:,} bytes there may be {most:,}. Ask method="sketch" or '
            f'"whitened", which grow with the rows and not with their square, or say memory=, or shorter segments=.'
        )


def _solve(
    by_layer: Sequence[LayerRows],
    weights: Tensor,
    question: Question,
    damping: float,
) -> Tensor:
    """Return the scores of a segment's rows, (layers, examples, rows). weights: D, (rows,)."""
    # DKD + μI, and in its place the Cholesky factor: there is memory for one such matrix
    kernel = weights.new_zeros(len(weights), len(weights))
    for rows in by_layer:
        rows.add_gram(kernel)
    kernel *= weights
    kernel *= weights[:, None]
    mean = kernel.diagonal().mean()
    added = torch.where(mean > 0, damping * mean, 1)
    kernel.diagonal().add_(added)
    torch.linalg.cholesky(kernel, out=kernel)
    # a = (DKD + μI)⁻¹ D k_q, and D a
    along = torch.stack([rows.along(question) for rows in by_layer])
    weighted = along.sum(0) * weights
    solved = torch.cholesky_solve(weighted.T, kernel).T * weights
    # k_q − K D a of each layer: the kernel is built once more, layer by layer
    for own, rows in zip(along, by_layer, strict=True):
        kernel.zero_()
        rows.add_gram(kernel)
        own -= solved @ kernel
    return along / -added


class MapSlots(NamedTuple):
    """Slots of some rows, as one linear map sees them."""

    rows: slice
    positions: int
    keys: Tensor
    errors: Tensor
    """With the loss's mean undone."""


@dataclass(frozen=True)
class LayerRows:
    """The rows of a segment in one layer."""

    problem: Problem
    segment: Segment
    layer: Layer

    def pieces(self) -> Iterator[tuple[DecodedPiece, slice, Tensor]]:
        """Return the slots of all rows, some rows at a time: with their rows, and by what the loss's mean has divided each of these."""
        problem = self.problem
        for window in self.segment.windows(problem.store, ROWS):
            for slots in pieces_in(problem.store, self.layer, window, problem.dtype):
                divisors = slots.piece.loss_divisors(problem.loss_mean, problem.dtype)
                yield slots, slots.piece.places(self.segment.first_row), divisors

    def slots(self, linear_map: LinearMap) -> Iterator[MapSlots]:
        """Return the same for layers whose slots are all there."""
        for slots, rows, divisors in self.pieces():
            yield _map_slots(linear_map, slots, rows, divisors)

    def along(self, question: Question) -> Tensor:
        """Return ⟨the query's gradient, each row's⟩ in this layer, (examples, rows)."""
        examples = slice(0, self.problem.examples)
        found = torch.zeros(self.problem.examples, self.segment.rows, dtype=self.problem.dtype)
        for query in question[self.layer.name]:
            products = plain_products(query)
            for slots, rows, divisors in self.pieces():
                if isinstance(slots.keys, RowGradients):
                    gradients = query.linear_map.of_gradients(slots.keys)
                    found[:, rows] += products.of_gradients(examples, *gradients) * divisors
                    continue
                own = _map_slots(query.linear_map, slots, rows, divisors)
                found[:, rows] += products.of_rows(examples, own.keys, own.errors, own.positions)
        return found

    def add_gram(self, kernel: Tensor) -> None:
        """Add the inner products of the rows' gradients in this layer, (rows, rows)."""
        for linear_map in linear_maps(self.layer):
            self.add_gram_of(linear_map, kernel)

    def add_gram_of(self, linear_map: LinearMap, kernel: Tensor) -> None:
        """Add those of one linear map."""
        if linear_map.is_one_hot:
            _add_one_hot(self.slots(linear_map), linear_map, kernel)
        elif linear_map.groups == 1 and one_slot_a_row(self.problem.store, self.layer, self.segment):
            _add_outer(self.slots(linear_map), linear_map, kernel)
        else:
            self._add_gradients(linear_map, kernel)

    def _add_gradients(self, linear_map: LinearMap, kernel: Tensor) -> None:
        """A gradient is a sum over positions: it is put together, for some of the outputs at a time."""
        width = linear_map.groups * (linear_map.width + 1)
        outputs_at_a_time = max(1, GRADIENT_BYTES // (len(kernel) * width * kernel.element_size()))
        for outputs in slices(0, linear_map.outputs, outputs_at_a_time):
            gradients = kernel.new_zeros(len(kernel), width * (outputs.stop - outputs.start))
            for slots, rows, divisors in self.pieces():
                if isinstance(slots.keys, RowGradients):
                    of_rows = _gradients(linear_map, slots.keys)[:, :, outputs] * divisors[:, None, None, None]
                else:
                    of_rows = _summed_gradients(linear_map, _map_slots(linear_map, slots, rows, divisors), outputs)
                gradients[rows] += of_rows.flatten(1)
            kernel.addmm_(gradients, gradients.T)


def _map_slots(linear_map: LinearMap, slots: DecodedPiece, rows: slice, divisors: Tensor) -> MapSlots:
    keys, errors = slots.sides(linear_map)
    by_slot = divisors.repeat_interleave(slots.piece.positions)
    return MapSlots(rows, slots.piece.positions, keys, errors * by_slot[:, None, None])


def _gradients(linear_map: LinearMap, gradients: RowGradients) -> Tensor:
    """Return the gradients of rows with the constant behind the keys, (rows, groups, outputs, width + 1)."""
    weights, constants = linear_map.of_gradients(gradients)
    return torch.cat([weights, linear_map.constant * constants.unsqueeze(-1)], -1)


def _summed_gradients(linear_map: LinearMap, slots: MapSlots, outputs: slice) -> Tensor:
    """Return the same from slots, for some outputs."""
    shape = (-1, slots.positions)
    keys = torch.unflatten(linear_map.with_constant(slots.keys), 0, shape)
    errors = torch.unflatten(slots.errors[..., outputs], 0, shape)
    return torch.einsum("rpgo,rpgw->rgow", errors, keys)


def _add_outer(every: Iterable[MapSlots], linear_map: LinearMap, kernel: Tensor) -> None:
    """A gradient is one outer product: ⟨G_i, G_j⟩ = (key · key)(error · error)."""
    keys = kernel.new_zeros(len(kernel), linear_map.width)
    errors = kernel.new_zeros(len(kernel), linear_map.outputs)
    for slots in every:
        keys[slots.rows] = slots.keys[:, 0]
        errors[slots.rows] = slots.errors[:, 0]
    for some in slices(0, len(kernel), ROWS):
        of_keys = keys[some] @ keys.T + linear_map.constant**2
        of_errors = errors[some] @ errors.T
        kernel[some] += of_keys * of_errors


def _add_one_hot(every: Iterable[MapSlots], linear_map: LinearMap, kernel: Tensor) -> None:
    """Only rows with the same number have something in common: number by number."""
    owners = [np.zeros(0, np.int64)]
    numbers = [np.zeros(0, np.int64)]
    errors = [kernel.new_zeros(0, linear_map.outputs)]
    for slots in every:
        rows = np.arange(slots.rows.start, slots.rows.stop)
        owners.append(np.repeat(rows, slots.positions))
        numbers.append(slots.keys.numpy())
        errors.append(slots.errors[:, 0])
    table = pl.DataFrame({"number": np.concatenate(numbers), "row": np.concatenate(owners)}).with_row_index("slot")
    table = table.filter(pl.col("number") >= 0)  # −1 is a key of zeros
    all_errors = torch.cat(errors)
    for same in table.partition_by("number"):
        rows, places = np.unique(same["row"].to_numpy(), return_inverse=True)
        own_errors = all_errors[same["slot"].to_numpy().astype(np.int64)]
        sums = all_errors.new_zeros(len(rows), linear_map.outputs)
        sums.index_add_(0, torch.from_numpy(places), own_errors)
        kernel[np.ix_(rows, rows)] += sums @ sums.T
