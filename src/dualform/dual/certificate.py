"""The certificate: is each parameter what its slots say it is?

gap = ‖dual − primal‖ / ‖W_T − W_0‖. Training rounds at every step, so even an ideal dual differs. How much is computed from
what is known of the run, the rounding floor (dual/rounding.py); a parameter passes if ‖dual − primal‖ is within 4 floors.

The weights at the end tell little about a single slot. So the slots of each update must also give a gradient of the size that the recorder has
seen (dual/gradient_sizes.py).

A recording that was killed, or ended by an exception within optimizer.step(), has no copy of its last weights. Then what the
recorder stored of them after each step is compared: one number, their random projection.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.dual.coefficients import not_replayed, update_table
from dualform.dual.gradient_sizes import projection_of, wrong_size
from dualform.dual.gradients import compute_dtype, description
from dualform.dual.masked import masked_by_groups, rebuild_each
from dualform.dual.published import Published
from dualform.dual.rounding import SIXTEEN_BITS, Floor, full_floor, roundoff, weights_floor
from dualform.dual.rows import kept_rows
from dualform.dual.totals import find
from dualform.dual.weights import rebuilt
from dualform.errors import NotRecordedError
from dualform.progress import Progress, report
from dualform.store.collection import collection_of
from dualform.store.reader import Store
from dualform.store.unkept import why_not_rebuilt

NO_GAP = 1e-13
"""A gap below this is rounding in float64, whatever the optimizer has made of it; no change of a slot is as small."""
FLOORS = 4
"""A parameter may differ from its dual by this many rounding floors."""
PROJECTED_FLOORS = 6
"""The same where a few projections are compared: single random numbers are more often far from their size."""
TOTALS_ROUNDING = 64.0
"""Where slots were summed and not kept, gradients may be off by this many roundoffs of the parameter's movement."""

GRADIENTS = "gradients"
"""The verdict on parameters whose optimizer cannot be replayed, or whose slots were not kept: they explain every gradient, and no sum was checked."""
ROUNDED = "rounded"
"""The verdict on 16-bit parameters whose distance from the dual is rounding, which may be as large as what training did to them."""
PASSING = ("pass", GRADIENTS, ROUNDED)
"""The verdicts of parameters that nothing is wrong with."""


