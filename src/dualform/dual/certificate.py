"""The certificate: for each parameter, how far it is from its dual, and whether rounding explains that."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import polars as pl

from dualform.dual.published import Published

GRADIENTS = "gradients"
"""The verdict on parameters whose optimizer cannot be replayed, or whose slots were not kept: these explain every gradient, and no sum was checked."""
ROUNDED = "rounded"
"""The verdict on 16-bit parameters whose distance from the dual is rounding, which may be as large as what training did to them."""
PASSING = ("pass", GRADIENTS, ROUNDED)
"""The verdicts of parameters that nothing is wrong with."""

SCHEMA: dict[str, Any] = {
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
"""The columns of a certificate."""
ROW_SCHEMA: dict[str, Any] = {
    "layer": pl.String,
    "where": pl.String,
    "proved": pl.Int64,
    "assumed": pl.Int64,
    "why": pl.String,
}
"""The columns of its evidence on rows."""


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
        is_failed = ~pl.col("verdict").is_in(PASSING)
        names: list[str] = self.frame.filter(is_failed)["parameter"].to_list()
        return names

    def to_json(self) -> str:
        """Return the certificate as JSON, for scripts; numbers that are not finite are null."""
        parameters: list[dict[str, Any]] = self.frame.to_dicts()
        for line in parameters:
            not_finite = [name for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)]
            line.update(dict.fromkeys(not_finite))
        content = {
            "passed": self.passed,
            "step": self.step,
            "compared_with": self.compared_with,
            "parameters": parameters,
            "rows": self.rows.to_dicts(),
            "published": None if self.published is None else self.published.frame.to_dicts(),
        }
        return json.dumps(content, indent=1)

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
        lines += self._about_rows()
        if self.published is not None:
            lines.append(str(self.published))
        return "\n".join(lines)

    def _about_rows(self) -> list[str]:
        """Say how it is known which row each slot belongs to, one line for all layers with the same evidence."""
        if self.rows.is_empty():
            return ["rows: nothing to prove, no batch had several"]
        layers_by_evidence: dict[tuple[str, str], list[str]] = {}
        for row in self.rows.to_dicts():
            if row["proved"] is not None:
                evidence = (f"proved at step {row['proved']}", "")
                layers_by_evidence.setdefault(evidence, []).append(row["layer"])
            if row["assumed"] is not None:
                evidence = (f"assumed from step {row['assumed']} on", f", because {row['why']}")
                layers_by_evidence.setdefault(evidence, []).append(row["layer"])
        lines = []
        for (text, reason), layers in layers_by_evidence.items():
            is_all = len(layers) == self.rows.height
            which = "" if is_all else f" for {', '.join(map(repr, layers))}"
            lines.append(f"rows: {text}{which}{reason}")
        return lines

    __repr__ = __str__
