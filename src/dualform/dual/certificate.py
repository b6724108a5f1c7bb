"""The certificate: is each parameter what its slots say it is?

gap = ‖dual − primal‖ / ‖W_T − W_0‖. Training rounds at every step, so even an ideal dual differs by about
u·√updates·‖W‖, the rounding floor. A parameter passes if its gap is below the tolerance of its type, or if the
distance is within 4 floors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch
from torch import Tensor

from dualform.dual.gradients import kept_rows
from dualform.dual.side_by_side import each_rebuilt
from dualform.dual.tolerance import TOLERANCE, tolerance
from dualform.dual.totals import find
from dualform.dual.weights import rebuilt
from dualform.errors import NotRecordedError
from dualform.store.reader import Store

FLOORS = 4

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and how much there is."""


@dataclass(frozen=True)
class Certificate:
    """The answer of `verify`: one line for each parameter."""

    frame: pl.DataFrame
    step: int
    """The moment of training that was checked."""
    compared_with: str
    """Where the primal weights come from."""

    @property
    def passed(self) -> bool:
        """Whether every parameter passes."""
        return bool((self.frame["verdict"] == "pass").all())

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
        return "\n".join(lines)

    __repr__ = __str__


def verify(store: Store, end: int, progress: Progress | None = None, workers: int = 1) -> Certificate:
    """Compare each parameter of the dual at `end` with the weights that training left there."""
    snapshots = [step for step in store.snapshot_steps() if step <= end]
    nearest = snapshots[-1]
    if nearest == 0 and end > 0:
        compared = "nothing: the store has no snapshot of the weights between the beginning and this step"
    elif nearest == end:
        compared = "the stored weights"
    elif store.manifest.ended is None and end == store.end_step:
        end, compared = nearest, "the last stored weights (the recording did not end by itself)"
    else:
        compared = f"weights rebuilt from the snapshot at step {nearest}"
    lines, duals = [], _duals(store, end, workers)
    for number, parameter in enumerate(store.manifest.parameters):
        if progress is not None:
            progress("verifying", number, len(store.manifest.parameters))
        dual = next(duals)
        primal = None if compared.startswith("nothing") else _primal(store, parameter.name, nearest, end)
        lines.append(_line(store, parameter.name, dual, primal, end))
    if progress is not None:
        progress("verifying", len(store.manifest.parameters), len(store.manifest.parameters))
    return Certificate(pl.DataFrame(lines, schema=_SCHEMA), end, compared)


_SCHEMA: dict[str, Any] = {
    "parameter": pl.String,
    "layer": pl.String,
    "updates": pl.Int64,
    "gap": pl.Float64,
    "distance": pl.Float64,
    "floor": pl.Float64,
    "movement": pl.Float64,
    "residual": pl.Float64,
    "verdict": pl.String,
    "reason": pl.String,
}


def not_finite_from(store: Store, parameter: int, end: int) -> int | None:
    """The first step in which a parameter's gradient was not finite, or None."""
    here = (pl.col("parameter") == parameter) & pl.col("residual").is_nan() & (pl.col("step") < end)
    step = store.updates.filter(here)["step"].min()
    return step if isinstance(step, int) else None


def _duals(store: Store, end: int, workers: int) -> Iterator[Tensor]:
    """The dual of each parameter, from the beginning of training."""
    names = [parameter.name for parameter in store.manifest.parameters]
    if store.manifest.keep != "totals":
        yield from each_rebuilt(store, names, end=end, workers=workers)
        return
    view = find(store, (), end, deltas=True, subset=True)
    if view is None:
        moment = store.manifest.totals.step if store.manifest.totals else 0
        raise NotRecordedError(
            f"{store.folder} keeps totals only, as they were after step {moment}"
            + (f", not after step {end}." if moment != end else ", and of the keys only: there is nothing to verify.")
            + ' Record with keep="slots", or with totals that have deltas.'
        )
    yield from map(view.rebuilt, names)


def _primal(store: Store, parameter: str, nearest: int, end: int) -> Tensor:
    if nearest != end:
        return rebuilt(store, parameter, begin=nearest, end=end)
    return _stored(store, parameter, end)


def _stored(store: Store, parameter: str, step: int) -> Tensor:
    """A parameter as a snapshot has it: those rows of it whose error signals were kept."""
    rows, value = kept_rows(store, parameter), store.snapshot(step)[f"model.{parameter}"].double()
    return value if rows is None else rows.of(value)


def _line(store: Store, name: str, dual: Tensor, primal: Tensor | None, end: int) -> dict[str, str | int | float]:
    layers = [layer.name for layer in store.users(name)]
    described = store.manifest.parameters[store.parameter(name)]
    mine = store.updates.filter((pl.col("parameter") == store.parameter(name)) & (pl.col("step") < end))
    first = _stored(store, name, 0)
    reached = dual if primal is None else primal
    movement = float((reached - first).norm())
    distance = math.nan if primal is None else float((dual - primal).norm())
    unit = torch.finfo(getattr(torch, described.dtype)).eps / 2
    updates = end if store.manifest.keep == "totals" else mine.height  # totals do not count each parameter's updates
    floor = unit * math.sqrt(updates) * float(reached.norm())
    gap = distance / movement if movement else (0.0 if distance == 0 else math.inf)
    coarse = "autocast" in mine.columns and mine["autocast"].drop_nulls().len() > 0
    allowed = max(tolerance(store, name), TOLERANCE["float16"] if coarse else 0.0)
    verdict, reason = _judge(gap, distance, floor, allowed, movement)
    if coarse and verdict == "pass":
        reason += " (autocast: its gradients were rounded to 16 bits)"
    lost = not_finite_from(store, store.parameter(name), end)
    mark = next((store.manifest.inexact[layer] for layer in layers if layer in store.manifest.inexact), None)
    if lost is not None:
        verdict, reason = "fail", f"its gradient is not finite from step {lost} on"
    elif mark is not None and mark.step < end:
        verdict, reason = "inexact", f"from step {mark.step} on: {mark.why}"
    elif primal is None:
        verdict, reason = "unknown", "there are no weights to compare with"
    rows = kept_rows(store, name)
    if rows is not None and verdict == "pass":
        reason += f" ({len(rows.places)} of {described.shape[0]} rows: outputs=)"
    residuals = mine["residual"].drop_nans()
    return {
        "parameter": name,
        "layer": " + ".join(layers),
        "updates": updates,
        "gap": gap,
        "distance": distance,
        "floor": floor,
        "movement": movement,
        "residual": float(residuals.max() or 0.0) if len(residuals) else 0.0,  # type: ignore[arg-type]
        "verdict": verdict,
        "reason": reason,
    }


def _judge(gap: float, distance: float, floor: float, allowed: float, movement: float) -> tuple[str, str]:
    if math.isnan(distance):
        return "fail", "it is not finite"
    if movement == 0 and distance == 0:
        return "pass", "it did not move"
    if gap <= allowed:
        return "pass", f"gap ≤ {allowed:.0e}"
    if distance <= FLOORS * floor:
        return "pass", f"within {FLOORS} rounding floors"
    return (
        "fail",
        f"gap above {allowed:.0e} and {distance / floor:.0f} rounding floors" if floor else "it moved",
    )
