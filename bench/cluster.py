"""From a laptop to a cluster: how questions scale with worker processes, and what that says about more machines.

python bench/cluster.py scaling     # strong scaling over 1 and 2 worker processes of this machine
python bench/cluster.py latency     # 1 to 64 tasks at a time on a simulated object storage, and the fitted model
python bench/cluster.py overhead    # what a task and a question cost the process that asks: processes, Ray
python bench/cluster.py extrapolate # the model for 10^9 slots on 32 machines, from the results of the three

Results go to bench/results/cluster.json. The latency of a simulated read is slept, so it needs no processor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dualform
import synthetic
from dualform.layers.layer import Layer
from dualform.query import scan as scanning
from dualform.query import search
from dualform.query.executors import HERE, Processes, Runner, runner_of
from dualform.query.reducers import Totals
from dualform.query.scan import Piece, Task, scan
from dualform.query.scorer import Scorer
from dualform.query.sending import Packer, run_packed
from dualform.store.reader import Store

OUT = Path(__file__).parent / "results" / "cluster.json"
WIDTH = 784
OUTPUTS = 16
QUERIES = 128
ROUNDS = 5

LATENCY = 0.05
"""Seconds until the first byte of a simulated read …"""
RATE = 100e6
"""… and the bytes a second that a worker then gets."""
PIECE_BYTES = 16 << 20
PIECES = 192

TARGET_SLOTS = 10**9
TARGET_BYTES_A_SLOT = 1600
"""Of 800 numbers in float16, as a hidden layer of the paper's network has."""
TARGET_WORKERS = 32 * 16
"""32 machines of 16 processors."""


def keep(name: str, found: dict[str, Any]) -> None:
    results = json.loads(OUT.read_text()) if OUT.exists() else {}
    results[name] = found
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(found, indent=1))


# Worker processes of this machine


def scaling(slots: int) -> None:
    search.USE_INDEX = False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        synthetic.write(path, slots=slots, d_in=WIDTH, d_out=OUTPUTS, dtype="float16", chunk_bytes=16 << 20)
        queries = torch.rand(QUERIES, WIDTH, generator=torch.Generator().manual_seed(0))
        runners = {"here": HERE, "1 process": Runner(Processes(1)), "2 processes": Runner(Processes(2))}
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        longest: dict[str, list[float]] = {name: [] for name in runners}
        """Of the processor: of the process that asks and the busiest worker."""
        asked = {name: dualform.open(path, executor=runner) for name, runner in runners.items()}  # type: ignore[arg-type]
        expected = asked["here"].attend({"map": queries})["map"].best(10)
        for number in range(ROUNDS + 1):
            for name, dual in asked.items():
                before = processor_seconds(runners[name])
                began = time.perf_counter()
                found = dual.attend({"map": queries})["map"].best(10)
                taken = time.perf_counter() - began
                after = processor_seconds(runners[name])
                if number:  # the first starts the processes, and reads and checks the files
                    seconds[name].append(taken)
                    asking, *workers = [after[process] - before[process] for process in before]
                    longest[name].append(asking + max(workers, default=0.0))
                assert torch.equal(found.slots, expected.slots)
                assert torch.equal(found.scores, expected.scores)
        for dual in asked.values():
            dual.close()
        keep(
            "scaling",
            {
                "slots": slots,
                "queries": QUERIES,
                "bytes": asked["here"].store.nbytes,
                "load of the machine": round(os.getloadavg()[0], 1),
                "seconds": medians(seconds),
                "1 process / 2 processes, by the clock": ratios(seconds),
                "seconds of the processor, asking + busiest worker": medians(longest),
                "1 process / 2 processes, of the processor": ratios(longest),
            },
        )


def medians(taken: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(seconds), 3) for name, seconds in taken.items()}


def ratios(taken: dict[str, list[float]]) -> list[float]:
    pairs = zip(taken["1 process"], taken["2 processes"], strict=True)
    return sorted(round(one / two, 2) for one, two in pairs)


