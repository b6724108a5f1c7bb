"""Measuring side by side in one run: ours, peers and limits take turns; what counts is the median of their ratios.

Time is by the clock, as one who asks waits for it. That of the processor, of all threads together, is kept beside it: what else happens on
the machine does not count there, but threads that wait for others do, since PyTorch's keep running for a while.
A row of the table is kept in bench/results.json under its name, with the machine, the versions and the number of threads.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import math
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dualform.version import __version__

RESULTS = Path(__file__).parent / "results.json"
Work = Callable[[], object]


@dataclass(frozen=True)
class Bar:
    """Ours / this peer or limit is at most so much; "seconds" and "bytes" are ours alone."""

    against: str
    at_most: float


@dataclass(frozen=True)
class Row:
    """What one comparison found."""

    work: str
    command: str
    seconds: dict[str, float]
    """Medians; the first is ours."""
    ratios: dict[str, float]
    """Ours / each other: medians over the rounds."""
    kinds: dict[str, str]
    """Of each other: "peer" or "limit"."""
    bars: list[Bar]
    rounds: int
    notes: dict[str, Any] = field(default_factory=dict)

    def reached(self, bar: Bar) -> bool:
        """Whether a bar is reached."""
        found = {"seconds": next(iter(self.seconds.values()), math.nan), "bytes": self.notes.get("bytes", math.nan)}
        return bool({**self.ratios, **found}[bar.against] <= bar.at_most)


def compare(
    work: str,
    ours: Work,
    *,
    command: str,
    peers: Mapping[str, Work] | None = None,
    limits: Mapping[str, Work] | None = None,
    bars: list[Bar] | None = None,
    rounds: int = 5,
    notes: Mapping[str, Any] | None = None,
    times: Mapping[str, float] | None = None,
) -> Row:
    """Time ours and the others in turn, after one round to warm up; keep and print the row.

    times: of some others only a part is done; their time counts so many times.
    """
    others = {**(peers or {}), **(limits or {})}
    kinds = {name: "peer" if name in (peers or {}) else "limit" for name in others}
    clock: dict[str, list[float]] = {name: [] for name in ("ours", *others)}
    processor: dict[str, list[float]] = {name: [] for name in clock}
    for number in range(rounds + 1):
        # To and fro: who comes after a walk through gigabytes finds the caches empty
        turns = list({"ours": ours, **others}.items())
        for name, some in turns[:: 1 if number % 2 else -1]:
            gc.collect()
            began, used = time.perf_counter(), time.process_time()
            some()
            if number:
                counted = (times or {}).get(name, 1)
                clock[name].append((time.perf_counter() - began) * counted)
                processor[name].append((time.process_time() - used) * counted)
    (seconds, ratios), beside = _medians(clock), _medians(processor)
    both = {"of the processor": {"seconds": beside[0], "ratios": beside[1]}}
    return keep(Row(work, command, seconds, ratios, kinds, bars or [], rounds, {**(notes or {}), **both}))


def _medians(taken: Mapping[str, list[float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Of the seconds of each, and of ours / each other."""
    pairs = {name: zip(taken["ours"], its, strict=True) for name, its in taken.items() if name != "ours"}
    return (
        {name: statistics.median(its) for name, its in taken.items()},
        {name: statistics.median(a / b for a, b in both) for name, both in pairs.items()},
    )


def keep(row: Row) -> Row:
    """Write a row into the results, in place of the one of that name, and print it."""
    known = results()
    known[row.work] = {**asdict(row), "machine": machine(), "measured": time.strftime("%Y-%m-%d")}
    RESULTS.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    show([row])
    return row


def results() -> dict[str, Any]:
    """Everything measured so far."""
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def rows() -> list[Row]:
    """The rows measured so far."""
    names = Row.__dataclass_fields__
    found = [{name: value for name, value in row.items() if name in names} for row in results().values()]
    return [Row(**{**row, "bars": [Bar(**bar) for bar in row["bars"]]}) for row in found]


def machine() -> dict[str, Any]:
    """Where this was measured."""
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    names: tuple[str, ...] = ("torch", "numpy", "polars", "faiss-cpu", "captum")
    installed = {found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}
    versions = {name: installed[name] for name in names if name in installed}
    return {
        "processor": model[0].split(":")[1].strip() if model else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "dualform": __version__,
        **versions,
    }


def show(found: list[Row]) -> None:
    """A table of ratios."""
    table = Table(show_lines=True)
    for name in ("work", "ours", "beside peers", "beside limits", "bar"):
        table.add_column(name)
    for row in found:
        cells = {
            kind: "\n".join(
                f"{_ratio(row.ratios[name])} {name} ({_time(row.seconds[name])})"
                for name, its in row.kinds.items()
                if its == kind
            )
            for kind in ("peer", "limit")
        }
        bars = "\n".join(f"[{'green' if row.reached(bar) else 'red'}]{_bar(bar)}[/]" for bar in row.bars)
        mine = row.seconds.get("ours")
        said = [] if mine is None else [_time(mine)]
        said += [f"{row.notes['bytes'] / 1e6:.0f} MB"] if "bytes" in row.notes else []
        table.add_row(row.work, "\n".join(said), cells["peer"], cells["limit"], bars)
    Console(width=150).print(table)


def _bar(bar: Bar) -> str:
    if bar.against == "seconds":
        return f"≤ {_time(bar.at_most)}"
    if bar.against == "bytes":
        return f"≤ {bar.at_most / (1 << 20):.0f} MiB"
    return f"≤ {_ratio(bar.at_most)} {bar.against}"


def _ratio(ratio: float) -> str:
    return f"1/{1 / ratio:.3g} ×" if ratio < 0.95 else f"{ratio:.2f} ×"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def stream(tensor: torch.Tensor) -> None:
    """Read every byte once, into 1 MB that stays in the cache: nothing that needs these bytes is faster."""
    words, room = tensor.reshape(-1).view(torch.uint8), torch.empty(1 << 20, dtype=torch.uint8)
    for low in range(0, len(words), len(room)):
        some = words[low : low + len(room)]
        room[: len(some)].copy_(some)


class Peak:
    """The most anonymous memory of this process while inside, beyond what it had before: mapped files do not count."""

    def __enter__(self) -> Peak:
        gc.collect()
        self._first = self.bytes = _anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.bytes = max(self.bytes, _anonymous())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.bytes -= self._first


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


if __name__ == "__main__":
    show(rows())
