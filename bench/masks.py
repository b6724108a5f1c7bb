"""Networks without some of their memory: a task, from group deltas; half of all rows, beside one sgemm pass over the kept slots; a
sample, some steps and a class, beside reading every slot that is kept.

DUALFORM_DATA=… python bench/masks.py [--rounds 3]
python bench/masks.py few [--run RUN] [--rounds 3]      # the last of these alone; RUN: a recording of the paper's network on MNIST
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import polars as pl
import torch

import dualform
import mnist
import recordings
from measure import Bar, compare

COMMAND = "python bench/masks.py"


def two_tasks(dual: dualform.Dual, rounds: int) -> None:
    """Without one of them; and without half of all rows."""
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
        lambda: dual.masked(only=condition),
        command=COMMAND,
        limits={"sgemm over the kept slots": sgemm},
        bars=[Bar("sgemm over the kept slots", 2)],
        rounds=rounds,
    )


def few(dual: dualform.Dual, rounds: int) -> None:
    """Masks that drop little, or whole stretches."""
    sample, last = dual.rows["sample_id"][0], dual.end_step
    for what, drop in {
        "one sample": f"sample_id = {sample}",
        "ten steps": f"step BETWEEN {last // 3} AND {last // 3 + 9}",
        "the first half of the steps": f"step < {last // 2}",
        "a class": "label = 3 AND sample_id >= 0",  # not from group deltas
    }.items():
        reads = max(dual.mask_reads(drop=drop).values())
        compare(
            f"masked without {what}: {reads:,} of {dual.rows.height:,} slots read, float16",
            partial(dual.masked, drop=drop),
            command="python bench/masks.py few",
            limits={"every kept slot": partial(dual.masked, drop=drop, read="kept")},
            rounds=rounds,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["all", "few"], default="all")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.what == "all":
        two_tasks(recordings.recorded("two-tasks"), arguments.rounds)
    run = arguments.run
    few(recordings.recorded("float16") if run is None else dualform.open(run, mnist.network()), arguments.rounds)
