"""What slots wrote to a parameter, and to which group it belongs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualform.arrays import Floats, Ints
from dualform.layers.keys import Patches, RowGradients
from dualform.layers.layer import Use
from dualform.layers.written import sum_written, used_rows
from dualform.totals.stretch import Piece


def add_written(target: Tensor, use: Use, piece: Piece, scale: Floats) -> None:
    """Add what a use makes of the slots, each scaled, to a tensor like the parameter."""
    own = used_rows(use, target)
    written = _sum_written(use, piece, torch.from_numpy(scale).to(target.dtype))
    own += written.reshape(own.shape)


def add_by_group(target: Tensor, rest: Tensor | None, grouping: int, use: Use, piece: Piece, scale: Floats) -> None:
    """Add what each group's slots wrote, each slot scaled, and take it from the rest. target: (groups, *shape)."""
    codes = piece.groups[grouping]
    order = np.argsort(codes, kind="stable")
    order = order[scale[order] != 0]
    if not len(order):
        return
    ends = np.flatnonzero(np.diff(codes[order])) + 1
    for places in np.split(order, ends):
        group = int(codes[places[0]])
        group_piece, group_scale = _only(places, piece, scale)
        add_written(target[group], use, group_piece, group_scale)
        if rest is not None:
            add_written(rest, use, group_piece, -group_scale)


def _only(places: Ints, piece: Piece, scale: Floats) -> tuple[Piece, Floats]:
    """Return some slots of a piece and their scales; of feature maps, which are not cut, all slots, the others scaled by 0."""
    if not isinstance(piece.keys, Patches):
        return piece.select(places), scale[places]
    group_scale = np.zeros_like(scale)
    group_scale[places] = scale[places]
    return piece, group_scale


def _sum_written(use: Use, piece: Piece, scale: Tensor) -> Tensor:
    """Return what the slots of a piece write together, each scaled."""
    assert piece.errors is not None
    keys = piece.keys.to(scale.dtype)
    if use.role == "scale" and not isinstance(keys, RowGradients):
        return scale @ keys.vectors()
    scaled_errors = piece.errors.to(scale.dtype) * scale.unsqueeze(1)
    return sum_written(use, keys, scaled_errors)
