"""Softmax cross-entropy, recognised by its error signals: p − onehot(label), one negative entry, and a sum of zero."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dualform.errors import NotRecordedError
from dualform.layers.layer import Layer
from dualform.progress import report
from dualform.query.influence.problem import Problem
from dualform.query.influence.products import Question
from dualform.query.influence.segments import Segment, one_slot_a_row, undecoded_pieces
from dualform.store.reader import Store

TOLERANCE = 2e-3
"""Of a float16 store: an element keeps 11 bits."""
ROUNDING = 1e-5
"""Of p − 1 itself, where p is 1 but for a few bits: the error signals of a learnt row need not sum to zero any better."""
LEAST = 1e-4
"""A smaller p cannot be told from zero by 1 − p in float16."""
ROWS = 8192
"""How many rows are read at a time."""


def is_softmax(errors: Tensor) -> Tensor:
    """Return which error signals (rows, classes) can be p − onehot(label), (rows,): they sum to zero, and at most one is negative."""
    size = errors.abs().sum(1)
    sums_to_zero = errors.sum(1).abs() <= TOLERANCE * size + ROUNDING
    return sums_to_zero & ((errors < 0).sum(1) <= 1)


def misfit(errors: Tensor, layer: str) -> Tensor:
    """Return 1 − p of each row's label, (rows,), from the error signals of the logits (rows, classes), with the loss's mean undone."""
    fits = is_softmax(errors)
    if not bool(fits.all()):
        raise NotRecordedError(
            f"the error signals of layer {layer!r} are not those of a softmax cross-entropy with one label for each row: "
            f'{int((~fits).sum())} of {len(fits)} rows differ. The methods "kernel" and "sketch" need that loss; ask '
            f'method="whitened", which fits any.'
        )
    found = -errors.clamp(max=0).sum(1)  # the one negative entry is p − 1
    if bool((found > 1 + TOLERANCE).any()):
        raise NotRecordedError(
            f"the error signals of layer {layer!r} are larger than those of a cross-entropy averaged over the rows of a batch: "
            f'1 − p would be {float(found.max()):.3g}. Say what the loss is a mean over (loss_mean=), or ask method="whitened", to '
            f"which the scale of the loss does not matter."
        )
    return found.clamp(max=1)


class Misfit:
    """1 − p of every row's label in a segment."""

    def __init__(self, problem: Problem, segment: Segment, layer: Layer):
        """layer: the one whose output is the logits."""
        store = problem.store
        if not one_slot_a_row(store, layer, segment):
            raise NotRecordedError(
                f"layer {layer.name!r} has several slots for each row (positions, calls, or backward passes), hence several labels. The "
                f'methods "kernel" and "sketch" are for one label a row; ask method="whitened".'
            )
        self._dtype = problem.dtype
        self._first_row = segment.first_row
        self._misfit = torch.zeros(segment.rows, dtype=torch.float64)
        for window in segment.windows(store, ROWS):
            for piece in undecoded_pieces(store, layer, window, layer.d_in + layer.d_out):
                divisors = piece.loss_divisors(problem.loss_mean, torch.float64)
                errors = piece.errors(torch.float64) * divisors[:, None]
                self._misfit[piece.places(segment.first_row)] = misfit(errors, layer.name)

    def weights(self, first_row: int, end_row: int) -> Tensor:
        """Return √(p / (1 − p)) of some rows; 0 where p is 1, for then there is no error signal."""
        found = self._misfit[first_row - self._first_row : end_row - self._first_row]
        p = (1 - found).clamp(min=LEAST)
        odds = p / found.clamp(min=LEAST**2)
        return torch.where(found > 0, odds.sqrt(), 0).to(self._dtype)


def softmax_parts(problem: Problem, method: str) -> Iterator[tuple[Segment, Question, Misfit]]:
    """Return each segment with its question and what its rows have still to learn."""
    output = logits(problem.store)
    parts = list(zip(problem.segments, problem.questions, strict=True))
    for segment, question in report(method, parts, problem.progress):
        yield segment, question, Misfit(problem, segment, output)


def logits(store: Store) -> Layer:
    """Return the layer whose output is taken for the logits: the last one that is a linear map of all its outputs."""
    recorded = [layer for layer in store.manifest.layers if layer.name not in store.manifest.left_out]
    attending = [layer for layer in recorded if layer.attends]
    if not attending or attending[-1].outputs:
        raise NotRecordedError(
            'the methods "kernel" and "sketch" need the error signals of all logits, and no layer has them. Ask method="whitened".'
        )
    return attending[-1]