def processor_seconds(runner: Runner) -> dict[int, float]:
    """Return what this process has used, then each worker, by process (Linux)."""
    used = {os.getpid(): time.process_time()}
    backend = runner.backend
    if isinstance(backend, Processes) and backend._pools:
        for worker in backend._pools[0]._processes:
            fields = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()
            used[worker] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


# A simulated object storage


@dataclass(frozen=True)
class SimulatedRun:
    """Some slots that take time to read, and hold nothing."""

    first_slot: int
    slots: int
    nbytes: int

    def pieces(self, width: int) -> Iterator[tuple[int, int]]:
        yield 0, self.slots


class Reading(Scorer):
    """Sleeps as long as a read takes."""

    value = "nothing"

    def score(self, queries: slice, run: SimulatedRun, low: int, high: int) -> Tensor:
        time.sleep(LATENCY + run.nbytes / RATE)
        return torch.zeros(queries.stop - queries.start, high - low)

    @property
    def end_slot(self) -> int:
        return PIECES


class Largest:
    """A reducer that keeps little."""

    def __init__(self) -> None:
        self.best = -np.inf

    def add(self, tile: scanning.Tile) -> None:
        self.best = max(self.best, float(tile.scores.max()))

    def merge(self, other: Largest) -> None:
        self.best = max(self.best, other.best)

    def empty(self) -> Largest:
        return Largest()


