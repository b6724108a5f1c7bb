"""The path kernel: inner products of the gradients of all rows of a segment, for a softmax cross-entropy.

K_ij = Σ over linear maps ⟨G_i, G_j⟩ with G a row's gradient; D = √(p / (1 − p)), p the probability that a row gave its label. The scores of a
query solve a ridge regression among the rows: a = (DKD + μI)⁻¹ D k_q, score = −a / D = −(k_q − K D a) / μ, μ a part λ of the mean
diagonal. The last form adds up over layers. It costs N³/3 for each segment and N² numbers of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.curvature.loss_mean import LossMean
from dualform.curvature.maps import LinearMap, linear_maps
from dualform.errors import QuestionError
from dualform.layers.streams import Layer
from dualform.query.influence.products import Question, plain_products
from dualform.query.influence.segments import Segment, Window, one_slot_a_row, pieces_in, windows
from dualform.query.influence.softmax import Misfit
from dualform.store.reader import Store

DAMPING = 1.0
"""λ"""
MEMORY = 1 << 30
"""How much the kernel of a segment may take, in bytes."""
ROWS = 1024
"""How many rows are read at a time."""
GRADIENT_BYTES = 256 << 20
"""How much the gradients of all rows may take, where rows have several positions: a part of the outputs at a time."""


def kernel_scores(
    store: Store,
    layers: Sequence[Layer],
    segment: Segment,
    question: Question,
    misfit: Misfit,
    loss_mean: LossMean,
    damping: float,
    memory: int,
) -> Tensor:
    """The scores of a segment's rows, by layer, (layers, examples, rows): they add up over layers."""
    dtype = next(one.slopes.dtype for maps in question.values() for one in maps)
    count = segment.end_row - segment.first_row
    if count**2 * dtype.itemsize > memory:
        most = int((memory / dtype.itemsize) ** 0.5)
        raise QuestionError(
            f"the segment from step {segment.begin} to {segment.end} has {count:,} rows, and their kernel needs "
            f'{count**2 * dtype.itemsize / 1e9:.1f} GB; with memory={memory:,} bytes there may be {most:,}. Ask method="sketch" or '
            f'"whitened", which grow with the rows and not with their square, or say memory=, or shorter segments=.'
        )
    weights = misfit.weights(Window(0, segment.first_row, segment.end_row), dtype)
    kernel = torch.zeros(count, count, dtype=dtype)
    by_layer = [_Rows(store, layer, segment, loss_mean) for layer in layers]
    for rows in by_layer:
        rows.add_gram(kernel)
    kernel *= weights
    kernel *= weights[:, None]
    mean = kernel.diagonal().mean()
    added = torch.where(mean > 0, damping * mean, 1)
    kernel.diagonal().add_(added)
    torch.linalg.cholesky(kernel, out=kernel)
    along = torch.stack([_with_queries(rows, question) for rows in by_layer])
    solved = torch.cholesky_solve((along.sum(0) * weights).T, kernel).T * weights
    for own, rows in zip(along, by_layer, strict=True):  # what is left of each layer's part of the regression
        kernel.zero_()
        rows.add_gram(kernel)
        own -= solved @ kernel
    return along / -added


@dataclass(frozen=True)
class _Rows:
    """The rows of a segment in one layer."""

    store: Store
    layer: Layer
    segment: Segment
    loss_mean: LossMean

    @property
    def count(self) -> int:
        """How many rows."""
        return self.segment.end_row - self.segment.first_row

    def add_gram(self, kernel: Tensor) -> None:
        """Add the inner products of the rows' gradients in this layer, (rows, rows)."""
        for linear_map in linear_maps(self.layer):
            if linear_map.is_one_hot:
                _add_one_hot(self, linear_map, kernel)
            elif linear_map.groups == 1 and one_slot_a_row(self.store, self.layer, self.segment):
                _add_outer(self, linear_map, kernel)
            else:
                _add_gradients(self, linear_map, kernel)

    def sides(self, linear_map: LinearMap, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor, int]]:
        """Stretches of rows: which, their key sides, their error sides with the loss's mean undone, and the positions of each row."""
        for window in windows(self.store, self.segment.first_row, self.segment.end_row, ROWS):
            first = window.begin - self.segment.first_row
            for here, piece, keys, errors in pieces_in(self.store, self.layer, window, dtype):
                divisor = piece.loss_divisors(self.loss_mean, dtype).repeat_interleave(piece.positions)
                own_errors = linear_map.error_side(keys, errors) * divisor[:, None, None]
                yield (
                    slice(first + here.start, first + here.stop),
                    linear_map.key_side(keys),
                    own_errors,
                    piece.positions,
                )


