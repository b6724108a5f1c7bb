"""The recordings that benchmarks ask: made when first needed, kept in the folder DUALFORM_BENCH (default: runs/bench).

DUALFORM_DATA=… python bench/recordings.py [float32 float16 two-tasks adamw long] [--remove]
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import dualform
import mnist

FOLDER = Path(os.environ.get("DUALFORM_BENCH", Path(__file__).parents[1] / "runs" / "bench"))


@dataclass(frozen=True)
class Recording:
    """One training of the paper's network, batch 128."""

    dtype: str
    steps: int = mnist.STEPS
    tasks: tuple[str, ...] = ("mnist",)
    """Datasets, one after the other, in equal shares of the steps."""
    adamw: bool = False
    totals: tuple[tuple[str, str], ...] = (("label", "both"), ("sample_id", "keys"))


RECORDINGS = {
    "float32": Recording("float32"),
    "float16": Recording("float16"),
    "two-tasks": Recording("float16", tasks=("mnist", "fashion-mnist"), totals=(("task", "both"),)),
    "adamw": Recording("float32", steps=600, adamw=True, totals=()),
    "long": Recording("float16", steps=10 * mnist.STEPS, totals=()),
}
"""float32 and float16 take 6 and 3.5 GB, long 26 GB."""


def recorded(name: str, *, unfinished: bool = False) -> dualform.Dual:
    """A recording, opened with its network; unfinished: as far as it came, if it was stopped."""
    recording, folder = RECORDINGS[name], FOLDER / name
    if not (folder / "finished").exists() and not unfinished:
        FOLDER.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        _make(recording, folder)
        (folder / "finished").write_text(f"{time.perf_counter() - began:.1f} s\n")
    return dualform.open(folder, mnist.network())


def _make(recording: Recording, folder: Path) -> None:
    model = mnist.network()
    optimizer: torch.optim.Optimizer = mnist.optimizer_for(model)
    if recording.adamw:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with dualform.record(model, optimizer, folder, dtype=recording.dtype, overwrite=True) as recorder:
        for task in recording.tasks:
            images, labels = mnist.data("train", task)
            mnist.train(
                model,
                optimizer,
                images,
                labels,
                steps=recording.steps // len(recording.tasks),
                before=_columns(recorder, task),
            )
            recorder.seal()
    for column, kind in recording.totals:
        dualform.build_totals(folder, column, kind=kind)


def _columns(recorder: dualform.Recorder, task: str) -> Callable[[Tensor, Tensor], None]:
    return lambda ids, labels: recorder.batch(sample_id=ids, label=labels, task=task)


def queries(count: int) -> Tensor:
    """The first test images."""
    return mnist.data("test")[0][:count]


def hidden(model: nn.Module, images: Tensor, layer: str) -> Tensor:
    """What a layer of the network gets, (images, d_in)."""
    with torch.no_grad():
        found: Tensor = nn.Sequential(*list(model.children())[: int(layer)])(images)
    return found


def remove(names: Sequence[str]) -> None:
    """Give the disk back."""
    for name in names:
        shutil.rmtree(FOLDER / name, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[n for n in RECORDINGS if n != "long"])
    parser.add_argument("--remove", action="store_true")
    arguments = parser.parse_args()
    if arguments.remove:
        remove(arguments.names)
    else:
        for name in arguments.names:
            print(recorded(name), flush=True)