def latency() -> None:
    scanning.TASK_BYTES = 1
    layer = Layer("simulated", "linear", 1, 1, ())
    scorer = Reading(None, layer, 1, 1, torch.float32)  # type: ignore[arg-type]
    measured: dict[tuple[int, int], float] = {}
    for workers in (1, 2, 4, 8, 16, 32, 64):
        for count in (PIECES // 4, PIECES) if workers > 1 else (PIECES // 4,):
            pieces = [Piece(SimulatedRun(number, 1, PIECE_BYTES)) for number in range(count)]
            with ThreadPoolExecutor(workers) as pool:
                began = time.perf_counter()
                scan(pieces, scorer, Largest(), pool)
                measured[workers, count] = time.perf_counter() - began
                print(workers, count, round(measured[workers, count], 2), flush=True)
    model = fit(measured)
    table = [
        {
            "workers": workers,
            "tasks": count,
            "seconds": round(taken, 3),
            "model": round(modelled(model, workers, count), 3),
        }
        for (workers, count), taken in measured.items()
    ]
    keep("latency", {"piece_bytes": PIECE_BYTES, "model": model, "measured": table})


def fit(measured: dict[tuple[int, int], float]) -> dict[str, float]:
    """Fit seconds = fixed + per_task · tasks + rounds · per_round, relative errors alike, where `rounds` is tasks / workers, rounded up."""
    lines = [[1.0, count, -(-count // workers)] for workers, count in measured]
    seconds = np.array(list(measured.values()))
    scaled = np.array(lines) / seconds[:, None]
    found, *_ = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)
    worst = float(np.abs(scaled @ found - 1).max())
    names = ("fixed", "per_task", "per_round")
    return {**dict(zip(names, map(float, found.round(5)), strict=True)), "worst relative error": round(worst, 3)}


def modelled(model: dict[str, float], workers: int, tasks: int) -> float:
    return model["fixed"] + model["per_task"] * tasks + model["per_round"] * -(-tasks // workers)


# What the process that asks pays


class Nothing(Scorer):
    """Scores nothing, so that what is left is overhead."""

    value = "nothing"

    def score(self, queries: slice, run: Any, low: int, high: int) -> Tensor:
        return torch.zeros(queries.stop - queries.start, high - low)


def overhead() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        synthetic.write(path, slots=256 * 1024, d_in=8, d_out=8, dtype="float16", chunk_bytes=1 << 15)
        store = dualform.open(path).store
        scanning.TASK_BYTES = 1
        scorer = Nothing(store, store.layer("map")[1], store.end_step, 1, torch.float32)
        found: dict[str, Any] = {"tasks": len(store.manifest.chunks), "asking process, ms a task": by_hand(store)}
        for name in ("processes", "ray"):
            began = time.perf_counter()
            runner = runner_of(name)
            once(store, scorer, runner, 1)
            first = time.perf_counter() - began
            once(store, scorer, runner, 10_000)  # now every worker has started
            taken = {count: [once(store, scorer, runner, count) for _ in range(ROUNDS)] for count in (1, 10_000)}
            runner.backend.close()
            one = statistics.median(taken[1])
            all_tasks = statistics.median(taken[10_000])
            found[name] = {
                "seconds to start, with the first task": round(first, 2),
                "ms a question of one task": round(1000 * one, 2),
                "ms for each further task": round(1000 * (all_tasks - one) / (len(store.manifest.chunks) - 1), 3),
            }
        keep("overhead", found)


def once(store: Store, scorer: Scorer, runner: Runner, most: int) -> float:
    pieces = [Piece(run) for run in scorer.runs()][:most]
    began = time.perf_counter()
    scan(pieces, scorer, Largest(), runner)
    return time.perf_counter() - began


def by_hand(store: Store) -> dict[str, float]:
    """The processor's time of packing a task, unpacking its result and merging it: totals of 128 queries in 10 groups."""
    dual = dualform.open(store.files)
    answer = dual.attend({"map": torch.rand(QUERIES, 8)})["map"]
    total = Totals(answer.groups("label"), QUERIES, False)
    packer = Packer()
    packing = unpacking = 0.0
    pieces = list(answer._selection(None).pieces())
    for piece in pieces:
        began = time.process_time()
        packed = packer.pack(Task([piece], answer._scorer, total.empty(), slice(0, QUERIES)))
        packing += time.process_time() - began
        result = run_packed(packed.content, *packed.shared)
        began = time.process_time()
        total.merge(packer.unpack(result))
        unpacking += time.process_time() - began
    a_task = 1000 / len(pieces)
    return {"pack": round(packing * a_task, 3), "unpack and merge": round(unpacking * a_task, 3)}


def extrapolate() -> None:
    """Print the model for a large layer on a cluster: reads as simulated, tasks as Ray handles them, computing as measured."""
    results = json.loads(OUT.read_text())
    ray = results["overhead"]["ray"]
    nbytes = TARGET_SLOTS * TARGET_BYTES_A_SLOT
    stored_in_a_task = max(scanning.TASK_BYTES // 4, nbytes // scanning.MOST_TASKS)
    tasks = -(-nbytes // stored_in_a_task)
    rounds = -(-tasks // TARGET_WORKERS)
    chunks_in_a_task = max(1, stored_in_a_task // (64 << 20))
    scaled = results["scaling"]
    per_byte = scaled["seconds of the processor, asking + busiest worker"]["1 process"] / (
        scaled["slots"] * 2 * (WIDTH + OUTPUTS)
    )
    per_round = chunks_in_a_task * LATENCY + stored_in_a_task / RATE + stored_in_a_task * per_byte
    fixed = ray["ms a question of one task"] / 1000
    asking = ray["ms for each further task"] / 1000
    found = {
        "slots": TARGET_SLOTS,
        "terabytes": nbytes / 1e12,
        "workers": TARGET_WORKERS,
        "tasks": tasks,
        "fixed": round(fixed, 3),
        "asking process": round(asking * tasks, 1),
        "reading": round(rounds * (chunks_in_a_task * LATENCY + stored_in_a_task / RATE), 1),
        "computing": round(rounds * stored_in_a_task * per_byte, 1),
        "seconds": round(fixed + asking * tasks + rounds * per_round, 1),
    }
    keep("extrapolated", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["scaling", "latency", "overhead", "extrapolate"])
    parser.add_argument("--slots", type=int, default=400_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "scaling":
        scaling(arguments.slots)
    else:
        {"latency": latency, "overhead": overhead, "extrapolate": extrapolate}[arguments.what]()


if __name__ == "__main__":
    import cluster

    cluster.main()  # Ray's workers find what is here in the module, and not in __main__
