"""How long a person waits for the explorer, and what twenty at once do to it.

    python bench/explorer.py RUN        # a run that `dualform explore` opens, with totals by label

Wall time over HTTP, after the first question of each kind; the server's processor time beside it, since machines are shared.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode

TICKS = os.sysconf("SC_CLK_TCK")
CLIENTS = 20


class Served:
    """The explorer in a process of its own."""

    def __init__(self, run: Path):
        words = [sys.executable, "-c", "from dualform.cli import app; app()", "explore", str(run), "--no-browser"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        printed = next(word for word in line.split() if word.startswith("http"))
        self.url, self.token = printed.split("/?token=")

    def get(self, path: str, **parameters: Any) -> Any:
        address = f"{self.url}{path}?{urlencode(parameters)}"
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / TICKS

    def memory(self) -> float:
        """MB that are its own: not mapped from files."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("RssAnon"))


def first_view(served: Served, layers: list[str], number: int) -> None:
    """What the page asks for after a click: the prediction, and each layer's sources at the same time."""
    with ThreadPoolExecutor(len(layers) + 1) as pool:
        asked = [pool.submit(served.get, "/api/prediction", input=f"test:{number}")]
        asked += [pool.submit(served.get, "/api/sources", input=f"test:{number}", layer=layer) for layer in layers]
        for one in asked:
            one.result()


def edited(served: Served, drop: str) -> None:
    """An edit that is answered at once; one that takes long would be refused."""
    served.get("/api/edit", input="test:3", drop=drop)


def _named(served: Served, run: Any, number: int) -> str:
    """A training example, as the page names it: one of those behind a prediction."""
    layer = run["layers"][-1]["name"]
    key = served.get("/api/sources", input=f"test:{number}", layer=layer)["highest"][0]["key"]
    return " AND ".join(_equal(column, value) for column, value in zip(run["by"], key, strict=True))


def _equal(column: str, value: Any) -> str:
    return f'"{column}" = ' + (f"'{value}'" if isinstance(value, str) else str(value))


def measured(served: Served, what: str, asks: list[Any]) -> None:
    walls, before = [], served.cpu()
    for ask in asks:
        began = time.perf_counter()
        ask()
        walls.append(time.perf_counter() - began)
    cpu = (served.cpu() - before) / len(asks)
    print(
        f"{what}: {median(walls):.3f} s wall (median of {len(asks)}; fastest {min(walls):.3f}), {cpu:.3f} s of processor time"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("run", type=Path)
    served = Served(options.parse_args().run)
    try:
        run = served.get("/api/run")
        layers = [layer["name"] for layer in run["layers"]]
        print(
            f"{run['title']}: {run['layers'][0]['slots']:,} slots, {len(layers)} layers; load {os.getloadavg()[0]:.1f}"
        )
        first_view(served, layers, 0)
        edited(served, "label = 0 AND step = 0")
        print(f"memory when warm: {served.memory():.0f} MB")
        measured(served, "first view", [lambda n=n: first_view(served, layers, n) for n in range(1, 6)])
        for group in run["groups"]:
            if group["fast"]:
                drops = [_equal(group["column"], value["value"]) for value in group["values"][:5]]
                measured(
                    served, f"edit by {group['column']}", [lambda drop=drop: edited(served, drop) for drop in drops]
                )
        last = run["steps"] - 1
        for what, drops in {
            "edit of one training example": [_named(served, run, n) for n in range(1, 6)],
            "edit of ten steps": [
                f"step BETWEEN {low} AND {low + 9}" for low in range(last // 5, last // 2, last // 16)
            ],
            "edit of about half of the steps": [f"step < {last // 2 + n}" for n in range(5)],
        }.items():
            measured(served, what, [lambda drop=drop: edited(served, drop) for drop in drops])
        with ThreadPoolExecutor(CLIENTS) as pool:
            began = time.perf_counter()
            list(pool.map(lambda n: first_view(served, layers, 100 + n), range(CLIENTS)))
            print(f"{CLIENTS} clients at once: no errors, the last one waited {time.perf_counter() - began:.1f} s")
        for _ in range(2):
            with ThreadPoolExecutor(CLIENTS) as pool:
                list(pool.map(lambda n: first_view(served, layers, 200 + n), range(CLIENTS)))
        print(f"memory after {3 * CLIENTS} views: {served.memory():.0f} MB")
    finally:
        served.process.terminate()


if __name__ == "__main__":
    main()