@dataclass(frozen=True)
class Certificate:
    """The answer of `verify`: one line for each parameter."""

    frame: pl.DataFrame
    step: int
    """The moment of training that was checked."""
    compared_with: str
    """Where the primal weights come from."""
    rows: pl.DataFrame
    """How it is known which row a slot belongs to, one line for each layer: where the rows are in its input, at which step that was
    proved, from which step on it is assumed, and why."""
    published: Published | None = None
    """The weights beside those of a published checkpoint, if one was given."""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong with any parameter. Not every one need be equal to its dual: see `frame["verdict"]`."""
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """The parameters that something is wrong with."""
        names: list[str] = self.frame.filter(~pl.col("verdict").is_in(PASSING))["parameter"].to_list()
        return names

    def to_json(self) -> str:
        """For scripts."""
        rows: list[dict[str, Any]] = self.frame.to_dicts()
        for row in rows:
            row.update({k: None for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)})
        return json.dumps(
            {
                "passed": self.passed,
                "step": self.step,
                "compared_with": self.compared_with,
                "parameters": rows,
                "rows": self.rows.to_dicts(),
                "published": None if self.published is None else self.published.frame.to_dicts(),
            },
            indent=1,
        )

    def __str__(self) -> str:
        names = self.frame["parameter"].to_list()
        width = max([len(name) for name in names] + [9])
        lines = [f"after step {self.step}, against {self.compared_with}"]
        lines.append(f"{'parameter':<{width}}      gap    floor  movement  verdict")
        lines += [
            f"{row['parameter']:<{width}}  {row['gap']:7.1e}  {row['floor']:7.1e}  {row['movement']:8.2e}  "
            f"{row['verdict']}: {row['reason']}"
            for row in self.frame.to_dicts()
        ]
        published = [] if self.published is None else [str(self.published)]
        return "\n".join([*lines, *self._about_rows(), *published])

    def _about_rows(self) -> list[str]:
        """How the names of slots are known: sums cannot show that."""
        if self.rows.is_empty():
            return ["rows: nothing to prove, no batch had several"]
        said: dict[str, list[str]] = {}
        for row in self.rows.to_dicts():
            if row["proved"] is not None:
                said.setdefault(f"proved at step {row['proved']}{{}}", []).append(row["layer"])
            if row["assumed"] is not None:
                said.setdefault(f"assumed from step {row['assumed']} on{{}}, because {row['why']}", []).append(
                    row["layer"]
                )
        every = self.rows.height
        lines = []
        for text, layers in said.items():
            which = "" if len(layers) == every else f" for {', '.join(map(repr, layers))}"
            lines.append(f"rows: {text.format(which)}")
        return lines

    __repr__ = __str__


def verify(store: Store, end: int, progress: Progress | None = None, workers: int = 1) -> Certificate:
    """Compare each parameter of the dual at `end` with the weights that training left there."""
    moment = _moment_to_compare(store, end)
    names = [parameter.name for parameter in store.manifest.parameters]
    optimizers = not_replayed(store, end)
    unkept = {}
    if store.manifest.keep not in ("keys", "totals"):
        unkept = {name: reason for name in names if (reason := why_not_rebuilt(store, name)) is not None}
    summed = [name for name in names if name not in optimizers and name not in unkept]
    duals = _duals(store, summed, end, workers)
    lines = []
    for name in report("verifying", names, progress):
        if name in unkept:
            lines.append(_audited_line(store, name, end, unkept[name]))
        elif name in optimizers:
            lines.append(_line_of_gradients(store, name, end, optimizers[name]))
        elif moment.snapshot is None:
            lines.append(_projected_line(store, name, end))
        else:
            lines.append(_line(store, name, next(duals), _primal(store, name, moment.snapshot, end), end))
    return Certificate(pl.DataFrame(lines, schema=_SCHEMA), end, moment.compared_with, _row_evidence(store))


@dataclass(frozen=True)
class _Moment:
    """What the dual at some step is compared with."""

    snapshot: int | None
    """The snapshot that the trained weights come from; None: there is none, and projections are compared."""
    compared_with: str


def _moment_to_compare(store: Store, end: int) -> _Moment:
    collection = collection_of(store)
    if collection is not None:
        return _Moment(None, f"the gradients of its batches ({collection})")
    nearest = max(step for step in store.snapshot_steps() if step <= end)
    if nearest == end:
        return _Moment(nearest, "the stored weights")
    is_the_end = end == store.end_step  # killed, or ended within optimizer.step()
    if (is_the_end or nearest == 0) and store.manifest.keeps_gradients:
        why = "the weights of the last step are not stored" if is_the_end else "there is no later snapshot"
        return _Moment(None, f"projections of the weights, stored after each step ({why})")
    return _Moment(nearest, f"weights rebuilt from the snapshot at step {nearest}")


def _row_evidence(store: Store) -> pl.DataFrame:
    known = store.manifest.rows
    lines = [{"layer": layer, **dataclasses.asdict(evidence)} for layer, evidence in known.items()]
    return pl.DataFrame(lines, schema=_ROW_SCHEMA)


_ROW_SCHEMA: dict[str, Any] = {
    "layer": pl.String,
    "where": pl.String,
    "proved": pl.Int64,
    "assumed": pl.Int64,
    "why": pl.String,
}


_SCHEMA: dict[str, Any] = {
    "parameter": pl.String,
    "layer": pl.String,
    "updates": pl.Int64,
    "gap": pl.Float64,
    "distance": pl.Float64,
    "floor": pl.Float64,
    "movement": pl.Float64,
    "explained": pl.Float64,
    "residual": pl.Float64,
    "verdict": pl.String,
    "reason": pl.String,
}


def not_finite_from(store: Store, parameter: int, end: int) -> int | None:
    """The first step in which a parameter's gradient was not finite, or None."""
    here = (pl.col("parameter") == parameter) & pl.col("residual").is_nan() & (pl.col("step") < end)
    step = store.updates.filter(here)["step"].min()
    return step if isinstance(step, int) else None


def _line_of_gradients(store: Store, name: str, end: int, optimizer: str) -> dict[str, str | int | float]:
    """Without coefficients there is no sum to compare with the weights, but its slots must explain every gradient."""
    unknown = _Comparison(distance=math.nan, movement=math.nan, size=math.nan, begin=0)
    problem = _problem(store, name, end)
    wrong = wrong_size(store, name, end) if problem is None else None
    if wrong is not None:
        problem = ("fail", str(wrong))
    why = f"the updates of {optimizer} cannot be replayed"
    if collection_of(store) is not None:
        why = "nothing was trained, so there is no sum to verify"
    explained = (GRADIENTS, f"its slots explain every gradient; {why}")
    return _as_line(store, name, end, unknown, math.nan, problem or explained)


def _audited_line(store: Store, name: str, end: int, why: str) -> dict[str, str | int | float]:
    """What is kept makes up no gradient, but the recorder has audited the slots before it let go of them."""
    unknown = _Comparison(distance=math.nan, movement=math.nan, size=math.nan, begin=0)
    audited = (
        GRADIENTS,
        f"its slots explained every gradient when they were recorded (the audit); {why}, so no sum was checked",
    )
    return _as_line(store, name, end, unknown, math.nan, _problem(store, name, end) or audited)


