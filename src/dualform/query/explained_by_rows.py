"""A movement of weights, fitted row by row: D ≈ −Σ s_i g_i, with g_i the gradient of a row and a scale s_i for each.

It is a ridge regression through the Gram matrix of the rows' gradients. With as many rows as weights it explains anything; so it says, too, how
much of a random movement it would explain (`chance`): only what is above that is evidence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dualform.curvature.maps import LinearMap, linear_maps
from dualform.layers.layer import Layer
from dualform.query.influence.estimate import loss_mean_of, told_loss_mean
from dualform.query.influence.kernel import LayerRows
from dualform.query.influence.problem import Problem
from dualform.query.influence.segments import Segment, segments
from dualform.store.collection import Span
from dualform.store.reader import Store

RIDGE = 1e-3
"""Relative to the mean square of a row's gradient."""
MOST_ROWS = 2048
"""More rows are not fitted: it takes memory for the square of their number, and time for its cube."""
ZERO = 1e-14
"""An eigenvalue this much smaller than the largest is 0."""


def fit_rows(store: Store, parameter: str, movement: Tensor, span: Span) -> dict[str, float]:
    """Return what the gradients of the rows at a checkpoint explain of a movement, and would explain by chance.

    Nothing, if the parameter is not the only matrix of a plain layer, or if there are too many rows.
    """
    layer = _plain_layer(store, parameter)
    [segment] = segments(store, span.end, [(span.begin, span.end)])
    if layer is None or segment.rows > MOST_ROWS:
        return {}
    rows = _Rows(store, layer, segment)
    is_turned = layer.bilinear()[0].role == "table"
    matrix = movement.flatten(1).T if is_turned else movement.flatten(1)
    values, vectors = torch.linalg.eigh(rows.gram())
    ridge = RIDGE * float(values.mean())
    is_there = values > values.max() * ZERO
    values = values[is_there]
    along = vectors.T[is_there] @ rows.along(matrix)
    # Along each eigenvector, the ridge leaves a part of the movement unexplained; a random one has the same square along all directions
    explained = 1 - (ridge / (values + ridge)) ** 2
    square = float(movement.square().sum())
    return {
        "by_rows": fraction(float((explained * along**2 / values).sum()), square),
        "chance": float(explained.sum()) / movement.numel(),
    }


def fraction(explained: float, square: float) -> float:
    """Return a part of a square, from 0 to 1, where rounding may take it out of that. What did not move is explained."""
    if not square:
        return 1.0
    return min(max(explained / square, 0.0), 1.0)


def _plain_layer(store: Store, parameter: str) -> Layer | None:
    """Return the layer whose only matrix a parameter is; None: there is none."""
    users = store.users(parameter)
    if len(users) != 1 or users[0].form not in ("vectors", "maps"):
        return None
    [layer] = users
    uses = layer.bilinear()
    if len(uses) != 1 or uses[0].parameter != parameter:
        return None
    is_part = uses[0].keys or uses[0].errors or uses[0].rows or uses[0].groups > 1
    return None if is_part else layer


@dataclass(frozen=True)
class _Rows:
    """The gradients of some rows in one layer, without its bias."""

    store: Store
    layer: Layer
    segment: Segment

    @property
    def _gradients(self) -> LayerRows:
        loss_mean = loss_mean_of(self.store, told_loss_mean(self.store))
        problem = Problem(
            store=self.store,
            layers=[self.layer],
            segments=[self.segment],
            questions=[],
            dtype=torch.float64,
            loss_mean=loss_mean,
            damping=None,
            size=0,
            memory=0,
            progress=None,
        )
        return LayerRows(problem, self.segment, self.layer)

    @property
    def _linear_map(self) -> LinearMap:
        [linear_map] = linear_maps(self.layer)
        return replace(linear_map, constant=0.0)

    def gram(self) -> Tensor:
        """Return the inner products of the gradients, (rows, rows)."""
        count = self.segment.rows
        found = torch.zeros(count, count, dtype=torch.float64)
        self._gradients.add_gram_of(self._linear_map, found)
        return found

    def along(self, matrix: Tensor) -> Tensor:
        """Return the inner product of each gradient with a matrix (outputs, inputs), (rows,)."""
        found = torch.zeros(self.segment.rows, dtype=torch.float64)
        for slots in self._gradients.slots(self._linear_map):
            outputs = slots.keys[:, 0] @ matrix.T
            of_slots = (outputs * slots.errors[:, 0]).sum(1)
            found[slots.rows] += of_slots.reshape(-1, slots.positions).sum(1)
        return found
