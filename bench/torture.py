"""Run the campaigns of docs/reliability.md: kills, mutations, fuzzing, faults, losses of power, interrupts.

    python bench/torture.py kill [--count 10000] [--minutes 60] [--seed 0]
    python bench/torture.py all

Counts are kept in bench/results/torture-*.json by the version of the code that was tested: a campaign stops when its count is
reached for this version, and goes on where it stopped. Several processes may work at the same time. `--case 17` runs one case again.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from campaigns import runs, system_calls
from campaigns.case import Campaign
from campaigns.results import FOLDER, Results

CAMPAIGNS = ("kill", "mutate", "structured", "fuzz", "faults", "power", "interrupts")
"""Interrupts come last: they use Polars in this process, which does not survive a fork."""
CLAIMED = 5
"""How many cases a process claims at a time."""
SAVED_EVERY = 20.0
"""Counts are written down after so many seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", choices=[*CAMPAIGNS, "all"])
    parser.add_argument("--count", type=int, help="stop when this many are counted for this version of the code")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this much time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case alone, and count nothing")
    parser.add_argument("--results", type=Path, default=FOLDER, help="where counts are kept")
    given = parser.parse_args()
    names = CAMPAIGNS if given.campaign == "all" else (given.campaign,)
    kinds: list[type[Campaign]] = [importlib.import_module(f"campaigns.{name}").Campaign for name in names]
    if any(kind.needs_system_calls for kind in kinds):
        system_calls.preload()
    prepare()
    failed = [kind.name for kind in kinds if not run(kind, given)]
    if failed:
        sys.exit(f"failures in: {', '.join(failed)}")


def prepare() -> None:
    """Import and use once, before any fork, what every child needs; but not Polars, which does not survive a fork."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in ("query.dual", "record.begin", "totals.build"):
        importlib.import_module(f"dualform.{name}")
    np.median([1.0])  # imports more of NumPy
    for kind in runs.KINDS.values():
        model = kind.network()
        optimizer = kind.optimizer(model)
        model(torch.ones(1, runs.FEATURES)).sum().backward()
        optimizer.step()
    # The collector of a child would write to every object of the parent, and so copy its pages: a quarter of a kill's time
    gc.collect()
    gc.freeze()


def run(kind: type[Campaign], given: argparse.Namespace) -> bool:
    """Run one campaign up to its count; gives whether there was no failure."""
    ram = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="dualform-", dir=ram if ram.is_dir() else None))
    try:
        campaign = kind(folder)
        if given.case is None:
            return repeat(campaign, given)
        outcome = campaign.run(random.Random(f"{given.seed} {given.case}"), given.case)
        print(dict(outcome.counts), *outcome.failures, sep="\n")
        return not outcome.failures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def repeat(campaign: Campaign, given: argparse.Namespace) -> bool:
    """Run case after case, until the count or the time is reached."""
    results = Results(campaign.name, campaign.unit, given.results, campaign.sources)
    goal = campaign.goal if given.count is None else given.count
    began = saved = time.monotonic()
    known = results.counts()
    counted: Counter[str] = Counter()
    failures: list[str] = []
    claimed: list[int] = []
    while known[campaign.unit] + counted[campaign.unit] < goal and time.monotonic() - began < 60 * given.minutes:
        claimed = claimed or list(results.claim(given.seed, CLAIMED))
        number = claimed.pop(0)
        outcome = campaign.run(random.Random(f"{given.seed} {number}"), number)
        counted += outcome.counts
        for failure in outcome.failures:
            failures.append(f"seed {given.seed}, case {number}: {failure}")
            print(f"\nFAILED {failures[-1]}", flush=True)
        if time.monotonic() - saved > SAVED_EVERY:
            results.add(counted, failures, time.monotonic() - saved)
            known, counted, failures, saved = results.counts(), Counter(), [], time.monotonic()
            report(campaign, known, goal, time.monotonic() - began)
    results.add(counted, failures, time.monotonic() - saved)
    known = results.counts()
    report(campaign, known, goal, time.monotonic() - began)
    return not known["failures"]


def report(campaign: Campaign, known: Counter[str], goal: int, seconds: float) -> None:
    """Print one line on how far it is."""
    others = ", ".join(f"{count:,} {name}" for name, count in sorted(known.items()) if name != campaign.unit)
    done = f"{known[campaign.unit]:,} of {goal:,} {campaign.unit}"
    print(f"{campaign.name}: {done} after {seconds / 60:.1f} min ({others})", flush=True)


if __name__ == "__main__":
    main()
