"""Cost of recording: the paper's MNIST training with a recorder / without, in one run.

DUALFORM_DATA=… python bench/recording.py [--steps 3000] [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import dualform
import mnist
from measure import Bar, Row, keep


def seconds(kind: str, folder: Path, steps: int) -> float:
    """Train once, with a recorder of this dtype or bare; the time includes sealing everything."""
    model = mnist.network()
    optimizer = mnist.optimizer_for(model)
    began = time.perf_counter()
    if kind == "bare":
        mnist.train(model, optimizer, IMAGES, LABELS, steps=steps)
    else:
        with dualform.record(model, optimizer, folder, dtype=kind) as recorder:
            mnist.train(
                model,
                optimizer,
                IMAGES,
                LABELS,
                steps=steps,
                before=lambda ids: recorder.batch(sample_id=ids, label=LABELS[ids]),
            )
    took = time.perf_counter() - began
    shutil.rmtree(folder, ignore_errors=True)
    return took


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=mnist.STEPS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kinds", default="bare,float16,float32")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    IMAGES, LABELS = mnist.data()
    kinds = arguments.kinds.split(",")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as temporary:
        for _ in range(arguments.repeats):
            for kind in kinds:
                times[kind].append(seconds(kind, Path(temporary) / "run", arguments.steps))
                print(f"{kind:8} {times[kind][-1]:6.1f} s", flush=True)
    bare = statistics.median(times["bare"])
    # Each beside the bare training just before it: the machine's own speed changes within minutes
    pairs = {kind: [taken / alone for taken, alone in zip(times[kind], times["bare"], strict=True)] for kind in kinds}
    ratios = {kind: statistics.median(pairs[kind]) for kind in kinds}
    print(f"\n{arguments.steps} steps, median (least to largest) of {arguments.repeats}; recording / bare:")
    for kind, ratio in ratios.items():
        print(f"  {kind:8} {ratio:.2f} ({min(pairs[kind]):.2f} to {max(pairs[kind]):.2f})")
    for kind, at_most in {"float16": 1.15, "float32": 1.3}.items():
        if kind in times:
            name, seconds_of = (
                f"training with recording, {kind}, {arguments.steps} steps",
                statistics.median(times[kind]),
            )
            limit, bars = {"bare training": ratios[kind]}, [Bar("bare training", at_most)]
            taken, kinds_of = {"ours": seconds_of, "bare training": bare}, {"bare training": "limit"}
            keep(Row(name, "python bench/recording.py", taken, limit, kinds_of, bars, arguments.repeats))
    if arguments.out:
        arguments.out.write_text(json.dumps({"steps": arguments.steps, "seconds": times, "ratios": pairs}, indent=1))
