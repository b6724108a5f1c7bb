"""What totals are folded from: the slots and updates of a stretch of finished steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Array, Bools
from dualform.layers.keys import KeysOrGradients
from dualform.layers.layer import Layer
from dualform.store import records
from dualform.store.encoding import decode
from dualform.totals.stretch import Piece, Rounded, StretchUpdates

Groups = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StepBlock:
    """The slots of one call of a layer, and the step that they belong to."""

    step: int
    block: records.Block

    @property
    def slots(self) -> int:
        """How many there are."""
        return self.block.slots


def blocks_of(steps: Sequence[records.Step], layer: int) -> list[StepBlock]:
    """All calls of a layer, by its number."""
    calls = []
    for step in steps:
        of_layer = [block for block in step.blocks if block.layer == layer]
        calls += [StepBlock(step.number, block) for block in of_layer]
    return calls


def piece_of(calls: Sequence[StepBlock], layer: Layer, groups: Sequence[Groups], dtype: torch.dtype) -> Piece:
    """The slots of some calls. groups: for each grouping, the group of each slot."""
    blocks = [call.block for call in calls]
    counts = [call.slots for call in calls]
    steps = [call.step for call in calls]
    backwards = [block.backward for block in blocks]
    keys, errors = _keys_and_errors(layer, blocks, dtype)
    return Piece(
        keys=keys,
        errors=errors,
        steps=np.repeat(steps, counts),
        backwards=np.repeat(backwards, counts),
        groups=groups,
        written=_written(calls),
    )


def _keys_and_errors(
    layer: Layer, blocks: Sequence[records.Block], dtype: torch.dtype
) -> tuple[KeysOrGradients, Tensor | None]:
    if blocks[0].is_gradient:
        gradients = records.gradients_of_blocks(layer, blocks, dtype)
        return gradients, torch.ones(len(gradients), 1, dtype=dtype)
    stored = [block.errors for block in blocks if block.errors is not None]
    errors = [decode(vectors.data, vectors.exponents, dtype) for vectors in stored]
    return records.keys_of_blocks(layer, blocks, dtype), torch.cat(errors) if errors else None


def _written(calls: Sequence[StepBlock]) -> Bools | None:
    """(slots,): which slots wrote something. None: all of them, as far as is known."""
    if all(call.block.silent is None for call in calls):
        return None
    written = []
    for call in calls:
        silent = call.block.silent
        written.append(np.ones(call.slots, np.bool_) if silent is None else ~silent)
    return np.concatenate(written)


@dataclass(frozen=True)
class _ParameterUpdate:
    """One update of one parameter. Its fields are entries of those of `records.Update`."""

    step: int
    optimizer: str
    settings: dict[str, float]
    factors: Sequence[float]
    residual: float
    size: float
    gradient: Array | None


def updates_of(steps: Sequence[records.Step], parameter: int, *, keeps_slots: bool) -> StretchUpdates | None:
    """The updates of a parameter, by its number; None if there are none.

    keeps_slots: whether slots are stored, too. Else totals must tell what rounding to 16 bits has done.
    """
    updates = list(_parameter_updates(steps, parameter))
    if not updates:
        return None
    names = set(updates[0].settings)
    names.intersection_update(*[update.settings for update in updates])  # autocast may come and go
    settings = {}
    for name in sorted(names):
        settings[name] = np.array([update.settings[name] for update in updates])
    gradients = [update.gradient for update in updates if update.gradient is not None]
    return StretchUpdates(
        kind=updates[0].optimizer,
        steps=np.array([update.step for update in updates], dtype=np.int64),
        settings=settings,
        factors=_factors(updates),
        gradients=torch.from_numpy(np.stack(gradients)) if gradients else None,
        rounded=None if keeps_slots else _rounded(updates),
    )


def _parameter_updates(steps: Sequence[records.Step], parameter: int) -> Iterator[_ParameterUpdate]:
    for step in steps:
        for update in step.updates:
            if parameter not in update.parameters:
                continue
            place = update.parameters.index(parameter)
            yield _ParameterUpdate(
                step=step.number,
                optimizer=update.optimizer,
                settings=update.settings[place],
                factors=update.factors[place],
                residual=update.residuals[place],
                size=update.sizes[place],
                gradient=update.gradients[place],
            )


def _factors(updates: Sequence[_ParameterUpdate]) -> Array:
    """(updates, backward passes); 0 where there was none."""
    most = max(len(update.factors) for update in updates)
    factors = np.zeros((len(updates), most))
    for row, update in zip(factors, updates, strict=True):
        row[: len(update.factors)] = update.factors
    return factors


def _rounded(updates: Sequence[_ParameterUpdate]) -> Rounded | None:
    """What rounding to 16 bits (autocast) has done to the gradients of these updates."""
    units = np.array([update.settings.get("autocast", 0.0) for update in updates])
    if not units.any():
        return None
    rests = np.array([update.residual * update.size for update in updates])
    return Rounded(units, np.where(units > 0, np.nan_to_num(rests), 0.0))
