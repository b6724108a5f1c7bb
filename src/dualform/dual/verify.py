"""Compare each parameter with its dual: is it what its slots say it is?

gap = ‖dual − primal‖ / ‖W_T − W_0‖. Training rounds at every step, so even an ideal dual differs. The rounding floor
(dual/rounding.py) is how far rounding may have moved a parameter in this run; it passes if ‖dual − primal‖ is within 4 floors.

The final weights say little about a single slot, so the slots of each update must also give a gradient of the size that the recorder
saw (dual/gradient_sizes.py).

A recording that was killed, or ended by an exception within optimizer.step(), has no copy of its last weights. Then what the
recorder stored of them after each step is compared: one number, their random projection.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dualform.dual.certificate import GRADIENTS, ROUNDED, ROW_SCHEMA, SCHEMA, Certificate
from dualform.dual.coefficients import not_replayed, update_table
from dualform.dual.gradient_sizes import projection_of, wrong_size
from dualform.dual.gradients import compute_dtype, description
from dualform.dual.masked import masked_by_groups, rebuild_each
from dualform.dual.rounding import SIXTEEN_BITS, Floor, full_floor, roundoff, weights_floor
from dualform.dual.rows import kept_rows
from dualform.dual.totals import find_totals
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
PROJECTED_STEPS = 8
"""Weights are compared by their projections at this many steps, since a single number tells little."""
PROJECTION_ROUNDING = 8.0
"""A projection itself may be off by this many roundoffs of the weights."""

Line = dict[str, str | int | float]
"""One line of the certificate."""


def verify(store: Store, end: int, progress: Progress | None = None, workers: int = 1) -> Certificate:
    """Compare each parameter of the dual at `end` with the weights that training left there."""
    names = [parameter.name for parameter in store.manifest.parameters]
    optimizers = not_replayed(store, end)
    unkept = _not_kept(store, names)
    primal = _find_primal(store, end, has_rebuilt=len(unkept) < len(names))
    summed = [name for name in names if name not in optimizers and name not in unkept]
    duals = _duals(store, summed, end, workers)
    lines = []
    for name in report("verifying", names, progress):
        check = _Check(store, name, end)
        if name in unkept:
            lines.append(check.trust_the_audit(unkept[name]))
        elif name in optimizers:
            lines.append(check.compare_gradients(optimizers[name]))
        elif primal.snapshot is None:
            lines.append(check.compare_projections())
        else:
            lines.append(check.compare_weights(next(duals), primal.snapshot))
    return Certificate(pl.DataFrame(lines, schema=SCHEMA), end, primal.described, _row_evidence(store))


@dataclass(frozen=True)
class _Primal:
    """What the dual at some step is compared with."""

    snapshot: int | None
    """The snapshot that the trained weights come from; None: there is none, and projections are compared."""
    described: str


def _find_primal(store: Store, end: int, *, has_rebuilt: bool) -> _Primal:
    """has_rebuilt: whether the gradients of any parameter can be put together again."""
    collection = collection_of(store)
    if collection is not None:
        return _Primal(None, f"the gradients of its batches ({collection})")
    nearest = max(step for step in store.snapshot_steps() if step <= end)
    if nearest == end:
        return _Primal(nearest, "the stored weights")
    is_the_end = end == store.end_step  # killed, or ended within optimizer.step()
    if (is_the_end or nearest == 0) and has_rebuilt and store.manifest.keep not in ("keys", "totals"):
        why = "the weights of the last step are not stored" if is_the_end else "there is no later snapshot"
        return _Primal(None, f"projections of the weights, stored after each step ({why})")
    return _Primal(nearest, f"weights rebuilt from the snapshot at step {nearest}")


def _not_kept(store: Store, names: list[str]) -> dict[str, str]:
    """Return the parameters whose gradients cannot be computed again from what is kept of their slots, with the reason."""
    if store.manifest.keep in ("keys", "totals"):
        return {}
    reasons = {name: why_not_rebuilt(store, name) for name in names}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _row_evidence(store: Store) -> pl.DataFrame:
    by_layer = store.manifest.rows
    lines = [{"layer": layer, **dataclasses.asdict(evidence)} for layer, evidence in by_layer.items()]
    return pl.DataFrame(lines, schema=ROW_SCHEMA)


def _duals(store: Store, names: list[str], end: int, workers: int) -> Iterator[Tensor]:
    """Rebuild each of these parameters from the beginning of training."""
    if store.manifest.keep != "totals":
        yield from rebuild_each(store, names, end=end, workers=workers)
        return
    view = find_totals(store, (), end, deltas=True, subset=True)
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


def not_finite_from(store: Store, parameter: int, end: int) -> int | None:
    """Return the first step in which a parameter's gradient was not finite, or None."""
    is_lost = (pl.col("parameter") == parameter) & pl.col("residual").is_nan() & (pl.col("step") < end)
    step = store.updates.filter(is_lost)["step"].min()
    return step if isinstance(step, int) else None


