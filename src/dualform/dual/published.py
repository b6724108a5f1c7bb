"""Compare the final weights of a recording with a published checkpoint: did this training produce it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch
from torch import Tensor

PREFIXES = ("module.", "_orig_mod.")
"""What wrappers put before every name in a state dict."""
EQUAL = "equal"
DIFFERS = "differs"
ABSENT = "not in the checkpoint"
UNKNOWN = "not in the recording"


@dataclass(frozen=True)
class Published:
    """Each weight beside the published one."""

    frame: pl.DataFrame
    """One line for each: parameter, verdict ("equal", "equal in bfloat16", "differs", …), difference (‖own − published‖ / ‖published‖), largest (the
    largest of all differences), of_movement (‖own − published‖ / ‖own − first‖, what training did)."""
    named: str

    @property
    def is_equal(self) -> bool:
        """Whether every weight is the published one, in the published precision."""
        return not self.differing

    @property
    def differing(self) -> list[str]:
        """The weights that are not equal."""
        is_equal = pl.col("verdict").str.starts_with(EQUAL)
        names: list[str] = self.frame.filter(~is_equal)["parameter"].to_list()
        return names

    def differences(self) -> dict[str, str]:
        """Return how each weight that is not equal differs, in words."""
        is_differing = pl.col("parameter").is_in(self.differing)
        lines = self.frame.filter(is_differing).to_dicts()
        return {line["parameter"]: _in_words(line) for line in lines}

    def __str__(self) -> str:
        count = self.frame.height
        if self.is_equal:
            return f"all {count} weights are those of {self.named}"
        lines = [f"{len(self.differing)} of {count} weights are not those of {self.named}"]
        lines += [f"  {name}: {text}" for name, text in self.differences().items()]
        return "\n".join(lines)

    __repr__ = __str__


def _in_words(row: Mapping[str, Any]) -> str:
    """Return a line of the frame in words."""
    if row["verdict"] != DIFFERS:
        return str(row["verdict"])
    if row["difference"] is None:
        return "it has another shape"
    text = f"differs by {row['difference']:.1e} of its size, at most {row['largest']:.1e} in one place"
    if row["of_movement"] is not None:
        text += f"; that is {row['of_movement']:.1e} of what training changed"
    return text


def compare(
    first: Mapping[str, Tensor], last: Mapping[str, Tensor], published: Mapping[str, Tensor], named: str
) -> Published:
    """Compare the weights of a recording's end with published ones. first: those when recording began."""
    published = _without_prefix(published, last)
    lines = []
    for name, own in last.items():
        if name in published:
            lines.append(_line(name, own, published[name], first.get(name)))
        elif not _is_elsewhere(own, last, published):
            lines.append({"parameter": name, "verdict": ABSENT})
    lines += [{"parameter": name, "verdict": UNKNOWN} for name in published if name not in last]
    return Published(pl.DataFrame(lines, schema=_SCHEMA), named)


_SCHEMA: dict[str, Any] = {
    "parameter": pl.String,
    "verdict": pl.String,
    "difference": pl.Float64,
    "largest": pl.Float64,
    "of_movement": pl.Float64,
}


def _without_prefix(published: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if any(name in own for name in published):
        return published
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in published):
            return {name.removeprefix(prefix): value for name, value in published.items()}
    return published


def _is_elsewhere(value: Tensor, last: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> bool:
    """Whether the same weight is published under another of its names."""
    return any(
        other.shape == value.shape and torch.equal(other, value) for name, other in last.items() if name in published
    )


def _line(name: str, own: Tensor, published: Tensor, first: Tensor | None) -> dict[str, Any]:
    if own.shape != published.shape:
        return {"parameter": name, "verdict": DIFFERS}
    verdict = _verdict(own, published)
    difference = own.double() - published.double()
    distance = _norm(difference)
    line: dict[str, Any] = {
        "parameter": name,
        "verdict": verdict,
        "difference": _ratio(distance, _norm(published)),
        "largest": float(difference.abs().max()) if difference.numel() else 0.0,
    }
    if first is not None:
        movement = _norm(own.double() - first.double())
        line["of_movement"] = _ratio(distance, movement)
    return line


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _verdict(own: Tensor, published: Tensor) -> str:
    if torch.equal(own.double(), published.double()):
        return EQUAL
    # Models are often published in 16 bits
    rounded = own.to(published.dtype)
    if torch.equal(rounded, published):
        return f"{EQUAL} in {str(published.dtype).removeprefix('torch.')}"
    return DIFFERS


def _ratio(distance: float, size: float) -> float | None:
    """None: there is nothing to compare with."""
    if distance == 0:
        return 0.0
    return distance / size if size else None
