"""The network of the image experiments, at any size."""

from __future__ import annotations

import torch
from torch import nn


def two_hidden(d_in: int, width: int, d_out: int, seed: int) -> nn.Sequential:
    """Two hidden layers with ReLU, initialised as PyTorch does; the random generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(d_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, d_out)
        )
