"""What questions about a small GPT and a CNN cost beside their training, and how that grows with it.

    python bench/questions.py [--steps 30,60,120] [--keep slots,rows] [--networks gpt,cnn] [--dtype float16]

The networks are those of recording_networks.py; samples are drawn from a fixed set, epoch after epoch. Times are the processor's, of all threads,
and are divided by those of the bare training, which is timed before and after. Memory is the peak beyond mapped files and beyond what the process had.

- first: the first question about a store that has just been recorded.
- again: the same question in a new call.
- regrouped: the same answer by another column.
- another: the same for other inputs and another target.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor
from torch.nn import functional as F

import dualform
from dualform.store.memory import give_back
from measure import Peak
from recording_networks import GPT, LENGTH, VOCABULARY, cnn

RESULTS = Path(__file__).parent / "results" / "questions.json"
LABELS = 10


@dataclass(frozen=True)
class Network:
    """A network with the samples that it is trained on."""

    make: Callable[[], torch.nn.Module]
    draw: Callable[[int], tuple[Tensor, Tensor]]
    """A number of samples → inputs, targets."""
    batch: int
    samples: int


def _texts(count: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _images(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 32, 32), torch.randint(0, LABELS, (count,))


NETWORKS = {
    "gpt": Network(GPT, _texts, 16, 256),
    "cnn": Network(cnn, _images, 64, 1024),
}


@dataclass
class Cost:
    """What a question took."""

    of_training: float
    """Processor time, as a part of that of the bare training."""
    megabytes: float
    """Peak memory."""


@dataclass
class Found:
    """What questions about one recording cost."""

    network: str
    keep: str
    steps: int
    training_seconds: float
    store_megabytes: float
    costs: dict[str, Cost] = field(default_factory=dict)


def train(network: Network, steps: int, folder: Path | None, keep: str, dtype: str) -> float:
    """Train, recording into a folder if there is one, and return the processor's time of the steps."""
    torch.manual_seed(0)
    model = network.make()
    inputs, targets = network.draw(network.samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder = None
    if folder is not None:
        recorder = dualform.record(model, optimizer, folder, dtype=dtype, keep=keep)
    began = time.process_time()
    for step in range(steps):
        if step * network.batch % network.samples == 0:
            order = torch.randperm(network.samples)
        ids = order[torch.arange(step * network.batch, (step + 1) * network.batch) % network.samples]
        if recorder is not None:
            recorder.batch(sample_id=ids, label=ids % LABELS)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[ids]).flatten(0, -2), targets[ids].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if recorder is not None:
        recorder.close()
    return time.process_time() - began


class Stopwatch:
    """Times questions about one recording."""

    def __init__(self, found: Found):
        self._found = found

    def __call__(self, name: str, ask: Callable[[], pl.DataFrame]) -> None:
        """Ask, and keep what it took."""
        give_back()  # else what recording has freed would be used again, and not be counted
        with Peak() as peak:
            began = time.process_time()
            answer = ask()
            seconds = time.process_time() - began
        assert answer.height
        share = seconds / self._found.training_seconds
        self._found.costs[name] = Cost(round(share, 4), round(peak.bytes / 1e6))
        print(f"  {name}: {share:.3f} of the training, {peak.bytes / 1e6:.0f} MB", flush=True)


def _logit(unit: int) -> Callable[[Any], Tensor]:
    """The logit of one unit, of a language model at the last position."""

    def target(output: Tensor) -> Tensor:
        last = output[:, -1] if output.dim() == 3 else output
        return last[:, unit]

    return target


