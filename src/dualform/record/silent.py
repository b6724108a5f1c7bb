"""Slots whose error signal is zero, so that they wrote nothing: padding, ignored labels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualform.native.kernels import address, is_plain, kernels
from dualform.store.records import Bools


def silent_slots(errors: Tensor) -> Bools | None:
    """Return which error signals (n, d_out) are exactly zero, (n,), or None if none of them is."""
    loops = kernels()
    if loops is None or not is_plain(errors):
        return _silent_slots(errors)
    flags = np.empty(len(errors), np.bool_)
    count = loops.zero_rows(*errors.shape, errors.data_ptr(), address(flags))
    return flags if count else None


def _silent_slots(errors: Tensor) -> Bools | None:
    silent = torch.linalg.vector_norm(errors, dim=1) == 0  # many times as fast as a search for what is not zero
    if not bool(silent.any()):
        return None
    # The norm of a vector of tiny numbers is zero, too: their squares vanish.
    silent[silent.clone()] = ~errors[silent].any(1)
    flags: Bools = silent.cpu().numpy()
    return flags if flags.any() else None
