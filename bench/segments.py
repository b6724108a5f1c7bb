"""Segments side by side: masked() and verify() under AdamW with two workers / with one.

python bench/segments.py [--steps 400] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import dualform
from dualform.version import __version__

SIZES, ROWS, EVERY = (784, 256, 256, 10), 64, 100
OUT = Path(__file__).parent / "results" / "segments.json"


def recorded(folder: Path, steps: int) -> dualform.Dual:
    """A training on random data, with a snapshot every 100 steps."""
    torch.manual_seed(0)
    maps = [nn.Linear(d_in, d_out) for d_in, d_out in pairwise(SIZES)]
    model = nn.Sequential(maps[0], nn.ReLU(), maps[1], nn.ReLU(), maps[2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with dualform.record(model, optimizer, folder) as recorder:
        for step in range(1, steps + 1):
            images, labels = torch.rand(ROWS, SIZES[0]), torch.randint(SIZES[-1], (ROWS,))
            recorder.batch(label=labels)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step % EVERY == 0:
                recorder.seal()
    return dualform.open(folder, model)


def products(workers: int) -> None:
    """Plain matrix products: what two threads gain on this machine, as busy as it is, with nothing of ours."""
    matrix = torch.rand(500, 500)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda _: [matrix @ matrix for _ in range(20)], range(12)))


def seconds(ask: Callable[[int], object], workers: int) -> tuple[float, float]:
    """Of the clock; of all cores."""
    began, used = time.perf_counter(), time.process_time()
    ask(workers)
    return time.perf_counter() - began, time.process_time() - used


def ratio(times: dict[int, list[tuple[float, float]]], which: int) -> float:
    """Two workers / one, each pair measured in a row; the median."""
    return statistics.median(two[which] / one[which] for one, two in zip(times[1], times[2], strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        dual = recorded(Path(temporary) / "run", arguments.steps)
        snapshots = dual.store.snapshot_steps()
        questions: dict[str, Callable[[int], object]] = {
            "verify": lambda workers: dual.verify(workers=workers),
            "masked": lambda workers: dual.masked(drop="label = 7", workers=workers),
            "products": products,
        }
        gaps = {workers: float(max(dual.verify(workers=workers).frame["gap"])) for workers in (1, 2)}
        times: dict[str, dict[int, list[tuple[float, float]]]] = {name: {1: [], 2: []} for name in questions}
        for _ in range(arguments.repeats):
            for name, ask in questions.items():
                for workers, taken in times[name].items():
                    taken.append(seconds(ask, workers))
    ratios = {name: {"clock": ratio(taken, 0), "work": ratio(taken, 1)} for name, taken in times.items()}
    print(f"{arguments.steps} steps, snapshots at {snapshots}; two workers / one, median of {arguments.repeats}:")
    for name, found in ratios.items():
        print(f"  {name:8} {found['clock']:.2f} by the clock, {found['work']:.2f} of the work of all cores")
    print(f"  largest gap: {gaps[1]:.1e} with one, {gaps[2]:.1e} with two")
    settings = {"version": __version__, "steps": arguments.steps, "sizes": SIZES, "rows": ROWS, "snapshots": snapshots}
    OUT.write_text(json.dumps({**settings, "ratios": ratios, "gaps": gaps, "seconds": times}, indent=1) + "\n")
