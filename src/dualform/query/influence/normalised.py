"""Influence with each row's gradient at unit length, so that rows with large gradients do not come first whatever is asked.

⟨q, C⁻¹ g⟩ / √⟨g, C⁻¹ g⟩, with C the damped curvature of the whitened method and g the row's gradient in all layers that are asked. Calls of
a module in one row count as if they were orthogonal to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dualform.curvature.maps import LinearMap, linear_maps
from dualform.curvature.sums import Curvature, Factors, damped
from dualform.layers.streams import Layer
from dualform.query.influence.scores import LinearScores
from dualform.query.influence.segments import Segment, Window, pieces_in

SMALLEST = 1e-30
"""The squared length of a row that wrote nothing."""


class NormalisedScores:
    """The scores of the whitened method, divided by the length of each row's gradient."""

    def __init__(
        self,
        scores: LinearScores,
        layers: Sequence[Layer],
        curvatures: Sequence[Mapping[str, Curvature]],
        damping: float,
    ):
        self._scores = scores
        self._layers = layers
        self._metrics = [
            {name: [_Metric(factors, damping) for factors in curvature.maps] for name, curvature in by_layer.items()}
            for by_layer in curvatures
        ]
        self._lengths: dict[tuple[int, Window], Tensor] = {}

    @property
    def segments(self) -> Sequence[Segment]:
        """What was looked at."""
        return self._scores.segments

    def rows(self, number: int, layers: Sequence[Layer], window: Window, queries: slice, dtype: torch.dtype) -> Tensor:
        """(queries, rows)"""
        found = self._scores.rows(number, layers, window, queries, dtype)
        return found.div_(self._lengths_of(number, window, dtype))

    def _lengths_of(self, number: int, window: Window, dtype: torch.dtype) -> Tensor:
        """The length of each row's gradient, (rows,): the same for all queries."""
        key = (number, window)
        if key not in self._lengths:
            self._lengths[key] = self._measured(number, window, dtype)
        return self._lengths[key]

    def _measured(self, number: int, window: Window, dtype: torch.dtype) -> Tensor:
        squares = torch.zeros(window.end - window.begin, dtype=dtype)
        for layer in self._layers:
            maps = list(zip(linear_maps(layer), self._metrics[number].get(layer.name, ()), strict=False))
            for here, piece, keys, errors in pieces_in(self._scores.store, layer, window, dtype):
                divisor = piece.loss_divisors(self._scores.loss_mean, dtype)
                for linear_map, metric in maps:
                    own_keys = linear_map.key_side(keys)
                    own_errors = (
                        linear_map.error_side(keys, errors) * divisor.repeat_interleave(piece.positions)[:, None, None]
                    )
                    squares[here] += metric.squares(linear_map, own_keys, own_errors, piece.positions)
        return squares.clamp_(min=SMALLEST).sqrt_()


class _Metric:
    """The inverse curvature of one linear map."""

    def __init__(self, factors: Factors, damping: float):
        self._positions = max(factors.positions, SMALLEST)
        self._errors = torch.linalg.inv(damped(factors.errors, damping))
        if factors.keys.dim() == 1:  # of one-hot keys
            self._keys = 1 / (factors.keys + damping * factors.keys.mean())
        else:
            self._keys = torch.linalg.inv(damped(factors.keys, damping))

    def squares(self, linear_map: LinearMap, keys: Tensor, errors: Tensor, positions: int) -> Tensor:
        """The squared length of Σ over positions of error ⊗ key, for each row: (rows,)."""
        of_errors = _inner(errors, self._errors.to(errors.dtype), positions)
        if linear_map.is_one_hot:
            numbers = keys.reshape(-1, positions)
            is_same = (numbers[:, :, None] == numbers[:, None]) & (numbers >= 0)[:, None]  # −1 is a key of zeros
            of_keys = (is_same * self._keys.to(errors.dtype)[numbers.clamp(min=0)][:, None]).unsqueeze(1)
        else:
            width = self._keys.shape[1]
            of_keys = _inner(linear_map.with_constant(keys)[..., :width], self._keys.to(errors.dtype), positions)
        return (of_errors * of_keys).sum((1, 2, 3)) / self._positions


def _inner(vectors: Tensor, metric: Tensor, positions: int) -> Tensor:
    """Inner products of the vectors at all pairs of positions: (n, groups, d), metric (groups, d, d) → (rows, groups, positions, positions)."""
    n, groups, width = vectors.shape
    by_row = vectors.reshape(n // positions, positions, groups, width).transpose(1, 2)
    return by_row @ metric @ by_row.transpose(2, 3)
