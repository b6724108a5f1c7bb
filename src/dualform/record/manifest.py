"""What the manifest of a new recording says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from dualform.record.choose import Choice
from dualform.record.parameters import RecordedParameter
from dualform.record.passes import PendingPasses
from dualform.store import format as store
from dualform.store.tensors import tensor_checksum
from dualform.version import __version__


def new_manifest(
    passes: PendingPasses, choice: Choice, batch_axis: Mapping[str, int], settings: Mapping[str, str]
) -> store.Manifest:
    """The manifest of a recording that is about to begin. settings: what it says besides, of a collection for example."""
    layers = [layer.stored for layer in passes.layers]
    parameters = parameter_entries(passes.parameters.values())
    checksums = {name: tensor_checksum(weight) for name, weight in choice.base.items()}
    return store.Manifest(
        version=store.VERSION,
        created_by=f"dualform {__version__}, torch {torch.__version__}",
        keep=passes.store_as.one_keep,
        dtype=passes.store_as.dtype,
        layers=tuple(layers),
        parameters=tuple(parameters),
        left_out=choice.left_out,
        batch_axis=dict(batch_axis),
        settings={"seed": str(passes.seed), **settings},
        base=checksums,
        every=passes.store_as.every,
    )


def parameter_entries(parameters: Iterable[RecordedParameter]) -> list[store.Parameter]:
    """How a manifest describes parameters."""
    entries = []
    for parameter in parameters:
        dtype = str(parameter.tensor.dtype).removeprefix("torch.")
        entries.append(store.Parameter(parameter.name, parameter.shape, dtype))
    return entries
