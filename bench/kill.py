"""Kill a recording at random moments and look at what is left.

    python bench/kill.py [300]

A child process trains and records; the parent kills it with SIGKILL, opens the store and checks that nothing that was
sealed is lost and that every byte of it is as the manifest says. The state of the page cache survives a kill, so this
tests the order of our own operations; docs/decisions/0006-durability.md argues for loss of power.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import StoreMissingError
from dualform.store.format import load_manifest
from dualform.store.reader import Store


def child(folder: Path, seed: int) -> None:
    """Train for ever, in small chunks, with totals."""
    torch.manual_seed(seed)
    warnings.simplefilter("ignore")
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(64, 12), torch.arange(64) % 4
    resume = folder.exists() and (folder / "manifest.json").exists()
    if resume:
        dual = dualform.open(folder, model)
        state = dual.store.snapshot(dual.store.snapshot_steps()[-1])
        model.load_state_dict({n.removeprefix("model."): state[n] for n in state if n.startswith("model.")})
    at: bool | int = dualform.open(folder).store.snapshot_steps()[-1] if resume else False
    recorder = dualform.record(model, optimizer, folder, resume=at, chunk_bytes=20_000, totals=["label"])
    step = 0
    while True:
        ids = torch.randint(0, 64, (8,))
        recorder.batch(sample_id=ids, label=y[ids])
        optimizer.zero_grad()
        F.cross_entropy(model(x[ids]), y[ids]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        recorder.log(loss=step)
        step += 1
        if step % 50 == 0:
            recorder.seal()


def touch_everything(store: Store) -> None:
    """Read every byte, so that every checksum is compared."""
    rows, slots = store.rows.height, 0
    assert rows == sum(chunk.rows for chunk in store.manifest.chunks)
    assert store.updates["step"].n_unique() == store.end_step
    assert store.log.height == store.end_step
    for layer in store.manifest.layers:
        for chunk in store.chunks(layer.name):
            slots += len(chunk.keys(torch.float32)) + len(chunk.errors(torch.float32))
            assert int(chunk.rows().max()) < rows
    for step in store.snapshot_steps():
        for name in store.snapshot(step):
            store.snapshot(step)[name]


def trial(folder: Path, seed: int, after: float) -> str:
    """One kill; gives what was left."""
    fresh = not folder.exists()
    pid = os.fork()
    if pid == 0:
        try:
            child(folder, seed)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)
    began = time.monotonic()
    sealed = 0
    while time.monotonic() - began < after:
        time.sleep(0.002)
        try:
            manifest = load_manifest(folder)
            # A resumed recording begins at its last snapshot: what came after that is dropped on purpose
            sealed = max(sealed, manifest.end_step if fresh else manifest.snapshots[-1].step)
        except (StoreMissingError, IndexError):
            continue
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the child ended by itself: {status}"
    pid = os.fork()  # Polars must not have been used before a fork, so the check has a process of its own
    if pid == 0:
        left = 3
        try:
            left = OUTCOMES.index(check(folder, sealed))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(left)
    left = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if left not in range(len(OUTCOMES)):
        shutil.copytree(folder, "killed-store", dirs_exist_ok=True)
        sys.exit(f"kill {seed}: the store does not hold; a copy is in killed-store")
    return OUTCOMES[left]


OUTCOMES = ("nothing yet", "an empty store", "sealed steps")


def check(folder: Path, sealed: int) -> str:
    """Does the store hold what was sealed?"""
    try:
        store = Store(folder)
    except StoreMissingError:
        assert sealed == 0, "a store was there and is gone"
        return "nothing yet"
    assert store.end_step >= sealed, f"{sealed} steps were sealed, {store.end_step} are left"
    touch_everything(store)
    dual = dualform.open(folder)
    if store.end_step:
        certificate = dual.verify()
        assert "fail" not in certificate.frame["verdict"].to_list(), str(certificate)
    return "sealed steps" if store.end_step else "an empty store"


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    random.seed(0)
    torch.set_num_threads(1)
    nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()  # what is loaded lazily is loaded once, before any fork
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        for number in range(count):
            if number % 3 == 0:  # else go on with what the last kill left
                shutil.rmtree(folder, ignore_errors=True)
            outcomes[trial(folder, number, random.expovariate(1 / 0.15))] += 1
    print(f"{count} kills: {dict(outcomes)}; nothing sealed was lost, every store opened")
