"""The optimizer of a collection, which changes nothing: each of its steps is a batch at fixed weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dualform.store.collection import SETTING, Collection


class FixedWeights(Optimizer):
    """Takes the place of an optimizer, so that a batch without an update goes the way of a recorded step."""

    def __init__(self, parameters: Iterable[nn.Parameter], collection: Collection):
        super().__init__(parameters, {})
        self.collection = collection

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Leave all weights as they are."""


def are_weights_fixed(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether nothing is trained."""
    return all(isinstance(optimizer, FixedWeights) for optimizer in optimizers)


def collection_settings(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return what the manifest says of a collection; nothing where a model is trained."""
    settings = {}
    for optimizer in optimizers:
        if isinstance(optimizer, FixedWeights):
            settings[SETTING] = optimizer.collection.dump()
    return settings
