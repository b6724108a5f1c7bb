"""How far a parameter may be from what its slots say: relative, by the types it was trained and stored in."""

from __future__ import annotations

from dualform.store.reader import Store

TOLERANCE = {"float64": 1e-11, "float32": 1e-5, "float16": 1e-3}
"""By the type of the parameter or of the store, whichever is coarser; float16 rounds key and error signal by 2⁻¹¹."""


def tolerance(store: Store, parameter: str) -> float:
    """Of one parameter."""
    described = store.manifest.parameters[store.parameter(parameter)]
    return max(TOLERANCE.get(described.dtype, TOLERANCE["float16"]), TOLERANCE[store.manifest.dtype])
