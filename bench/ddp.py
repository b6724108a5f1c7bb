"""Cost of recording two ranks of DistributedDataParallel (gloo, CPU): a small GPT and a small CNN, recorded / bare.

    torchrun --nproc-per-node 2 bench/ddp.py [--steps 30] [--rounds 5]

Bare and recorded trainings take turns within the same processes. What counts is the median of the ratios of neighbouring turns, by the
processor's time of all threads of both ranks: writers are part of it, and so is gloo; waiting is not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dualform
from recording_networks import NETWORKS

RESULTS = Path(__file__).parent / "results" / "ddp.json"


def seconds_of(name: str, steps: int, folder: Path | None, dtype: str) -> float:
    """The processor's time of a training on both ranks, until everything is on the disk. folder: None: it is not recorded."""
    make, draw = NETWORKS[name]
    torch.manual_seed(0)
    model = DistributedDataParallel(make())
    torch.manual_seed(distributed.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    distributed.barrier()
    began = time.process_time()
    recorder = None if folder is None else dualform.record(model, optimizer, folder, dtype=dtype)
    for _ in range(steps):
        x, y = draw()
        if recorder is not None:
            recorder.batch(sample_id=range(len(x)))
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if recorder is not None:
        recorder.close()
    total = torch.tensor([time.process_time() - began])
    distributed.all_reduce(total)
    return float(total)


def shared_folder() -> Path:
    """A new folder, the same on both ranks."""
    names = [tempfile.mkdtemp(prefix="dualform-") if distributed.get_rank() == 0 else ""]
    distributed.broadcast_object_list(names)
    return Path(names[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    is_first = distributed.get_rank() == 0
    found: dict[str, dict[str, float]] = {}
    for name in NETWORKS:
        found[name] = {}
        for dtype in ("float16", "float32"):
            ratios = []
            for turn in range(given.rounds + 1):
                folder = shared_folder()
                bare = seconds_of(name, given.steps, None, dtype)
                recorded = seconds_of(name, given.steps, folder / "run", dtype)
                if turn:  # what is imported in the first one is no part of a training
                    ratios.append(recorded / bare)
                distributed.barrier()
                if is_first:
                    shutil.rmtree(folder)
            found[name][dtype] = round(statistics.median(ratios), 3)
            if is_first:
                print(f"{name}, {dtype}: {found[name][dtype]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
    if is_first:
        RESULTS.write_text(json.dumps({"steps": given.steps, "rounds": given.rounds, "ratios": found}, indent=1) + "\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