@dataclass(frozen=True)
class _Comparison:
    """A dual beside what it is compared with."""

    distance: float
    """‖dual − primal‖"""
    movement: float
    """‖primal − first‖"""
    size: float
    """The larger norm of the first and the last weights."""
    begin: int
    """From which step on the dual was rebuilt."""
    primal_rounding: float = 0.0
    """How far the primal itself may be off."""
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

    def judge(self, floor: Floor) -> _Verdict:
        """Return whether rounding explains the distance."""
        if math.isnan(self.distance):
            return _Verdict("fail", "it is not finite")
        if self.movement == 0 and self.distance == 0:
            return _Verdict("pass", "it did not move")
        if self.distance <= self.allowed * floor.total:
            return _Verdict("pass", f"within {self.allowed} rounding floors")
        if self.gap <= NO_GAP:
            return _Verdict("pass", f"the gap is below {NO_GAP:g}")
        if not floor.total:
            return _Verdict("fail", "it moved")
        floors = self.distance / floor.total
        return _Verdict("fail", f"{floors:.1f} rounding floors ({floor}); {self.allowed} are allowed")


UNKNOWN = _Comparison(distance=math.nan, movement=math.nan, size=math.nan, begin=0)
"""Where no sum can be compared."""


class _Verdict(NamedTuple):
    verdict: str
    reason: str


def _norm(tensor: Tensor) -> float:
    return float(tensor.norm())