def _with_queries(rows: _Rows, question: Question) -> Tensor:
    """⟨the query's gradient, each row's⟩ in one layer, (examples, rows)."""
    maps = question[rows.layer.name]
    dtype = maps[0].slopes.dtype
    examples = maps[0].slopes.shape[0]
    found = torch.zeros(examples, rows.count, dtype=dtype)
    for one in maps:
        product = plain_products(one)
        for place, own_keys, own_errors, positions in rows.sides(one.linear_map, dtype):
            found[:, place] += product.of_rows(slice(0, examples), own_keys, own_errors, positions)
    return found


# The kernel


def _add_outer(rows: _Rows, linear_map: LinearMap, kernel: Tensor) -> None:
    """A gradient is one outer product: ⟨G_i, G_j⟩ = (key · key)(error · error)."""
    keys = kernel.new_zeros(len(kernel), linear_map.width)
    errors = kernel.new_zeros(len(kernel), linear_map.outputs)
    for place, own_keys, own_errors, _ in rows.sides(linear_map, kernel.dtype):
        keys[place] = own_keys[:, 0]
        errors[place] = own_errors[:, 0]
    for low in range(0, len(kernel), ROWS):
        some = slice(low, low + ROWS)
        kernel[some] += (keys[some] @ keys.T + linear_map.constant**2) * (errors[some] @ errors.T)


def _add_gradients(rows: _Rows, linear_map: LinearMap, kernel: Tensor) -> None:
    """A gradient is a sum over positions: it is put together, for some of the outputs at a time."""
    width = linear_map.groups * (linear_map.width + 1)
    size = max(1, GRADIENT_BYTES // (len(kernel) * width * kernel.element_size()))
    for low in range(0, linear_map.outputs, size):
        high = min(low + size, linear_map.outputs)
        gradients = kernel.new_zeros(len(kernel), width * (high - low))
        for place, own_keys, own_errors, positions in rows.sides(linear_map, kernel.dtype):
            count = place.stop - place.start
            keys = linear_map.with_constant(own_keys)
            keys = keys.reshape(count, positions, *keys.shape[1:])
            errors = own_errors[..., low:high]
            errors = errors.reshape(count, positions, *errors.shape[1:])
            gradients[place] += torch.einsum("rpgo,rpgw->rgow", errors, keys).reshape(count, -1)
        kernel.addmm_(gradients, gradients.T)


def _add_one_hot(rows: _Rows, linear_map: LinearMap, kernel: Tensor) -> None:
    """Only rows with the same number have something in common: number by number."""
    owners = [np.zeros(0, np.int64)]
    numbers = [np.zeros(0, np.int64)]
    errors = [kernel.new_zeros(0, linear_map.outputs)]
    for place, own_keys, own_errors, positions in rows.sides(linear_map, kernel.dtype):
        owners.append(np.repeat(np.arange(place.start, place.stop), positions))
        numbers.append(own_keys.numpy())
        errors.append(own_errors[:, 0])
    slots = pl.DataFrame({"number": np.concatenate(numbers), "row": np.concatenate(owners)}).with_row_index("slot")
    every = torch.cat(errors)
    for same in slots.filter(pl.col("number") >= 0).partition_by("number"):  # −1 is a key of zeros
        mine, places = np.unique(same["row"].to_numpy(), return_inverse=True)
        sums = every.new_zeros(len(mine), linear_map.outputs)
        sums.index_add_(0, torch.from_numpy(places), every[same["slot"].to_numpy().astype(np.int64)])
        kernel[np.ix_(mine, mine)] += sums @ sums.T
