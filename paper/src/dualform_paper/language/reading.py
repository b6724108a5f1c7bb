"""The order in which a training reads its text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.errors import DataError
from dualform.language.text import Ids


@dataclass(frozen=True)
class Batch:
    """The tokens of one step."""

    tokens: Tensor
    """(rows, window)"""
    following: Tensor
    """(rows, window): the token after each."""
    positions: Tensor
    """(rows, window): where in the training text each token stands."""
    starts_epoch: bool = False
    """Whether rows jump back to their beginnings here, so that no state is carried over."""


def batch(ids: Ids, step: int, rows: int, window: int, *, epochs: bool = False) -> Batch:
    """Rows begin evenly spread over the text, and each reads on from step to step. A batch depends on its step's number alone.

    By default a row reads on into the stretch of the next one, and past the end of the text from its beginning: all positions are
    visited equally often, but for one visit. With `epochs`, as in the authors' code, the text is cut into windows, each row has
    equally many of them, and reads them again in each epoch; the last windows, fewer than there are rows, are never read.
    """
    if epochs:
        windows = len(ids) // window // rows
        if not windows:
            raise DataError(
                f"the training text has {len(ids):,} tokens, less than one window of {window} for each of {rows} rows. Choose a "
                f"smaller batch or window, or read on past the end of the text (epochs=False, preset text)."
            )
        row_begins = np.arange(rows) * windows * window
        offset = step % windows * window
    else:
        row_begins = np.arange(rows) * len(ids) // rows
        offset = step * window
    places = (row_begins[:, None] + offset + np.arange(window + 1)) % len(ids)
    tokens = torch.from_numpy(ids[places].astype(np.int64))
    positions = torch.from_numpy(places[:, :-1].copy())
    return Batch(tokens[:, :-1], tokens[:, 1:], positions, starts_epoch=epochs and offset == 0)
