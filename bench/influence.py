"""Whitened influence beside attention on the paper's MNIST run: the best 10 of 384,000 rows for 100 test digits.

python bench/influence.py [--run FOLDER] [--repeats 3]     (FOLDER: a recording of that run; else it is made first)
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import dualform
import mnist
from dualform.store.memory import give_back
from dualform.version import __version__

QUERIES, BEST, SEGMENTS = 100, 10, 6
OUT = Path(__file__).parent / "results" / "influence.json"


def recorded(folder: Path) -> None:
    """The paper's run, in float16."""
    images, labels = mnist.data()
    model = mnist.network()
    optimizer = mnist.optimizer_for(model)
    with dualform.record(model, optimizer, folder, dtype="float16") as recorder:
        mnist.train(model, optimizer, images, labels, before=lambda ids, y: recorder.batch(sample_id=ids, label=y))


class Memory:
    """The most memory of our own (not mapped files) while something runs, sampled."""

    def __enter__(self) -> Memory:
        self._stop = threading.Event()
        self.before = self.most = _own()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.most = max(self.most, _own())

    @property
    def grown(self) -> int:
        return self.most - self.before


def _own() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock, and of all cores together."""
    clock, cores = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - cores


def measure(folder: Path, repeats: int) -> dict[str, object]:
    test, _ = mnist.data("test")
    test = test[:QUERIES]
    dual = dualform.open(folder, mnist.network())

    def attention_scan() -> None:
        for layer in dual.attend(test).values():
            for _ in layer.scores():
                pass

    def attention_best() -> None:
        for layer in dual.attend(test).values():
            layer.best(BEST)

    def influence_scan() -> None:
        for _ in dual.influence(test, segments=SEGMENTS).scores():
            pass

    def influence_best() -> None:
        dual.influence(test, segments=SEGMENTS).best(BEST)

    with Memory() as building:
        first = timed(lambda: dual.influence(test[:1], segments=SEGMENTS))
    give_back()
    with Memory() as asking:  # before anything else has left memory to be used again
        influence_best()
    works: dict[str, Callable[[], object]] = {
        "attention: all weights": attention_scan,
        "attention: best": attention_best,
        "influence: all scores": influence_scan,
        "influence: best": influence_best,
        "influence: queries, without a scan": lambda: dual.influence(test, segments=SEGMENTS),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for work in works.values():  # files are mapped and checked
        work()
    for _ in range(repeats):  # side by side: the machine is not always equally fast
        for name, work in works.items():
            found[name].append(timed(work))
    cores = {name: statistics.median(one for _, one in times) for name, times in found.items()}
    return {
        "version": __version__,
        "queries": QUERIES,
        "segments": SEGMENTS,
        "threads": torch.get_num_threads(),
        "first question, which builds the curvature: seconds of the clock, of all cores": first,
        "seconds of the clock, of all cores": found,
        "median seconds of all cores": cores,
        "best by influence / all attention weights": cores["influence: best"] / cores["attention: all weights"],
        "memory beyond mapped files while curvature is built, MB": building.grown / 1e6,
        "the same for the best rows, MB": asking.grown / 1e6,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.run or Path(temporary) / "run"
        if arguments.run is None:
            recorded(folder)
        result = measure(folder, arguments.repeats)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
