"""Contributions to a logit: the best slots of 128 queries in the last layer, beside attention.

DUALFORM_DATA=… python bench/contributions.py [--rounds 5]
"""

from __future__ import annotations

import argparse

import recordings
from measure import Bar, compare

LAYER = "4"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    images = recordings.queries(128)
    for dtype in ("float32", "float16"):
        dual = recordings.recorded(dtype)
        compare(
            f"contributions to a logit, last layer, top-10 of 128 queries, {dtype}",
            lambda dual=dual: dual.contributions(images)[LAYER].best(10),  # type: ignore[misc]
            command="python bench/contributions.py",
            peers={"attention top-10": lambda dual=dual: dual.attend(images)[LAYER].best(10)},  # type: ignore[misc]
            bars=[Bar("attention top-10", 2)],
            rounds=rounds,
        )