class _Check:
    """Compares one parameter with its dual at some step. Each `compare_…` returns the parameter's line of the certificate."""

    def __init__(self, store: Store, name: str, end: int):
        self._store = store
        self._name = name
        self._end = end
        self._updates = update_table(store, name, 0, end)
        self._dtype: str = description(store, name).dtype

    def trust_the_audit(self, why: str) -> Line:
        """Compare nothing: what is kept of the slots makes up no gradient, but the recorder audited them before it dropped the rest."""
        reason = f"its slots explained every gradient when they were recorded (the audit); {why}, so no sum was checked"
        verdict = self._known_problem() or _Verdict(GRADIENTS, reason)
        return self._line(UNKNOWN, math.nan, verdict)

    def compare_gradients(self, optimizer: str) -> Line:
        """Compare gradients only: without coefficients there is no sum, but the slots must explain every gradient."""
        problem = self._known_problem()
        wrong = self._wrong_size() if problem is None else None
        why = f"the updates of {optimizer} cannot be replayed"
        if collection_of(self._store) is not None:
            why = "nothing was trained, so there is no sum to verify"
        explained = _Verdict(GRADIENTS, f"its slots explain every gradient; {why}")
        return self._line(UNKNOWN, math.nan, problem or wrong or explained)

    def compare_weights(self, dual: Tensor, snapshot: int) -> Line:
        """Compare the dual with the trained weights, stored at `end` or rebuilt from an earlier snapshot."""
        if snapshot == self._end:
            primal = self._stored(snapshot)
        else:
            primal = rebuilt(self._store, self._name, begin=snapshot, end=self._end)
        first = self._stored(0)
        comparison = _Comparison(
            distance=_norm(dual - primal),
            movement=_norm(primal - first),
            size=max(_norm(primal), _norm(first)),
            begin=0,
        )
        return self._judged(comparison)

    def compare_projections(self) -> Line:
        """Compare projections at some steps after the last snapshot, the last step among them."""
        begin = max(step for step in self._store.snapshot_steps() if step <= self._end)
        has_projection = pl.col("after").is_not_null() & (pl.col("step") >= begin)
        known = self._updates.filter(has_projection).select("step", "after")
        spread = np.linspace(0, max(0, known.height - 1), PROJECTED_STEPS)
        places = np.unique(spread.round().astype(int)).tolist() if known.height else []
        projection = projection_of(self._store, self._name)
        first = self._stored(begin)
        squares = []
        dual = first
        for place in places:
            step, after = known.row(place)
            dual = rebuilt(self._store, self._name, begin=begin, end=step + 1)
            difference = projection.fingerprint(projection.project(dual.double())) - after
            # Each column of R adds ‖dual − primal‖² to the mean square of the difference
            squares.append(difference**2 / projection.columns)
        comparison = _Comparison(
            distance=math.sqrt(sum(squares) / len(squares)) if squares else 0.0,
            movement=_norm(dual - first),
            size=max(_norm(dual), _norm(first)),
            begin=begin,
            primal_rounding=PROJECTION_ROUNDING * roundoff(self._dtype) * _norm(dual),
            allowed=PROJECTED_FLOORS,
        )
        return self._judged(comparison)

    def _stored(self, step: int) -> Tensor:
        """Return the parameter as a snapshot has it: those rows of it whose error signals were kept."""
        rows = kept_rows(self._store, self._name)
        value = self._store.snapshot(step)[f"model.{self._name}"].double()
        return value if rows is None else rows.of(value)

    # Verdicts

    def _judged(self, comparison: _Comparison) -> Line:
        floor = self._floor(comparison)
        verdict = self._known_problem() or comparison.judge(floor)
        if verdict.verdict == "pass":
            verdict = self._wrong_size() or self._qualified(verdict, comparison)
        return self._line(comparison, floor.total, verdict)

    def _known_problem(self) -> _Verdict | None:
        """Return a verdict that is known from what the recorder wrote down, without any comparison."""
        lost = not_finite_from(self._store, self._store.parameter(self._name), self._end)
        if lost is not None:
            return _Verdict("fail", f"its gradient is not finite from step {lost} on")
        marks = [self._store.manifest.inexact.get(layer.name) for layer in self._store.users(self._name)]
        mark = next((mark for mark in marks if mark is not None), None)
        if mark is not None and mark.step < self._end:
            return _Verdict("inexact", f"from step {mark.step} on: {mark.why}")
        return None

    def _wrong_size(self) -> _Verdict | None:
        wrong = wrong_size(self._store, self._name, self._end)
        return None if wrong is None else _Verdict("fail", str(wrong))

    def _qualified(self, passed: _Verdict, comparison: _Comparison) -> _Verdict:
        """Return the verdict on a parameter that passes, with what a reader should know of it."""
        if self._dtype in SIXTEEN_BITS and comparison.distance > 0:
            reason = (
                f"its slots explain every gradient and {comparison.explained:.0%} of its movement; rounding to {self._dtype} is the "
                f"rest: keep the weights in float32 and train under autocast"
            )
            return _Verdict(ROUNDED, reason)
        reason = passed.reason
        if "autocast" in self._updates.columns and self._updates["autocast"].drop_nulls().len():
            reason += " (autocast: its gradients were rounded to 16 bits)"
        rows = kept_rows(self._store, self._name)
        if rows is not None:
            height = description(self._store, self._name).shape[0]
            reason += f" ({len(rows.places)} of {height} rows: outputs=)"
        return _Verdict("pass", reason)

    # Tolerance

    @property
    def _update_count(self) -> int:
        # Totals do not count each parameter's updates
        return self._end if self._store.manifest.keep == "totals" else self._updates.height

    def _floor(self, comparison: _Comparison) -> Floor:
        """Return the rounding floor. The cheap part comes first; the rest walks through training, so it is added only if it matters."""
        weights = weights_floor(self._dtype, self._update_count, comparison.size)
        if comparison.primal_rounding:
            weights = Floor(math.hypot(weights.weights, comparison.primal_rounding))
        if self._store.manifest.keep == "totals":
            return Floor(weights.weights, gradients=self._rounding_of_totals(comparison))
        if not math.isfinite(comparison.distance) or comparison.distance <= comparison.allowed * weights.total:
            return weights
        floor = full_floor(self._store, self._name, comparison.begin, self._end, weights)
        if comparison.distance <= comparison.allowed * floor.total:
            return floor
        return full_floor(self._store, self._name, comparison.begin, self._end, weights, is_worst=True)

    def _rounding_of_totals(self, comparison: _Comparison) -> float:
        """Return how far the rounding of gradients and of their sums by group may have moved the parameter.

        No residuals are kept with totals.
        """
        own = torch.finfo(compute_dtype(self._store, self._name)).eps / 2
        unit = max(own, roundoff(self._store.manifest.dtype))
        of_gradients = TOTALS_ROUNDING * unit * comparison.movement
        view = find_totals(self._store, (), self._end, deltas=True, subset=True)
        if view is None:
            return of_gradients
        # What groups wrote may be far larger than their sum, and each update rounds it
        sizes = [_norm(delta.double()) for delta in view.deltas(self._name)]
        of_groups = own * math.sqrt(self._update_count) * math.hypot(*sizes)
        return math.hypot(of_gradients, of_groups, view.rounding_of_gradients(self._name))

    def _line(self, comparison: _Comparison, floor: float, verdict: _Verdict) -> Line:
        residuals = self._updates["residual"].drop_nans()
        largest: Any = residuals.max()
        return {
            "parameter": self._name,
            "layer": " + ".join(layer.name for layer in self._store.users(self._name)),
            "updates": self._update_count,
            "gap": comparison.gap,
            "distance": comparison.distance,
            "floor": floor,
            "movement": comparison.movement,
            "explained": comparison.explained,
            "residual": float(largest or 0.0),
            **verdict._asdict(),
        }
