"""What recording a language model costs, and how fast a prompt is answered.

DUALFORM_DATA=… python bench/language.py cost aesop [--size paper] [--steps 8] [--predicted 1]
DUALFORM_DATA=… python bench/language.py passages [RUN] --prompt "…"

cost: three copies of a model train in turn, a step each: bare, with totals per position, with all slots in float16. passages: the
answer beside reading the totals once, in one run, as the command gives it (NumPy) and as the library does; then the whole command as
a user starts it, with the memory that it takes beyond mapped files (sampled). The first command of all warms the system's file cache.
RUN: a recording with totals, as dualform paper wikitext-2 leaves it; without it, one as large is made of random sums (3.3 GB).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

import dualform
from dualform.language.description import COLUMN, Description, write_description
from dualform.language.from_totals import find_totals
from dualform.language.recorded import RecordedLanguageModel
from dualform.store.files import folder_at
from dualform.store.format import Grouping, read_manifest
from dualform.store.writer import NewTotals, write_totals
from dualform_paper.language.corpora import load
from dualform_paper.language.recording import options as recording_options
from dualform_paper.language.settings import settings_for
from dualform_paper.language.training import adam, batch_of, initial_model
from dualform_paper.language.ways import compare


def cost(name: str, size: str, steps: int, predicted: float) -> dict[str, Any]:
    text, settings = load(name), replace(settings_for(name, size), predicted=predicted)
    with tempfile.TemporaryDirectory() as folder:
        found = compare(text, settings, Path(folder), steps)
    ratios = {
        f"{way}/bare, {of}": round(found.ratio(way, of), 3)
        for way in ("totals", "slots")
        for of in ("processor", "seconds")
    }
    seconds = {way: round(one.seconds / steps, 3) for way, one in found.by.items()}
    return {**ratios, "seconds a step": seconds, "slots, MB a step": round(found.slot_bytes / 1e6, 1)}


def passages(run: Path, prompt: str, repeats: int) -> dict[str, Any]:
    commands = [_command(run, prompt) for _ in range(repeats + 1)][1:]
    recorded, totals = RecordedLanguageModel(run), find_totals(run)
    assert totals is not None, f"{run} has no totals per position"
    first, _ = _timed(lambda: totals.ask(prompt))
    recorded.ask(prompt)
    sums = recorded.dual.store.totals()["0.0.keys"].numpy()
    reads, answers, library = [], [], []
    for _ in range(repeats):
        reads.append(_timed(lambda: sum(float(sums[n : n + 4096].sum()) for n in range(0, len(sums), 4096)))[0])
        answers.append(_timed(lambda: totals.ask(prompt))[0])
        library.append(_timed(lambda: recorded.ask(prompt))[0])
    best = min(commands, key=lambda one: one["seconds"])
    return {
        "totals": f"{tuple(sums.shape)}, {sums.nbytes / 1e9:.2f} GB",
        "the whole command, seconds": [round(one["seconds"], 2) for one in commands],
        "its processor time, user and system": [round(best["user"], 2), round(best["system"], 2)],
        "its peak memory beyond mapped files, GB": round(max(one["memory"] for one in commands) / 1e9, 3),
        "reading the totals once": round(min(reads), 3),
        "first answer of a process, with checksums": round(first, 3),
        "later answers": round(min(answers), 3),
        "first answer / reading": round(first / min(reads), 2),
        "later answer / reading": round(min(answers) / min(reads), 2),
        "later answers of the library (PyTorch)": round(min(library), 3),
        "load of the machine": [round(one, 1) for one in os.getloadavg()],
    }


def made(folder: Path) -> None:
    """A recording as a training on all of WikiText-2 leaves it, of random sums: positions in the order of their first visit."""
    text = load("wikitext-2")
    settings = settings_for("wikitext-2", preset="text")  # reads every position
    model = initial_model(settings, len(text.vocabulary))
    positions = len(text.train)
    options = recording_options(text, settings, "totals")
    with dualform.record(model, adam(model, settings), folder, **options):
        write_description(folder, Description(text, model.shape))
    steps = (batch_of(text.train.ids, n, settings).positions for n in itertools.count())
    order = np.concatenate([next(steps).flatten() for _ in range(-(-positions // settings.tokens) + 1)])
    places = order[np.sort(np.unique(order, return_index=True)[1])]
    keys, generator = torch.empty(positions, model.shape.key), torch.Generator().manual_seed(0)
    for some in torch.split(keys, 100_000):
        some.normal_(generator=generator)
    tensors = {
        "0.0.keys": keys,
        "0.0.visits": torch.full((positions,), 3),
        "negative.0": torch.ones(1, dtype=torch.bool),
    }
    groups = pl.DataFrame({COLUMN: places})
    manifest = read_manifest(folder_at(folder))
    grouping = Grouping((COLUMN,), "keys")
    write_totals(folder_at(folder), manifest, NewTotals(manifest.end_step, positions, [grouping], tensors, [groups]))


def _command(run: Path, prompt: str) -> dict[str, float]:
    """`dualform passages` as a process of its own."""
    arguments = [sys.executable, "-m", "dualform", "passages", str(run), "--prompt", prompt]
    began, most = time.perf_counter(), 0
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as process:
        while (over := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            most = max(most, _own_memory(process.pid))
            time.sleep(0.002)
        process.returncode = os.waitstatus_to_exitcode(over[1])
    seconds = time.perf_counter() - began
    assert process.returncode == 0, "the command has failed"
    return {"seconds": seconds, "user": over[2].ru_utime, "system": over[2].ru_stime, "memory": most}


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def _own_memory(process: int) -> int:
    """Bytes of a process that are not pages of files; 0 if it has ended."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    asked = commands.add_parser("cost")
    asked.add_argument("text", choices=["aesop", "wikitext-2"])
    asked.add_argument("--size", default="paper")
    asked.add_argument("--steps", type=int, default=8)
    asked.add_argument("--predicted", type=float, default=1.0)
    asked = commands.add_parser("passages")
    asked.add_argument("run", type=Path, nargs="?")
    asked.add_argument("--prompt", required=True)
    asked.add_argument("--repeats", type=int, default=3)
    told = parser.parse_args()
    if told.command == "cost":
        found = cost(told.text, told.size, told.steps, told.predicted)
    elif told.run is not None:
        found = passages(told.run, told.prompt, told.repeats)
    else:
        with tempfile.TemporaryDirectory() as folder:
            made(Path(folder) / "run")
            found = passages(Path(folder) / "run", told.prompt, told.repeats)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
