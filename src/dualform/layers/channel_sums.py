"""What the positions of each row add to a weight and bias per channel, as batch and group normalisations have them."""

from __future__ import annotations

import torch
from torch import Tensor


def channel_sums(errors: Tensor, centred: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ error × input and Σ error over the positions, (rows, channels) each.

    errors, centred: (rows, channels, positions), of one type.
    """
    if not errors.is_cpu or not errors.numel():
        return torch.linalg.vecdot(errors, centred), errors.sum(2)
    rows, channels, positions = errors.shape
    # With each channel of each row as a channel of its own, these are the gradients of a batch normalisation with mean 0 and
    # deviation 1. PyTorch computes both in one pass over memory; a product, its sum and the other sum take four
    own_channels = (1, rows * channels, positions)
    zeros = errors.new_zeros(rows * channels)
    ones = errors.new_ones(rows * channels)
    _, products, sums = torch.ops.aten.native_batch_norm_backward(
        errors.reshape(own_channels),
        centred.reshape(own_channels),
        None,  # no weight
        None,  # no running mean
        None,  # and no running variance: those of the batch are given
        zeros,
        ones,
        True,  # as in training
        0.0,
        [False, True, True],  # not the gradient of the input
    )
    return products.reshape(rows, channels), sums.reshape(rows, channels)
