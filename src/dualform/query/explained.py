"""How much of what happened between two checkpoints do the gradients explain that were collected at checkpoints?

D = W_b − W_a is known, and so is G_c, the mean gradient of the data at each checkpoint c. D is projected onto the span of some G_c: the best
scales s in D ≈ −Σ s_c G_c. The explained fraction is 1 − ‖rest‖² / ‖D‖². Of plain gradient descent whose gradients did not turn, it is 1,
and s is the learning rate times the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch
from torch import Tensor

from dualform.dual.coefficients import recorded_updates
from dualform.dual.gradients import Replayed
from dualform.errors import NotRecordedError, QuestionError
from dualform.progress import Progress, report
from dualform.query.explained_by_rows import fit_rows, fraction
from dualform.query.influence.estimate import loss_mean_of, told_loss_mean
from dualform.query.network import check_all_outputs
from dualform.store.collection import Span, collection_of, spans_of
from dualform.store.reader import Store
from dualform.store.unkept import require_gradients

EVERYTHING = "all parameters"

Weights = Mapping[str, Tensor]
WeightsAt = Callable[[int], Weights]
"""The model's weights after so many batches."""


@dataclass(frozen=True)
class ExplainedMovement:
    """The answer of `Dual.explained`."""

    frame: pl.DataFrame
    """One line for each parameter, and one for all of them:

    movement: ‖W_b − W_a‖; by_first, by_last, by_all: the fraction of its square that is explained by the gradient at the first checkpoint, at the
    last, at all of them together, with the best scale for each; residual: the norm of what by_all leaves; by_rows: the fraction explained
    with a scale for each row at the first checkpoint, where that was tried; chance: what that would explain of a random movement.
    """
    scales: pl.DataFrame
    """One line for each parameter and checkpoint: the scale of its mean gradient in by_all; of gradient descent learning rate × steps."""
    first: str
    last: str

    def __str__(self) -> str:
        names = self.frame["parameter"].to_list()
        width = max(len(name) for name in names)
        lines = [f"what collected gradients explain of the movement from {self.first!r} to {self.last!r}"]
        lines.append(f"{'parameter':<{width}}  movement  by first  by last   by all  residual  by rows (chance)")
        lines += [_line(row, width) for row in self.frame.to_dicts()]
        return "\n".join(lines)

    __repr__ = __str__


def _line(row: Mapping[str, Any], width: int) -> str:
    cells = [
        f"{row['parameter']:<{width}}",
        f"{row['movement']:8.3g}",
        f"{row['by_first']:8.1%}",
        f"{row['by_last']:7.1%}",
        f"{row['by_all']:7.1%}",
        f"{row['residual']:8.3g}",
    ]
    if row["by_rows"] is not None:
        cells.append(f"{row['by_rows']:8.1%} ({row['chance']:.1%})")
    return "  ".join(cells)


def explain_movement(
    store: Store,
    end: int,
    weights_at: WeightsAt,
    first: int,
    last: int,
    *,
    rows: bool,
    progress: Progress | None,
) -> ExplainedMovement:
    """Return how much of the movement between two checkpoints, by their numbers, is explained."""
    spans = _spans_between(store, end, first, last)
    before = weights_at(spans[0].end)
    after = weights_at(spans[-1].end)
    lines = []
    scales = []
    for parameter in report("explaining", store.manifest.parameters, progress):
        name = parameter.name
        movement = after[name].double() - before[name].double()
        gradients = torch.stack([_mean_gradient(store, name, span) for span in spans])
        fitted = _fit(movement, gradients)
        line = {"parameter": name, **fitted.fractions}
        if rows:
            line |= fit_rows(store, name, movement, spans[0])
        lines.append(line)
        for span, scale in zip(spans, fitted.scales.tolist(), strict=True):
            scales.append({"parameter": name, "checkpoint": span.checkpoint, "scale": scale})
    lines.append(_added(lines))
    return ExplainedMovement(
        frame=pl.DataFrame(lines, schema=_SCHEMA),
        scales=pl.DataFrame(scales, schema=_SCALES_SCHEMA),
        first=_name(store, spans[0]),
        last=_name(store, spans[-1]),
    )


def _name(store: Store, span: Span) -> str:
    collection = collection_of(store)
    assert collection is not None
    return collection.checkpoints[span.checkpoint]


