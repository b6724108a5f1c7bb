"""How time and disk grow with slots, queries and width: a synthetic store, a figure with measured exponents.

python bench/growth.py [--most 7]    # up to 10^7 slots

Its keys are random and look alike, so bounds tell little: of up to some 1.5 million slots what a fine sketch shows, of more nothing, and
every score is computed. "all scores" computes them in any case: nothing is slower than this.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch

import dualform
import synthetic
from measure import RESULTS, machine

mpl.use("Agg")
import matplotlib.pyplot as plt

FIGURE = RESULTS.parents[1] / "docs" / "growth.png"
Series = dict[int, float]


def seconds(ask: Callable[[], object], rounds: int = 3) -> float:
    """Processor time, the median after one round to warm up."""
    taken = []
    for _ in range(rounds + 1):
        began = time.process_time()
        ask()
        taken.append(time.process_time() - began)
    return statistics.median(taken[1:])


def exponent(series: Series) -> float:
    """The slope of the larger half in a plot with logarithmic axes: what is fixed matters in the smaller half."""
    x, y = np.log(list(series)), np.log(list(series.values()))
    half = len(x) // 2
    return float(np.polyfit(x[half:], y[half:], 1)[0])


def with_store(slots: int, width: int, ask: Callable[[dualform.Dual], dict[str, float]]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        synthetic.write(path, slots=slots, d_in=width, d_out=16, dtype="float16")
        dualform.build_totals(path, "label", kind="keys")
        dual = dualform.open(path)
        return {"disk": float(dual.store.nbytes), **ask(dual)}


def questions(dual: dualform.Dual) -> dict[str, float]:
    one = torch.rand(1, dual.store.layer("map")[1].d_in, generator=torch.Generator().manual_seed(0))
    return {
        "top-10 of one query": seconds(lambda: dual.attend({"map": one})["map"].top(10)),
        "the same, all scores": seconds(lambda: list(dual.attend({"map": one})["map"].scores())),
        "totals by label": seconds(lambda: dual.attend({"map": one})["map"].total("label")),
    }


def by_queries(dual: dualform.Dual, most: int) -> dict[str, Series]:
    found: dict[str, Series] = {"top-10": {}, "totals by label": {}}
    for power in range(most + 1):
        some = torch.rand(10**power, dual.store.layer("map")[1].d_in)
        found["top-10"][10**power] = seconds(lambda some=some: dual.attend({"map": some})["map"].best(10), 1)  # type: ignore[misc]
        found["totals by label"][10**power] = seconds(
            lambda some=some: dual.attend({"map": some})["map"].total("label")  # type: ignore[misc]
        )
    return found


def collected(measured: dict[int, dict[str, float]]) -> dict[str, Series]:
    return {name: {x: some[name] for x, some in measured.items()} for name in next(iter(measured.values()))}


def draw(panels: dict[str, dict[str, Series]]) -> None:
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), layout="constrained")
    for place, (title, lines) in zip(axes, panels.items(), strict=True):
        for name, series in lines.items():
            if name != "disk":
                place.loglog(list(series), list(series.values()), "o-", label=f"{name}: ∝ n^{exponent(series):.2f}")
        if "disk" in lines:
            other = place.twinx()
            disk = lines["disk"]
            other.loglog(list(disk), list(disk.values()), "s--", color="grey", alpha=0.6)
            place.plot([], [], "s--", color="grey", label=f"disk: ∝ n^{exponent(disk):.2f}")
            other.set_ylabel("bytes")
        place.set(xlabel=title, ylabel="seconds of the processor")
        place.legend(fontsize=7, loc="upper left")
        place.grid(alpha=0.3)
        place.margins(y=0.35)
    figure.savefig(FIGURE, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=7, help="up to 10 to the power of this many slots")
    most = parser.parse_args().most
    panels = {
        "slots (width 64)": collected({10**n: with_store(10**n, 64, questions) for n in range(4, most + 1)}),
        "width (20,000 slots)": collected({w: with_store(20_000, w, questions) for w in (64, 256, 1024, 4096)}),
    }
    with tempfile.TemporaryDirectory() as folder:
        synthetic.write(Path(folder) / "run", slots=100_000, d_in=64, d_out=16, dtype="float16")
        dualform.build_totals(Path(folder) / "run", "label", kind="keys")
        panels["queries (100,000 slots, width 64)"] = by_queries(dualform.open(Path(folder) / "run"), 4)
    draw(panels)
    exponents = {title: {name: exponent(series) for name, series in lines.items()} for title, lines in panels.items()}
    for title, found in exponents.items():
        print(title, {name: round(value, 2) for name, value in found.items()})
    out = RESULTS.parent / "results" / "growth.json"
    out.write_text(json.dumps({"machine": machine(), "exponents": exponents, "measured": panels}, indent=1) + "\n")
