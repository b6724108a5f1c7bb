"""Which rows of a parameter were recorded, and which a question needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.dual.coefficients import update_table
from dualform.layers.layer import Use
from dualform.recursions import KINDS
from dualform.store.reader import Store


@dataclass(frozen=True)
class Rows:
    """Some rows of a parameter: those whose error signals were kept, or those that a question needs."""

    places: Tensor
    """Their numbers in the parameter."""
    columns: Tensor
    """Their columns in the stored error signals."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor shaped like the parameter."""
        return tensor[self.places]


def kept_rows(store: Store, parameter: str) -> Rows | None:
    """Return the rows of a parameter whose error signals were kept; None: all of them."""
    for layer in store.users(parameter):
        names = [use.parameter for use in layer.bilinear()]
        if layer.outputs and parameter in names:
            places = torch.tensor(layer.outputs)
            return Rows(places, torch.arange(len(places)))
    return None


def chosen_rows(store: Store, parameter: str, wanted: Sequence[int]) -> Rows | None:
    """Return some rows of a parameter, if they can be computed without the others; None if they cannot."""
    users = store.users(parameter)
    uses = [use for layer in users for use in layer.uses_of(parameter)]
    if len(uses) != 1 or not _is_plain_weight(uses[0]) or _needs_all_rows(store, parameter):
        return None
    units = sorted(map(int, wanted))
    places = torch.tensor(units, dtype=torch.int64)
    outputs = users[0].outputs
    if not outputs:
        return Rows(places, places)
    return Rows(places, torch.tensor([outputs.index(unit) for unit in units]))


def _is_plain_weight(use: Use) -> bool:
    """Whether row i of the parameter belongs to output unit i of the layer."""
    return use.role == "weight" and use.groups == 1 and not use.rows and not use.errors


def _needs_all_rows(store: Store, parameter: str) -> bool:
    """Whether the optimizer of a parameter cannot be replayed for single rows."""
    if store.manifest.keep != "slots":
        return False
    kinds = update_table(store, parameter, 0, store.end_step)["optimizer"].unique()
    return any(KINDS[kind].needs_all_rows for kind in kinds if kind in KINDS)
