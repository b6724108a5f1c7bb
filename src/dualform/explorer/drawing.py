"""Drawings of a user, brought into the form of a dataset's images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def fit_drawing(drawing: Tensor, size: int, box: tuple[int, int]) -> Tensor:
    """Cut a drawing out, scale it to fit a box and centre it, as datasets of digits do: (size, size), 0 to 1."""
    inked = torch.nonzero(drawing > 0.1)
    if not len(inked):
        return torch.zeros(size, size)
    top, left = inked.min(0).values.tolist()
    bottom, right = (inked.max(0).values + 1).tolist()
    cut = drawing[top:bottom, left:right]
    scale = min(box[0] / cut.shape[0], box[1] / cut.shape[1])
    height, width = (max(1, round(side * scale)) for side in cut.shape)
    small = F.interpolate(cut[None, None], (height, width), mode="bilinear", antialias=True)[0, 0]

    # The centre of mass of the ink goes into the middle of the image, as far as the drawing stays inside.
    total = small.sum().clamp(min=1e-6)
    centre_row = float((small.sum(1) @ torch.arange(height).float()) / total)
    centre_column = float((small.sum(0) @ torch.arange(width).float()) / total)
    first_row = _first(size, height, centre_row)
    first_column = _first(size, width, centre_column)
    image = torch.zeros(size, size)
    image[first_row : first_row + height, first_column : first_column + width] = small
    return image.clamp(0, 1)


def _first(size: int, length: int, centre: float) -> int:
    """Where a stretch begins whose centre is to be in the middle of `size`."""
    return min(max(round((size - 1) / 2 - centre), 0), size - length)
