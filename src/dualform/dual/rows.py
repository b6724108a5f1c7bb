"""Which rows of a parameter a question, a use or a recording is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dualform.dual.coefficients import update_table
from dualform.layers.layer import Layer, Use
from dualform.recursions import KINDS
from dualform.store.reader import Store

Array = TypeVar("Array", Tensor, np.ndarray[Any, Any])


@dataclass(frozen=True)
class Rows:
    """Some rows of a parameter: those whose error signals were kept, or those that a question is about."""

    places: Tensor
    """Of the parameter."""
    columns: Tensor
    """Of the stored error signals."""

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor like the parameter."""
        return tensor[self.places]


def uses_of(layer: Layer, parameter: str) -> list[Use]:
    """How a layer uses a parameter."""
    return [use for use in layer.uses if use.parameter == parameter]


def used_rows(use: Use, parameter: Array) -> Array:
    """Return the rows of a parameter that a use is of, as a view."""
    return parameter[use.rows[0] : use.rows[1]] if use.rows else parameter


def kept_rows(store: Store, parameter: str) -> Rows | None:
    """The rows of a parameter whose error signals were kept; None: all."""
    for layer in store.users(parameter):
        names = [use.parameter for use in layer.bilinear()]
        if layer.outputs and parameter in names:
            places = torch.tensor(layer.outputs)
            return Rows(places, torch.arange(len(places)))
    return None


def chosen_rows(store: Store, parameter: str, wanted: Sequence[int]) -> Rows | None:
    """Some rows of a parameter, if they can be had without the others; None if not."""
    users = store.users(parameter)
    uses = [use for layer in users for use in uses_of(layer, parameter)]
    if len(uses) != 1:
        return None
    use = uses[0]
    is_part = bool(use.rows or use.errors)
    if use.role != "weight" or is_part or use.groups > 1 or _needs_all_rows(store, parameter):
        return None
    units = sorted(map(int, wanted))
    places = torch.tensor(units, dtype=torch.int64)
    outputs = users[0].outputs
    if not outputs:
        return Rows(places, places)
    return Rows(places, torch.tensor([outputs.index(unit) for unit in units]))


def _needs_all_rows(store: Store, parameter: str) -> bool:
    """Whether the optimizer of a parameter cannot be replayed for some of its rows."""
    if store.manifest.keep != "slots":
        return False
    kinds = update_table(store, parameter, 0, store.end_step)["optimizer"].unique()
    return any(KINDS[kind].needs_all_rows for kind in kinds if kind in KINDS)