def _duals(store: Store, names: list[str], end: int, workers: int) -> Iterator[Tensor]:
    """The dual of each of these parameters, from the beginning of training."""
    if store.manifest.keep != "totals":
        yield from rebuild_each(store, names, end=end, workers=workers)
        return
    view = find(store, (), end, deltas=True, subset=True)
    if view is None:
        raise NotRecordedError(
            f'{_why_no_totals(store, end)} Record with keep="slots", or with totals that have deltas.'
        )
    for name in names:
        yield masked_by_groups(view, name)


def _why_no_totals(store: Store, end: int) -> str:
    totals = store.manifest.totals
    if totals is None:
        return f"{store.location} keeps totals only, and ended before any were written: there is nothing to verify."
    if totals.step != end:
        return f"{store.location} keeps totals only, as they were after step {totals.step}, not after step {end}."
    return f"{store.location} keeps totals only, and of the keys only: there is nothing to verify."


def _primal(store: Store, parameter: str, nearest: int, end: int) -> Tensor:
    if nearest != end:
        return rebuilt(store, parameter, begin=nearest, end=end)
    return _stored(store, parameter, end)


def _stored(store: Store, parameter: str, step: int) -> Tensor:
    """A parameter as a snapshot has it: those rows of it whose error signals were kept."""
    rows = kept_rows(store, parameter)
    value = store.snapshot(step)[f"model.{parameter}"].double()
    return value if rows is None else rows.of(value)


def _line(store: Store, name: str, dual: Tensor, primal: Tensor, end: int) -> dict[str, str | int | float]:
    first = _stored(store, name, 0)
    found = _Comparison(
        distance=float((dual - primal).norm()),
        movement=float((primal - first).norm()),
        size=max(float(primal.norm()), float(first.norm())),
        begin=0,
    )
    return _judged(store, name, end, found)


PROJECTED_STEPS = 8
"""Weights are compared by their projections at this many steps, since a single number tells little."""
PROJECTION_ROUNDING = 8.0
"""A projection itself may be off by this many roundoffs of the weights."""


def _projected_line(store: Store, name: str, end: int) -> dict[str, str | int | float]:
    """Compare projections at some steps after the last snapshot, the last step among them."""
    begin = max(step for step in store.snapshot_steps() if step <= end)
    known = update_table(store, name, begin, end).filter(pl.col("after").is_not_null()).select("step", "after")
    spread = np.linspace(0, max(0, known.height - 1), PROJECTED_STEPS).round().astype(int)
    places = np.unique(spread).tolist() if known.height else []
    projection = projection_of(store, name)
    unit = roundoff(description(store, name).dtype)
    first = _stored(store, name, begin)
    squares = []
    dual = first
    for place in places:
        step, after = known.row(place)
        dual = rebuilt(store, name, begin=begin, end=step + 1)
        difference = projection.fingerprint(projection.project(dual.double())) - after
        # Each column of R adds ‖dual − primal‖² to the mean square of the difference
        squares.append(difference**2 / projection.columns)
    found = _Comparison(
        distance=math.sqrt(sum(squares) / len(squares)) if squares else 0.0,
        movement=float((dual - first).norm()),
        size=max(float(dual.norm()), float(first.norm())),
        begin=begin,
        own_rounding=PROJECTION_ROUNDING * unit * float(dual.norm()),
        allowed=PROJECTED_FLOORS,
    )
    return _judged(store, name, end, found)


@dataclass(frozen=True)
class _Comparison:
    """A dual beside what it is compared with."""

    distance: float
    movement: float
    size: float
    begin: int
    """From which step on the dual was rebuilt."""
    own_rounding: float = 0.0
    """Of what it is compared with."""
    allowed: int = FLOORS
    """How many rounding floors the distance may be."""

    @property
    def explained(self) -> float:
        """The part of the movement that the dual explains, from 0 to 1."""
        return max(0.0, 1 - self.gap**2) if math.isfinite(self.gap) else 0.0

    @property
    def gap(self) -> float:
        if self.movement:
            return self.distance / self.movement
        return 0.0 if self.distance == 0 else math.inf


def _judged(store: Store, name: str, end: int, found: _Comparison) -> dict[str, str | int | float]:
    updates = _count_updates(store, name, end)
    floor = _floor(store, name, end, found, updates)
    verdict, reason = _verdict(store, name, end, found, floor)
    dtype = description(store, name).dtype
    if verdict == "pass" and dtype in SIXTEEN_BITS and found.distance > 0:
        verdict = ROUNDED
        reason = (
            f"its slots explain every gradient and {found.explained:.0%} of its movement; rounding to {dtype} is the rest: keep the weights "
            f"in float32 and train under autocast"
        )
    elif verdict == "pass":
        reason += _qualified(store, name, update_table(store, name, 0, end))
    return _as_line(store, name, end, found, floor.total, (verdict, reason))