def ask(network: Network, folder: Path, found: Found) -> None:
    """Ask all questions about a recording."""
    timed = Stopwatch(found)
    model = network.make()
    torch.manual_seed(1)
    inputs, _ = network.draw(2)
    first = inputs[:1]
    other = inputs[1:]
    dual = dualform.open(folder, model)
    contributions = dual.contributions(first, target=_logit(7))
    timed("contributions, first", lambda: contributions.top(10, by="sample_id"))
    timed("contributions, regrouped", lambda: contributions.total("label"))
    timed("contributions, again", lambda: dual.contributions(first, target=_logit(7)).top(10, by="sample_id"))
    timed("contributions, another", lambda: dual.contributions(other, target=_logit(3)).top(10, by="sample_id"))

    dual = dualform.open(folder, model)
    influence = None

    def first_influence() -> pl.DataFrame:
        nonlocal influence
        influence = dual.influence(first, target=_logit(7))
        return influence.top(10, by="sample_id")

    timed("influence, first", first_influence)
    assert influence is not None
    timed("influence, regrouped", lambda: influence.total("label"))
    timed("influence, again", lambda: dual.influence(first, target=_logit(7)).top(10, by="sample_id"))
    timed("influence, another", lambda: dual.influence(other, target=_logit(3)).top(10, by="sample_id"))


def measure(name: str, keep: str, steps: int, dtype: str) -> Found:
    """Train, record and ask."""
    network = NETWORKS[name]
    folder = Path(tempfile.mkdtemp(prefix="dualform-"))
    try:
        before = train(network, steps, None, keep, dtype)
        train(network, steps, folder / "run", keep, dtype)
        after = train(network, steps, None, keep, dtype)
        stored = sum(file.stat().st_size for file in (folder / "run").rglob("*") if file.is_file())
        found = Found(name, keep, steps, round((before + after) / 2, 3), round(stored / 1e6))
        print(
            f"{name}, keep={keep!r}, {steps} steps: {found.training_seconds:.2f} s, {stored / 1e6:.0f} MB", flush=True
        )
        ask(network, folder / "run", found)
        return found
    finally:
        shutil.rmtree(folder)


def table(results: list[dict[str, Any]]) -> str:
    """The table of docs/scale.md: parts of the training's time by the number of steps, and the most memory."""
    lengths = sorted({result["steps"] for result in results})
    lines = [
        f"| network, keep | question | {' | '.join(f'{steps} steps' for steps in lengths)} | memory |",
        f"|---|---|{'--:|' * (len(lengths) + 1)}",
    ]
    kinds = dict.fromkeys((result["network"], result["keep"]) for result in results)
    for network, keep in kinds:
        of_kind = {r["steps"]: r["costs"] for r in results if (r["network"], r["keep"]) == (network, keep)}
        for question in next(iter(of_kind.values())):
            costs = [of_kind[steps][question] if steps in of_kind else None for steps in lengths]
            cells = [_number(cost["of_training"]) if cost else "" for cost in costs]
            most = max(cost["megabytes"] for cost in costs if cost)
            lines.append(f"| {network.upper()}, {keep} | {question} | {' | '.join(cells)} | {most:.0f} MB |")
    return "\n".join(lines)


def _number(share: float) -> str:
    """Two significant digits, and no more than three behind the point."""
    digits = 3 if share < 0.1 else 2
    return f"{share:.{digits}f}" if math.isfinite(share) else "—"


def _is_same(known: dict[str, Any], found: Found) -> bool:
    return all(known[name] == getattr(found, name) for name in ("network", "keep", "steps"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="30,60,120")
    parser.add_argument("--keep", default="slots,rows")
    parser.add_argument("--networks", default="gpt,cnn")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument(
        "--table", action="store_true", help="print the table of what was measured, and measure nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.out.read_text())["results"]))
        return

    warm_up = Path(tempfile.mkdtemp(prefix="dualform-"))
    train(NETWORKS["gpt"], 1, warm_up / "run", "slots", given.dtype)  # what is imported is no part of a training
    shutil.rmtree(warm_up)
    results = json.loads(given.out.read_text())["results"] if given.out.exists() else []
    for name in given.networks.split(","):
        for keep in given.keep.split(","):
            for steps in map(int, given.steps.split(",")):
                found = measure(name, keep, steps, given.dtype)
                results = [known for known in results if not _is_same(known, found)]
                results.append({**vars(found), "costs": {what: vars(cost) for what, cost in found.costs.items()}})
                given.out.write_text(json.dumps({"dtype": given.dtype, "results": results}, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
