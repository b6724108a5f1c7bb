"""Looks at many parameters at once: in one compiled loop where all are plain, else one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dualform.native.kernels import is_plain, kernels
from dualform.record.audit import Looked, Seen
from dualform.record.parameters import ParameterLedger


def look_all(ledgers: Sequence[ParameterLedger], tensors: Sequence[Tensor]) -> list[Looked]:
    """Tensors like the parameters, each as the audit sees it; shares no memory with them."""
    found = _compiled(ledgers, tensors)
    if found is None:
        looked = [ledger.look(tensor) for ledger, tensor in zip(ledgers, tensors, strict=True)]
        return [one if ledger.is_matrix else one.copy() for ledger, one in zip(ledgers, looked, strict=True)]
    seen, end = [], 0
    for ledger in ledgers:
        begin, end = end, end + ledger.rows * ledger.columns
        seen.append(found[0][begin:end])
    return list[Looked](seen)


def all_unchanged(ledgers: Sequence[ParameterLedger]) -> bool:
    """Whether nothing has changed, for sure. Else each is to be asked itself: it may be rounding."""
    parts = [(ledger, part) for ledger in ledgers if (part := ledger.next_part()) is not None]
    found = _compiled(
        [ledger for ledger, _ in parts], [now for _, (_, now) in parts], [known for _, (known, _) in parts]
    )
    if found is None or found[1]:
        return False
    for ledger in ledgers:
        ledger.turn()
    return True


def _compiled(
    ledgers: Sequence[ParameterLedger], tensors: Sequence[Tensor], known: Sequence[Looked] | None = None
) -> tuple[Seen, int] | None:
    """What is seen, one after the other, and how many numbers are not as known; None: not all of them are plain."""
    loops = kernels()
    if loops is None:
        return None
    table, size = [], 0
    for place, (ledger, tensor) in enumerate(zip(ledgers, tensors, strict=True)):
        random = ledger.random
        plain = (
            is_plain(tensor) and is_plain(random.T) and random.numel()
        )  # a weight without columns has nothing to see
        before = None if known is None else known[place]
        if not plain or (before is not None and before.dtype != np.float64):
            return None
        rows = tensor.shape[0] if ledger.is_matrix else ledger.rows
        size += rows * ledger.columns
        table.append(
            (
                tensor.data_ptr(),
                random.data_ptr() if ledger.is_matrix else 0,
                rows,
                random.shape[0],
                ledger.columns,
                0 if before is None else before.__array_interface__["data"][0],
                0,
            )
        )
    looks, out = np.array(table, dtype=np.int64), np.empty(size)
    differing = loops.looks(len(table), looks.ctypes.data, out.ctypes.data, torch.get_num_threads())
    return out, differing