def _count_updates(store: Store, name: str, end: int) -> int:
    # Totals do not count each parameter's updates
    return end if store.manifest.keep == "totals" else update_table(store, name, 0, end).height


def _as_line(
    store: Store, name: str, end: int, found: _Comparison, floor: float, judged: tuple[str, str]
) -> dict[str, str | int | float]:
    residuals = update_table(store, name, 0, end)["residual"].drop_nans()
    verdict, reason = judged
    return {
        "parameter": name,
        "layer": " + ".join(layer.name for layer in store.users(name)),
        "updates": _count_updates(store, name, end),
        "gap": found.gap,
        "distance": found.distance,
        "floor": floor,
        "movement": found.movement,
        "explained": found.explained,
        "residual": float(residuals.max() or 0.0) if len(residuals) else 0.0,  # type: ignore[arg-type]
        "verdict": verdict,
        "reason": reason,
    }


def _verdict(store: Store, name: str, end: int, found: _Comparison, floor: Floor) -> tuple[str, str]:
    """Return pass, fail or inexact, and why."""
    problem = _problem(store, name, end)
    if problem is not None:
        return problem
    verdict, reason = _judge(found, floor)
    wrong = wrong_size(store, name, end) if verdict == "pass" else None
    return (verdict, reason) if wrong is None else ("fail", str(wrong))


def _problem(store: Store, name: str, end: int) -> tuple[str, str] | None:
    """A verdict that is known from what the recorder wrote down, without any comparison."""
    lost = not_finite_from(store, store.parameter(name), end)
    if lost is not None:
        return "fail", f"its gradient is not finite from step {lost} on"
    marks = [store.manifest.inexact.get(layer.name) for layer in store.users(name)]
    mark = next((mark for mark in marks if mark is not None), None)
    if mark is not None and mark.step < end:
        return "inexact", f"from step {mark.step} on: {mark.why}"
    return None


def _qualified(store: Store, name: str, updates: pl.DataFrame) -> str:
    """Return what a reader should know of a parameter that passes."""
    text = ""
    if "autocast" in updates.columns and updates["autocast"].drop_nulls().len():
        text += " (autocast: its gradients were rounded to 16 bits)"
    rows = kept_rows(store, name)
    if rows is not None:
        height = description(store, name).shape[0]
        text += f" ({len(rows.places)} of {height} rows: outputs=)"
    return text


def _floor(store: Store, name: str, end: int, found: _Comparison, updates: int) -> Floor:
    """The rounding floor. That of the weights alone is known at once; the rest takes a walk through training, if it matters."""
    weights = weights_floor(description(store, name).dtype, updates, found.size)
    if found.own_rounding:
        weights = Floor(math.hypot(weights.weights, found.own_rounding))
    if store.manifest.keep == "totals":
        return Floor(weights.weights, gradients=_rounding_of_totals(store, name, end, found, updates))
    if not math.isfinite(found.distance) or found.distance <= found.allowed * weights.total:
        return weights
    floor = full_floor(store, name, found.begin, end, weights)
    if found.distance <= found.allowed * floor.total:
        return floor
    return full_floor(store, name, found.begin, end, weights, is_worst=True)


def _rounding_of_totals(store: Store, name: str, end: int, found: _Comparison, updates: int) -> float:
    """How far the rounding of gradients and of their sums by group may have moved a parameter. No residuals are kept with totals."""
    own = torch.finfo(compute_dtype(store, name)).eps / 2
    unit = max(own, roundoff(store.manifest.dtype))
    of_gradients = TOTALS_ROUNDING * unit * found.movement
    view = find(store, (), end, deltas=True, subset=True)
    if view is None:
        return of_gradients
    # What groups wrote may be far larger than their sum, and each update rounds it
    size = math.hypot(*(float(delta.double().norm()) for delta in view.deltas(name)))
    of_groups = own * math.sqrt(updates) * size
    return math.hypot(of_gradients, of_groups, view.rounding_of_gradients(name))


def _judge(found: _Comparison, floor: Floor) -> tuple[str, str]:
    if math.isnan(found.distance):
        return "fail", "it is not finite"
    if found.movement == 0 and found.distance == 0:
        return "pass", "it did not move"
    if found.distance <= found.allowed * floor.total:
        return "pass", f"within {found.allowed} rounding floors"
    if found.gap <= NO_GAP:
        return "pass", f"the gap is below {NO_GAP:g}"
    many = f"{found.distance / floor.total:.1f} rounding floors ({floor})" if floor.total else "it moved"
    return "fail", f"{many}; {found.allowed} are allowed" if floor.total else many
