"""What recording a language model costs, and how fast a prompt is answered.

DUALFORM_DATA=… python bench/language.py cost aesop [--size paper] [--steps 8] [--predicted 1]
python bench/language.py passages RUN --prompt "…"      (a recording with totals, as dualform paper wikitext-2 leaves it)

cost: three copies of a model train in turn, a step each: bare, with totals per position, with all slots in float16. passages: the
answer beside reading the totals once, in one run, with the memory that it takes beyond mapped files (sampled).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualform.paper.language.asking import Recorded
from dualform.paper.language.settings import settings_for
from dualform.paper.language.text import load
from dualform.paper.language.ways import compare


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
    before = _own_memory()
    with _Peak() as peak:
        opened, recorded = _timed(lambda: Recorded(run))
        first, _ = _timed(lambda: recorded.ask(prompt))
        sums = recorded.dual.store.totals()["0.0.keys"]
        reads, answers = [], []
        for _ in range(repeats):
            reads.append(_timed(lambda: sum(float(sums[n : n + 4096].sum()) for n in range(0, len(sums), 4096)))[0])
            answers.append(_timed(lambda: recorded.ask(prompt))[0])
    return {
        "totals": f"{tuple(sums.shape)}, {sums.nbytes / 1e9:.2f} GB",
        "opening": round(opened, 3),
        "first answer, with checksums": round(first, 3),
        "reading the totals once": round(min(reads), 3),
        "answer, warm": round(min(answers), 3),
        "answer / reading": round(min(answers) / min(reads), 2),
        "peak memory beyond mapped files, GB": round((peak.most - before) / 1e9, 3),
    }


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def _own_memory() -> int:
    """Bytes of this process that are not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class _Peak:
    """The most memory while inside, looked at every few milliseconds."""

    def __enter__(self) -> _Peak:
        self.most, self._over = _own_memory(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.003):
            self.most = max(self.most, _own_memory())

    def __exit__(self, *problem: object) -> None:
        self._over.set()
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    asked = commands.add_parser("cost")
    asked.add_argument("text", choices=["aesop", "wikitext-2"])
    asked.add_argument("--size", default="paper")
    asked.add_argument("--steps", type=int, default=8)
    asked.add_argument("--predicted", type=float, default=1.0)
    asked = commands.add_parser("passages")
    asked.add_argument("run", type=Path)
    asked.add_argument("--prompt", required=True)
    asked.add_argument("--repeats", type=int, default=3)
    told = parser.parse_args()
    if told.command == "cost":
        found = cost(told.text, told.size, told.steps, told.predicted)
    else:
        found = passages(told.run, told.prompt, told.repeats)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
