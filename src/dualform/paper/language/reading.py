"""The order in which a training reads its text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.paper.language.text import Ids


@dataclass(frozen=True)
class Batch:
    """What is read in one step."""

    tokens: Tensor
    """(rows, window)"""
    following: Tensor
    """(rows, window): the token after each."""
    positions: Tensor
    """(rows, window): where in the training text each token stands."""


def batch(ids: Ids, step: int, rows: int, window: int) -> Batch:
    """Rows begin evenly spread over the text, and each reads on from step to step; after the end comes the beginning.

    So every position is visited equally often, but for one visit, and a step's batch depends on its number alone.
    """
    begin = np.arange(rows) * len(ids) // rows + step * window
    places = (begin[:, None] + np.arange(window + 1)) % len(ids)
    tokens = torch.from_numpy(ids[places].astype(np.int64))
    return Batch(tokens[:, :-1], tokens[:, 1:], torch.from_numpy(places[:, :-1].copy()))
