"""Cost of recording: the paper's MNIST training with a recorder / without, in one run.

DUALFORM_DATA=… python bench/recording.py [--steps 6000] [--stretch 100] [--repeats 1] [--kinds bare,float16,float32]

The machine's own speed changes from one second to the next, so the trainings take turns, a stretch of steps each, to and fro. What counts is the
processor's time of all threads: the writer's is part of it, waiting for others is not. After each stretch the writer ends what it has begun,
and the last stretch lasts until the recording is closed. Imports, PyTorch's or ours, are no part of a training (ours take 0.2 s).
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

BARS = {"float16": 1.25, "float32": 1.3}


record = dualform.record  # imports what it needs


class Training:
    """One training, bare or recorded."""

    def __init__(self, kind: str, folder: Path):
        model = mnist.network()
        optimizer = mnist.optimizer_for(model)
        self._recorder = None
        self.seconds: list[float] = []
        began = time.process_time()
        if kind == "bare":
            self._steps = mnist.training(model, optimizer, IMAGES, LABELS)
        else:
            recorder = self._recorder = record(model, optimizer, folder, dtype=kind)
            self._steps = mnist.training(
                model,
                optimizer,
                IMAGES,
                LABELS,
                before=lambda ids, labels: recorder.batch(sample_id=ids, label=labels),
            )
        self._begun = time.process_time() - began

    def go_on(self, steps: int, *, last: bool) -> None:
        """Train for a stretch."""
        began = time.process_time()
        for _ in range(steps):
            next(self._steps)
        if self._recorder is not None:
            if last:
                self._recorder.close()
            else:
                self._wait_for_writer()
        self.seconds.append(time.process_time() - began + self._begun)
        self._begun = 0.0

    def _wait_for_writer(self) -> None:
        """Wait until the writer has ended what it has begun, so that its time is not counted as another training's."""
        assert self._recorder is not None
        writer = self._recorder._recording._writer
        background = writer._background
        while writer._inbox.qsize() or background._steps_bytes >= background._chunk_bytes:
            time.sleep(0.001)


def measured(kinds: list[str], steps: int, stretch: int) -> dict[str, list[float]]:
    """The seconds of each stretch of each training."""
    with tempfile.TemporaryDirectory() as folder:
        trainings = {kind: Training(kind, Path(folder) / kind) for kind in kinds}
        for number, done in enumerate(range(0, steps, stretch)):
            for kind in kinds[:: -1 if number % 2 else 1]:
                some = min(stretch, steps - done)
                trainings[kind].go_on(some, last=done + some == steps)
            if (done + some) % (10 * stretch) == 0 or done + some == steps:
                line = "  ".join(
                    f"{kind} {1e3 * sum(one.seconds) / (done + some):.2f}" for kind, one in trainings.items()
                )
                print(f"{done + some:6} steps, ms a step: {line}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir()
    return {kind: one.seconds for kind, one in trainings.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--stretch", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--kinds", default="bare,float16,float32")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    IMAGES, LABELS = mnist.data()
    kinds = arguments.kinds.split(",")
    runs = [measured(kinds, arguments.steps, arguments.stretch) for _ in range(arguments.repeats)]
    whole = {kind: statistics.median(sum(run[kind]) for run in runs) for kind in kinds}
    pairs = {
        kind: [a / b for run in runs for a, b in zip(run[kind], run["bare"], strict=True)]
        for kind in kinds
        if kind != "bare"
    }
    ratios = {kind: statistics.median(sum(run[kind]) / sum(run["bare"]) for run in runs) for kind in pairs}
    print(
        f"\n{arguments.steps} steps, all together, {arguments.repeats} times; recording / bare (least to largest stretch):"
    )
    for kind, ratio in ratios.items():
        print(f"  {kind:8} {ratio:.3f} ({min(pairs[kind]):.2f} to {max(pairs[kind]):.2f})")
        keep(
            Row(
                f"training with recording, {kind}, {arguments.steps} steps",
                f"python bench/recording.py --steps {arguments.steps} --repeats {arguments.repeats}",
                {"ours": whole[kind], "bare training": whole["bare"]},
                {"bare training": ratio},
                {"bare training": "limit"},
                [Bar("bare training", BARS[kind])],
                arguments.repeats,
                {"stretches": {"steps": arguments.stretch, "ratios": [round(pair, 3) for pair in pairs[kind]]}},
            )
        )
    if arguments.out:
        arguments.out.write_text(json.dumps({"steps": arguments.steps, "seconds": runs, "ratios": pairs}, indent=1))
