"""Peak memory of each question, each in a process of its own, beyond what that had before and beyond mapped files.

DUALFORM_DATA=… python bench/memory.py [--recording float16]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

import polars as pl
from torch import Tensor

import dualform
import recordings
from measure import Bar, Peak, Row, keep

Ask = Callable[[dualform.Dual, Tensor], object]
QUESTIONS: dict[str, Ask] = {
    "top-10 of one query, a hidden layer": lambda dual, images: dual.attend(images[:1])["2"].top(10),
    "top-10 of 128 queries, a hidden layer": lambda dual, images: dual.attend(images)["2"].best(10),
    "top-500 of every class, three layers": lambda dual, images: [
        dual.attend(images[:1])[layer].top(500, per="label") for layer in dual.layers
    ],
    "contributions, last layer, top-10 of 128": lambda dual, images: dual.contributions(images)["4"].best(10),
    "contributions of 100 by sample": lambda dual, images: dual.contributions(images[:100])["4"].top(
        10, by="sample_id"
    ),
    "sizes by label of 128, the input layer": lambda dual, images: dual.attend(images)["0"].total(
        "label", absolute=True
    ),
    "masked, the last layer": lambda dual, images: dual.masked(only=pl.col("sample_id") % 2 == 0, layers="4"),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recording", default="float16")
    parser.add_argument("--only", choices=list(QUESTIONS))
    arguments = parser.parse_args()
    if arguments.only is None:
        for question in QUESTIONS:
            subprocess.run(
                [sys.executable, __file__, "--recording", arguments.recording, "--only", question], check=True
            )
        sys.exit()
    dual, images = (
        recordings.recorded(arguments.recording, unfinished=arguments.recording == "long"),
        recordings.queries(128),
    )
    dual.rows  # noqa: B018 (the table of rows is the store's, not a question's)
    with Peak() as peak:
        QUESTIONS[arguments.only](dual, images)
    size = f"{arguments.recording} ({dual.store.nbytes / 1e9:.1f} GB)"
    bars, notes = [Bar("bytes", 512 << 20)], {"bytes": peak.bytes}
    keep(Row(f"peak memory: {arguments.only}, {size}", "python bench/memory.py", {}, {}, {}, bars, 1, notes))
