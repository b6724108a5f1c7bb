"""`keep=`: what is kept of the slots of each layer, and what does not go with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from dualform.errors import RecordingError
from dualform.record.totals import has_deltas
from dualform.store.format import KEEPS, MIXED, SUMMED, Grouping

Keep = str | Mapping[str, str]
"""One for all layers, or {name or glob of layers: what is kept of them}: the first that fits counts."""


def check_keep(keep: Keep, projection: int, every: int) -> None:
    """Raise RecordingError if these settings do not say what is kept."""
    is_by_layer = isinstance(keep, Mapping) and all(isinstance(pattern, str) for pattern in keep)
    if not isinstance(keep, str) and not is_by_layer:
        raise RecordingError(
            f"keep={keep!r}: expected one of {', '.join(map(repr, KEEPS))}, or a dictionary from names or globs of layers to what is kept of "
            f'them: keep={{"lm_head": "keys", "*": "rows"}}.'
        )
    given = [keep] if isinstance(keep, str) else [*keep.values()]
    allowed = [known for known in KEEPS if known != "totals" or isinstance(keep, str)]
    for one in given:
        if one not in allowed:
            raise RecordingError(f"keep={keep!r}: expected one of {', '.join(map(repr, allowed))}.")
    if not given:
        raise RecordingError(f"keep={keep!r}: expected what is kept, by names or globs of layers.")
    for name, number in (("projection", projection), ("every", every)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise RecordingError(f"{name}={number!r}: expected a whole number of at least 1.")


def keep_of(layer: str, keep: Keep) -> str:
    """Return what is kept of a layer."""
    if isinstance(keep, str):
        return keep
    for pattern, kept in keep.items():
        if fnmatchcase(layer, pattern):
            return kept
    raise RecordingError(
        f'keep= says nothing of layer {layer!r}. Add its name, or "*" at the end for all that no other pattern fits: '
        f'keep={{{", ".join(f"{pattern!r}: {kept!r}" for pattern, kept in keep.items())}, "*": "slots"}}.'
    )


def check_patterns(keep: Keep, layers: Sequence[str]) -> None:
    """Raise RecordingError if a layer has no pattern, or a pattern no layer that is left for it."""
    if isinstance(keep, str):
        return
    for layer in layers:
        keep_of(layer, keep)
    unclaimed = list(layers)
    for pattern in keep:
        fitting = [layer for layer in layers if fnmatchcase(layer, pattern)]
        if pattern != "*" and not fitting:
            known = ", ".join(map(repr, layers))
            raise RecordingError(f"keep= names {pattern!r}, which is not recorded. Recorded layers: {known}.")
        if pattern != "*" and not set(fitting) & set(unclaimed):
            raise RecordingError(
                f"keep= names {pattern!r} after others that fit the same layers, and the first that fits counts. Put it before them."
            )
        unclaimed = [layer for layer in unclaimed if layer not in fitting]


def refuse_contradictions(
    keep: str, every: int, groupings: Sequence[Grouping], *, has_outputs: bool, curvature: bool
) -> None:
    """Raise RecordingError if settings contradict each other. keep: as StoreAs.one_keep has it."""
    if curvature and keep in ("keys", "totals"):
        raise RecordingError(
            f'curvature=True needs keep="slots", "rows" or "projected": only influence uses curvature, and it needs slots or their sums. '
            f"You have keep={keep!r}."
        )
    if has_outputs and has_deltas(groupings):
        raise RecordingError('outputs= keeps only some of the error signals, so totals= can only be of "keys".')
    if has_outputs and keep == "projected":
        raise RecordingError(
            'outputs= and keep="projected" do not go together: projected error signals are short already. Leave outputs= out.'
        )
    if groupings and keep in ("projected", MIXED):
        kept = "projected" if keep == "projected" else "different things of different layers"
        raise RecordingError(
            f'totals= are sums of what slots write to the weights, for all layers: they need keep="slots", "rows", "keys" or "totals". This '
            f"recording keeps {kept}."
        )
    if every > 1 and (groupings or keep == "totals"):
        raise RecordingError(
            f"totals= need all steps, and every={every} keeps one step in {every}. Leave one of them out."
        )


def sums_rows(keep: Keep) -> bool:
    """Whether the slots of any layer may be summed row by row."""
    return keep in SUMMED if isinstance(keep, str) else any(kept in SUMMED for kept in keep.values())
