"""Vectors scaled and rounded to float16 in one pass; PyTorch takes two, through a copy in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from dualform.native.kernels import is_plain, kernels


def scaled_halves(vectors: Tensor, scales: Tensor, out: Tensor) -> bool:
    """Write vectors (n, d) × scales (n, 1) to `out` (n, d) float16; False if the loop cannot do it."""
    loops = kernels()
    if loops is None or not (is_plain(vectors) and is_plain(scales) and is_plain(out, torch.float16)):
        return False
    loops.halves(*vectors.shape, vectors.data_ptr(), scales.data_ptr(), out.data_ptr(), torch.get_num_threads())
    return True
