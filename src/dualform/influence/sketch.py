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

from dualform.errors import QuestionError
from dualform.influence.asked import Asked, ByLayer
from dualform.influence.loss_mean import LossMean
from dualform.influence.pairings import Pairing
from dualform.influence.pieces import pieces_in, windows
from dualform.influence.segments import Segment
from dualform.influence.softmax import Misfit
from dualform.layers.streams import Layer
from dualform.store.reader import Store

SIZE = 32
"""k: each gradient becomes k × k numbers."""
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

    pairing: Pairing
    keys: Tensor
    errors: Tensor

    @property
    def size(self) -> int:
        """How many numbers a sketch has."""
        return self.keys.shape[-1] * self.errors.shape[-1]

    def of_rows(self, keys: Tensor, errors: Tensor, positions: int) -> Tensor:
        """Σ over positions and groups, (rows, size); keys (n, groups, width) or (n,), errors (n, groups, outputs)."""
        if self.pairing.numbers:
            taken = torch.where(keys[:, None] >= 0, self.keys[keys.clamp(min=0)], 0).unsqueeze(1)
        else:
            taken = torch.einsum("ngw,gwk->ngk", keys, self.keys[:, :-1]) + self.pairing.constant * self.keys[:, -1]
        apart: Tensor = torch.einsum("ngo,gok->ngk", errors, self.errors)
        rows = len(errors) // positions
        apart, taken = (side.reshape(rows, positions * side.shape[1], side.shape[2]) for side in (apart, taken))
        return torch.bmm(apart.transpose(1, 2), taken).reshape(rows, -1)


class SketchedProducts:
    """As Products, through sketches. matrices (examples, size)."""

    def __init__(self, projections: Projections, matrices: Tensor):
        self._projections, self._matrices = projections, matrices

    def of_slots(self, some: slice, keys: Tensor, errors: Tensor) -> Tensor:
        """(examples, n)."""
        return self.of_rows(some, keys, errors, 1)

    def of_rows(self, some: slice, keys: Tensor, errors: Tensor, positions: int) -> Tensor:
        """(examples, n / positions)."""
        return self._matrices[some] @ self._projections.of_rows(keys, errors, positions).T


def projections(pairing: Pairing, size: int, seed: Sequence[int], dtype: torch.dtype) -> Projections:
    """Normal numbers, such that inner products of sketches are right on average. What is shorter than k stays as it is."""
    generator = torch.Generator().manual_seed(hash(tuple(seed)) & (2**62 - 1))

    def drawn(groups: int, length: int) -> Tensor:
        if groups * length <= size:
            return torch.eye(groups * length, dtype=dtype).reshape(groups, length, -1)
        return (torch.randn(groups, length, size, generator=generator, dtype=torch.float64) / math.sqrt(size)).to(dtype)

    if pairing.numbers:
        return Projections(pairing, drawn(1, pairing.width)[0], drawn(1, pairing.outputs))
    return Projections(pairing, drawn(pairing.groups, pairing.width + 1), drawn(pairing.groups, pairing.outputs))


def sketched(
    store: Store,
    layers: Sequence[Layer],
    segment: Segment,
    question: ByLayer,
    misfit: Misfit,
    loss_mean: LossMean,
    size: int,
    damping: float,
) -> dict[str, list[SketchedProducts]]:
    """For each layer the products of each of its maps."""
    dtype = next(one.slopes.dtype for maps in question.values() for one in maps)
    found = {
        layer.name: [
            projections(one.pairing, size, (segment.begin, store.layer(layer.name)[0], n), dtype)
            for n, one in enumerate(question[layer.name])
        ]
        for layer in layers
    }
    flat = [(layer, one) for layer in layers for one in found[layer.name]]
    width = sum(one.size for _, one in flat)
    if width**2 * dtype.itemsize > MEMORY:
        raise QuestionError(
            f"sketches of {len(flat)} linear maps have {width:,} numbers together; their products need "
            f"{width**2 * dtype.itemsize / 1e9:.1f} GB, more than {MEMORY / 1e9:.1f}. Ask fewer layers (layers=) or smaller sketches (size=)."
        )
    curvature = torch.zeros(width, width, dtype=dtype)
    for window in windows(store, segment.first_row, segment.end_row, ROWS):
        rows = torch.zeros(window.end - window.begin, width, dtype=dtype)
        low = 0
        for layer in layers:
            high = low + sum(one.size for one in found[layer.name])
            for here, piece, keys, errors in pieces_in(store, layer, window, dtype):
                parts = [
                    one.of_rows(one.pairing.key_side(keys), one.pairing.error_side(keys, errors), piece.positions)
                    for one in found[layer.name]
                ]
                rows[here, low:high] += torch.cat(parts, 1) * loss_mean.of_rows(piece, dtype)[:, None]
            low = high
        rows *= misfit.weights(window, dtype)[:, None]
        curvature += rows.T @ rows
    count = segment.end_row - segment.first_row
    mean = curvature.trace() / count
    curvature.diagonal().add_(torch.where(mean > 0, damping * mean, 1))
    whole = torch.cholesky_inverse(torch.linalg.cholesky(curvature))
    asked = [
        _sketch(one, projected)
        for layer in layers
        for one, projected in zip(question[layer.name], found[layer.name], strict=True)
    ]
    solved = torch.cat(asked, 1) @ whole
    matrices = iter(torch.split(-solved, [one.size for _, one in flat], 1))
    return {layer.name: [SketchedProducts(one, next(matrices)) for one in found[layer.name]] for layer in layers}


def _sketch(asked: Asked, projected: Projections) -> Tensor:
    """(examples, size)."""
    examples, positions = asked.slopes.shape[:2]
    if not examples:
        return asked.slopes.new_zeros(0, projected.size)
    return projected.of_rows(asked.queries.flatten(0, 1), asked.slopes.flatten(0, 1), positions)
