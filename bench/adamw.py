"""AdamW: masked() and contributions() beside recomputing the recorded gradients once.

DUALFORM_DATA=… python bench/adamw.py [--rounds 1]
"""

from __future__ import annotations

import argparse

import polars as pl
import torch

import recordings
from measure import Bar, compare

COMMAND = "python bench/adamw.py"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    dual = recordings.recorded("adamw").at(arguments.steps)
    images = recordings.queries(128)

    def gradients(shapes: list[tuple[int, int]]) -> None:
        """Keys and error signals of every step, read and multiplied."""
        for layer in dual.layers:
            if dual.store.layer(layer)[1].d_out in [d_out for _, d_out in shapes]:
                for chunk in dual.store.chunks(layer, end_step=dual.end_step):
                    for start, count in zip(chunk.starts.tolist(), chunk.counts.tolist(), strict=True):
                        keys = chunk.keys(torch.float32, start, start + count).vectors()
                        chunk.errors(torch.float32, start, start + count).T @ keys

    everything = [(784, 800), (800, 800), (800, 10)]
    compare(
        f"masked under AdamW, {arguments.steps} steps",
        lambda: dual.masked(only=pl.col("sample_id") % 2 == 0),
        command=COMMAND,
        limits={"the gradients once": lambda: gradients(everything)},
        bars=[Bar("the gradients once", 3)],
        rounds=arguments.rounds,
    )
    compare(
        f"contributions to a logit under AdamW, last layer, top-10 of 128 queries, {arguments.steps} steps",
        lambda: dual.contributions(images, target=7)["4"].best(10),
        command=COMMAND,
        limits={
            "the gradients once": lambda: gradients(everything),
            "those of the last layer": lambda: gradients([(800, 10)]),
        },
        bars=[Bar("the gradients once", 3)],
        rounds=arguments.rounds,
    )