NUMBERS = ("movement", "by_first", "by_last", "by_all", "residual", "by_rows", "chance")
_SCHEMA = {"parameter": pl.String} | dict.fromkeys(NUMBERS, pl.Float64)
_SCALES_SCHEMA = {"parameter": pl.String, "checkpoint": pl.Int64, "scale": pl.Float64}


def _spans_between(store: Store, end: int, first: int, last: int) -> list[Span]:
    if collection_of(store) is None:
        raise NotRecordedError(
            f"{store.location} was recorded during training: verify() says what its slots explain, which is all of it."
        )
    if store.manifest.keep == "keys":
        raise NotRecordedError(
            f'explained() needs error signals, but {store.location} keeps keys only. Collect with keep="slots".'
        )
    require_gradients(store, "explained()")
    spans = spans_of(store, end)
    if len(spans) < 2:
        raise QuestionError(
            f"explained() compares checkpoints, and {store.location} has {len(spans)}. Collect at two or more: checkpoints=[…]."
        )
    begin = _place("first", first, len(spans))
    stop = _place("last", last, len(spans))
    if begin >= stop:
        raise QuestionError(f"first={first!r}, last={last!r}: expected an earlier checkpoint, and a later one.")
    return spans[begin : stop + 1]


def _place(argument: str, number: int, count: int) -> int:
    """Return the place of a checkpoint; negative numbers count from the end."""
    if not -count <= number < count:
        raise QuestionError(f"{argument}={number!r}: expected the number of a checkpoint, 0 to {count - 1}.")
    return number % count


# The gradients of all data


def _mean_gradient(store: Store, parameter: str, span: Span) -> Tensor:
    """Return the mean over rows (tokens, where the loss is a mean over them) of the gradients at a checkpoint."""
    check_all_outputs(store, parameter, "explained()")
    updates = recorded_updates(store, parameter, begin=span.begin, end=span.end)
    replayed = Replayed(store, updates)
    divisors = _divisors(store, parameter, span)
    memory = replayed.sum()
    total = torch.zeros(*replayed.shape, dtype=torch.float64)
    for place, step in enumerate(updates.steps.tolist()):
        total += divisors.get(step, 1.0) * replayed(replayed.read(place), memory)
    if told_loss_mean(store) == "none":
        return total / store.rows.filter(pl.col("step").is_between(span.begin, span.end, closed="left")).height
    return total / sum(divisors.values())


def _divisors(store: Store, parameter: str, span: Span) -> dict[int, float]:
    """Return by what the loss of each batch was divided."""
    loss_mean = loss_mean_of(store, told_loss_mean(store))
    found: dict[int, float] = {}
    for layer in store.users(parameter):
        for chunk in store.addresses(layer.name, begin_step=span.begin):
            steps = chunk.blocks[:, 0].tolist()
            found |= dict(zip(steps, loss_mean.of_blocks(chunk).tolist(), strict=True))
    return {step: divisor for step, divisor in found.items() if span.begin <= step < span.end}


@dataclass(frozen=True)
class _Fitted:
    """A movement, projected onto gradients."""

    fractions: dict[str, float]
    scales: Tensor
    """(checkpoints,)"""


def _fit(movement: Tensor, gradients: Tensor) -> _Fitted:
    """gradients: (checkpoints, *shape)."""
    flat = gradients.flatten(1)
    square = float(movement.square().sum())
    along = flat @ movement.flatten()
    gram = flat @ flat.T
    # Gradients that are alike leave their scales open; the smallest are taken
    scales = -torch.linalg.pinv(gram, hermitian=True) @ along
    by_all = fraction(-float(along @ scales), square)
    fractions = {
        "movement": math.sqrt(square),
        "by_first": _by_one(along[0], gram[0, 0], square),
        "by_last": _by_one(along[-1], gram[-1, -1], square),
        "by_all": by_all,
        "residual": math.sqrt(square * (1 - by_all)),
    }
    return _Fitted(fractions, scales)


def _by_one(along: Tensor, size: Tensor, square: float) -> float:
    explained = float(along**2 / size) if float(size) else 0.0
    return fraction(explained, square)


def _added(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the line of all parameters together."""
    table = pl.DataFrame(lines, schema=_SCHEMA)
    squares = table["movement"] ** 2
    square = float(squares.sum())
    found: dict[str, Any] = {"parameter": EVERYTHING, "movement": math.sqrt(square)}
    for name in ("by_first", "by_last", "by_all"):
        explained = float((table[name] * squares).sum())
        found[name] = fraction(explained, square)
    found["residual"] = math.sqrt(float((table["residual"] ** 2).sum()))
    return found
