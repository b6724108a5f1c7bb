"""`outputs=`: of a huge layer, only the error signals of some output units are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dualform.errors import RecordingError
from dualform.layers.layer import Layer, Use
from dualform.record.choose import ChosenModule


def keep_outputs(modules: Sequence[ChosenModule], outputs: Mapping[str, Sequence[int]] | None) -> list[ChosenModule]:
    """The modules, with the layers that `outputs` names limited to these output units."""
    if not outputs:
        return list(modules)
    layers = {layer.name: layer for chosen in modules for layer in chosen.layers}
    for name, units in outputs.items():
        if name not in layers:
            known = ", ".join(map(repr, layers))
            raise RecordingError(f"outputs names {name!r}, which is not recorded. Recorded layers: {known}.")
        _refuse_shared(layers[name], layers.values())
        layers[name] = _limited(layers[name], units)
    limited = []
    for chosen in modules:
        own = [layers[layer.name] for layer in chosen.layers]
        limited.append(replace(chosen, layers=own))
    return limited


def _limited(layer: Layer, units: Sequence[int]) -> Layer:
    """The layer with only these output units."""
    kept = sorted({int(unit) for unit in units})
    if not kept or kept[0] < 0 or kept[-1] >= layer.d_out:
        raise RecordingError(f"outputs={{{layer.name!r}: …}}: expected some units from 0 to {layer.d_out - 1}.")
    weights = layer.bilinear()
    if not weights or not all(map(_has_row_per_unit, weights)):
        raise RecordingError(
            f"outputs={{{layer.name!r}: …}}: only for layers like nn.Linear, whose rows are independent."
        )
    return replace(layer, outputs=tuple(kept))


def _has_row_per_unit(use: Use) -> bool:
    """Whether each output unit of the layer has a row of the parameter of its own."""
    if use.role != "weight":
        return False
    return not use.rows and not use.errors and use.groups == 1


def _refuse_shared(layer: Layer, layers: Iterable[Layer]) -> None:
    """Refuse a layer whose weight others use, too."""
    sharing = []
    for other in layers:
        shared = set(other.parameters) & set(layer.parameters)
        if shared and other is not layer:
            sharing.append(repr(other.name))
    if sharing:
        raise RecordingError(
            f"outputs={{{layer.name!r}: …}}: its weight is shared with {', '.join(sharing)}, which needs all of it."
        )
