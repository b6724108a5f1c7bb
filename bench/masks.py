"""A network without one of its two tasks: from group deltas, and from slots, beside one sgemm pass over the kept slots.

DUALFORM_DATA=… python bench/masks.py [--rounds 3]
"""

from __future__ import annotations

import argparse

import polars as pl
import torch

import recordings
from measure import Bar, compare

COMMAND = "python bench/masks.py"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    dual = recordings.recorded("two-tasks")
    compare(
        "masked, a task, from group deltas",
        lambda: dual.masked(drop=pl.col("task") == "fashion-mnist"),
        command=COMMAND,
        bars=[Bar("seconds", 0.05)],
        rounds=2 * rounds + 3,
    )
    condition = pl.col("sample_id") % 2 == 0
    kept = int(dual.rows.select(condition.sum()).item())
    widths = [(784, 800), (800, 800), (800, 10)]

    def sgemm() -> None:
        """As many slots, of random numbers in memory, as many at a time as we take."""
        for d_in, d_out in widths:
            keys, errors, total = torch.rand(2048, d_in), torch.rand(2048, d_out), torch.zeros(d_out, d_in)
            for _ in range(kept // 2048):
                torch.addmm(total, errors.T, keys, out=total)

    compare(
        f"masked, any condition: {kept:,} of {dual.rows.height:,} rows kept, float16",
        lambda: dual.masked(keep=condition),
        command=COMMAND,
        limits={"sgemm over the kept slots": sgemm},
        bars=[Bar("sgemm over the kept slots", 2)],
        rounds=rounds,
    )
