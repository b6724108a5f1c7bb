"""Totals: by label, which must not grow with training, and by sample, beside reading them.

DUALFORM_DATA=… python bench/totals.py [--rounds 5]
"""

from __future__ import annotations

import argparse

import recordings
from measure import Bar, compare, stream

COMMAND = "python bench/totals.py"
LAYER = "2"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    dual, image = recordings.recorded("float16"), recordings.queries(1)
    compare(
        "totals by label, one query",
        lambda: dual.attend(image)[LAYER].total("label"),
        command=COMMAND,
        bars=[Bar("seconds", 0.005)],
        rounds=rounds,
    )
    [number] = [n for n, g in enumerate(dual.store.manifest.totals.groupings) if g.columns == ("sample_id",)]  # type: ignore[union-attr]
    sums = dual.store.totals()[f"{number}.{dual.layers.index(LAYER)}.keys"]
    compare(
        f"totals by sample, one query, {len(sums):,} samples",
        lambda: dual.attend(image)[LAYER].total("sample_id"),
        command=COMMAND,
        limits={"reading the totals": lambda: stream(sums)},
        bars=[Bar("reading the totals", 1.5)],
        rounds=rounds,
        notes={"bytes read": sums.nbytes},
    )
