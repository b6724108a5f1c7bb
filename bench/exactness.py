"""Is the dual form exact? Each network with each optimizer: the certificate, a moment in the middle, a mask and its opposite.

python bench/exactness.py [--steps 300] [--networks mlp,cnn,…] [--optimizers AdamW,…] [--dtypes float32,float64] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform

ROWS, SAMPLES, CLASSES, LENGTH, WORDS = 16, 96, 4, 9, 23
TOLERANCE = {"float32": 1e-5, "float64": 1e-11}


class Cnn(nn.Module):
    """Two convolutions with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(8 * 2 * 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 64) → logits."""
        output: Tensor = self.head(self.body(x.reshape(len(x), 1, 8, 8)))
        return output


class Recurrent(nn.Module):
    """A language model: embedding, recurrent layers, decoder."""

    def __init__(self, kind: Any, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 12)
        self.rnn = kind(12, 16, layers, batch_first=True)
        self.decoder = nn.Linear(16, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """(rows, length) → logits of the next words."""
        output: Tensor = self.decoder(self.rnn(self.embedding(words))[0])
        return output


class Encoder(nn.Module):
    """A Transformer encoder of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        """(rows, length) → logits."""
        output: Tensor = self.head(self.layers(self.embedding(words)).mean(1))
        return output


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) → the same."""
        rows, length, width = x.shape
        q, k, v = (
            t.reshape(rows, length, self.heads, -1).transpose(1, 2) for t in self.attention(self.before(x)).chunk(3, -1)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(found.transpose(1, 2).reshape(rows, length, width))
        output: Tensor = x + self.down(F.gelu(self.up(self.after(x))))
        return output


class Gpt(nn.Module):
    """A decoder with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16)
        self.blocks = nn.Sequential(Block(16, 2), Block(16, 2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """(rows, length) → logits of the next words."""
        places = torch.arange(words.shape[1]).expand(len(words), -1)
        output: Tensor = self.head(self.norm(self.blocks(self.words(words) + self.places(places))))
        return output


class Lion(torch.optim.Optimizer):
    """Lion as lion-pytorch has it; PyTorch has none."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move each weight by the sign of an average."""
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(average.mul(beta1).add_(p.grad, alpha=1 - beta1).sign_(), alpha=-lr)
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def mlp() -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "MLP": (mlp, "vectors"),
    "CNN": (Cnn, "vectors"),
    "LSTM": (lambda: Recurrent(nn.LSTM, 1), "words"),
    "GRU": (lambda: Recurrent(nn.GRU, 2), "words"),
    "Transformer": (Encoder, "sentences"),
    "GPT": (Gpt, "words"),
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=1e-3, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "Lion": lambda p: Lion(p, lr=3e-4, weight_decay=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=1e-2),
}


@dataclass(frozen=True)
class Cell:
    """One network with one optimizer: of each check the worst parameter."""

    network: str
    optimizer: str
    dtype: str
    parameters: int
    failed: list[str]
    gap: float
    floors: float
    """The worst distance in rounding floors, of those parameters whose gap is above the tolerance."""
    middle: float
    middle_floors: float
    mask: float
    mask_floors: float
    logit: float
    """The worst remainder of the last layer's contributions, relative."""
    loss: float
    seconds: float
    mask_worst: str = ""
    """The parameter whose masks add up worst, in rounding floors."""


def data(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs and targets that can be learnt."""
    torch.manual_seed(0)
    if kind == "vectors":
        inputs = torch.randn(SAMPLES, 64, dtype=dtype)
        return inputs, inputs[:, :CLASSES].argmax(1)
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH))
    return words, (words.sum(1) % CLASSES if kind == "sentences" else (words * 3 + 1) % WORDS)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over rows, or over rows and positions."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def worst(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    moved: Mapping[str, float],
    size: Mapping[str, float],
    steps: int,
    dtype: str,
) -> tuple[float, float, str]:
    """The largest gap; of those above the tolerance, the largest distance in rounding floors, and whose it is."""
    gaps, floors, names = [0.0], [0.0], [""]
    unit = torch.finfo(getattr(torch, dtype)).eps / 2
    for name, value in found.items():
        value = value.detach()
        distance = float((value.double() - expected[name].double()).norm())
        gap = distance / moved[name] if moved[name] else 0.0
        gaps.append(gap)
        if gap > TOLERANCE[dtype]:
            floors.append(distance / (unit * steps**0.5 * size[name]))
            names.append(name)
    return max(gaps), max(floors), names[floors.index(max(floors))]


def norms(values: Mapping[str, Tensor]) -> dict[str, float]:
    """How large each is."""
    return {name: float(value.detach().double().norm()) for name, value in values.items()}


def apart(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, float]:
    """How far they are apart."""
    return {name: float((some[name].detach().double() - others[name].detach().double()).norm()) for name in some}


def cell(network: str, optimizer: str, dtype: str, steps: int, folder: Path) -> Cell:
    """Train, record, check."""
    build, kind = NETWORKS[network]
    kindly: Any = getattr(torch, dtype)
    inputs, targets = data(kind, kindly)
    torch.manual_seed(1)
    model = build().to(kindly)
    optimizers = OPTIMIZERS[optimizer](list(model.parameters()))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers, steps)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    middle: dict[str, Tensor] = {}
    began = time.perf_counter()
    with dualform.record(model, optimizers, folder) as recorder:
        for step in range(steps):
            ids = torch.randint(0, SAMPLES, (ROWS,), generator=generator)
            recorder.batch(sample_id=ids, half=ids % 2)
            optimizers.zero_grad()
            loss = loss_of(model(inputs[ids]), targets[ids])
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizers.step()
            schedule.step()
            if step + 1 == steps // 2:
                middle = {name: p.detach().clone() for name, p in model.named_parameters()}
    last = {name: p.detach().clone() for name, p in model.named_parameters()}
    dual = dualform.open(folder, model)
    certificate = dual.verify().frame
    failed = certificate.filter(pl.col("verdict") != "pass")["parameter"].to_list()
    above = certificate.filter(pl.col("gap") > TOLERANCE[dtype])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # running statistics come from a snapshot
        half = dict(dual.at(steps // 2).model().named_parameters())
        kept = dict(dual.masked(only=pl.col("half") == 0, read="kept").named_parameters())
        dropped = dict(dual.masked(drop=pl.col("half") == 0, read="kept").named_parameters())
        nothing = dict(dual.masked(only=pl.lit(False), read="kept").named_parameters())
    # A mask and its opposite may each be far larger than their sum: a bias before a normalisation, whose true gradient is zero
    parts_moved = {n: apart(kept, nothing)[n] + apart(dropped, nothing)[n] for n in kept}
    parts_size = {n: norms(kept)[n] + norms(dropped)[n] for n in kept}
    both = {name: kept[name].double() + dropped[name].double() - nothing[name].double() for name in kept}
    target = (lambda output: output[:, -1, 3]) if kind == "words" else 1
    name = dual.layers[-1]
    parts = dual.contributions(inputs[:5], target=target)[name].parts()
    size = parts.select((pl.col("initial").abs() + pl.col("slots").abs()).max()).item()
    shutil.rmtree(folder)
    masks = worst(both, last, parts_moved, parts_size, steps, dtype)
    return Cell(
        network, optimizer, dtype, certificate.height, failed,
        float(certificate["gap"].max()), float((above["distance"] / above["floor"]).max() or 0.0),  # type: ignore[arg-type]
        *worst(half, middle, apart(middle, first), norms(middle), steps // 2, dtype)[:2], *masks[:2],
        float(parts["remainder"].abs().max()) / size, float(loss.detach()), time.perf_counter() - began,  # type: ignore[arg-type]
        masks[2],
    )  # fmt: skip


INTRODUCTION = """# Exactness, measured

Written by `python bench/exactness.py --out bench/results/exactness.json --page docs/exactness.md` (torch {torch}, {steps} steps each,
batches of {rows}, a cosine schedule, clipping by norm, one thread).

Each network is trained with each optimizer while it is recorded, and then checked in four ways:

- **verify**: every parameter put together from its slots, against the trained one;
- **middle**: `at({middle}).model()` against the weights that training had then;
- **masks**: `masked(only=half)` + `masked(drop=half)` − `masked(only=nothing)` against the trained weights;
- **logit**: the contributions of the last layer and its initial part, summed, against the model's own logit, for five inputs.

A figure is the worst of all parameters: ‖difference‖ / ‖W_T − W_0‖; for masks, relative to how far the two masked networks moved (a
bias before a normalisation has no true gradient, so its two halves are far larger than their sum); for the logit, relative to the
sizes of its parts. Training rounds at each step, so even an ideal dual form differs by about one *rounding floor*: u·√steps·‖W‖ and, for
verify, what the audit measured of the rounding of gradients. A parameter passes verify within 4 floors; middle and masks pass if the
figure is at most {float32:.0e} in float32 and {float64:.0e} in float64, or the difference within 4 floors of the first kind. Where a figure
is above that, the floors stand in brackets. The logit passes at 1e-4.

| network | what it is | parameters |
|---|---|--:|
"""
ABOUT = {
    "MLP": "64-32-32-4, ReLU and tanh",
    "CNN": "two convolutions (the second in groups), batch and group normalisation, pooling",
    "LSTM": "language model: embedding, one LSTM layer, decoder",
    "GRU": "language model: embedding, two GRU layers, decoder",
    "Transformer": "embedding and two `nn.TransformerEncoderLayer`s with dropout, mean over positions",
    "GPT": "decoder of two blocks with causal attention, tied embeddings, learnt positions",
}


def page(cells: list[Cell], steps: int) -> str:
    """What was measured, as a page."""
    text = INTRODUCTION.format(
        torch=torch.__version__.split("+")[0], steps=steps, rows=ROWS, middle=steps // 2, **TOLERANCE
    )
    known = {cell.network: cell.parameters for cell in cells}
    text += "".join(f"| {name} | {ABOUT[name]} | {count} |\n" for name, count in known.items())
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        text += f"\n## {dtype}\n\n| network | optimizer | verify | middle | masks | logit | verdict |\n|---|---|--:|--:|--:|--:|---|\n"
        for one in (cell for cell in cells if cell.dtype == dtype):
            figures = [
                f"{gap:.0e}" + (f" ({floors:.1f})" if gap > TOLERANCE[dtype] else "")
                for gap, floors in ((one.gap, one.floors), (one.middle, one.middle_floors), (one.mask, one.mask_floors))
            ]
            text += f"| {one.network} | {one.optimizer} | {' | '.join(figures)} | {one.logit:.0e} | {verdict(one)} |\n"
    missed = [one for one in cells if verdict(one) != "pass"]
    return text + f"\n{len(cells) - len(missed)} of {len(cells)} cells pass.\n"


def verdict(one: Cell) -> str:
    """Whether a cell keeps all its promises."""
    bound = TOLERANCE[one.dtype]
    checks = {
        "verify": not one.failed,
        "middle": one.middle <= bound or one.middle_floors <= 4,
        "masks": one.mask <= bound or one.mask_floors <= 4,
        "logit": one.logit <= 1e-4,
    }
    missed = [name for name, passed in checks.items() if not passed]
    return "pass" if not missed else f"**misses {', '.join(missed)}** {' '.join(one.failed) or one.mask_worst}".strip()


def known_cells(path: Path, steps: int) -> list[Cell]:
    """What was measured before, with this many steps."""
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    return [Cell(**one) for one in document["cells"]] if document["steps"] == steps else []


def with_cell(cells: list[Cell], found: Cell) -> list[Cell]:
    """The cells in the order of the page, with one that is new or was measured again."""
    place = {
        (dtype, network, optimizer): None for dtype in TOLERANCE for network in NETWORKS for optimizer in OPTIMIZERS
    }
    by_place = {(one.dtype, one.network, one.optimizer): one for one in (*cells, found)}
    return [by_place[key] for key in place if key in by_place]


def main() -> None:
    """All cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--dtypes", default="float32,float64")
    parser.add_argument(
        "--out", type=Path, help="keep what was measured here; cells of as many steps that are there stay"
    )
    parser.add_argument("--page", type=Path, help="write a page from what was measured")
    parser.add_argument("--from", dest="known", type=Path, help="write the page from an earlier --out; measure nothing")
    arguments = parser.parse_args()
    if arguments.known:
        document = json.loads(arguments.known.read_text())
        arguments.page.write_text(page([Cell(**one) for one in document["cells"]], document["steps"]))
        return
    cells = [] if arguments.out is None else known_cells(arguments.out, arguments.steps)
    torch.set_num_threads(1)  # the networks are small
    with tempfile.TemporaryDirectory() as temporary:
        for dtype in arguments.dtypes.split(","):
            for network in arguments.networks.split(","):
                for optimizer in arguments.optimizers.split(","):
                    found = cell(network, optimizer, dtype, arguments.steps, Path(temporary) / "run")
                    cells = with_cell(cells, found)
                    print(
                        f"{dtype} {network:12} {optimizer:9} verify {found.gap:.1e} ({found.floors:.1f} floors)  middle "
                        f"{found.middle:.1e} ({found.middle_floors:.1f})  masks {found.mask:.1e} ({found.mask_floors:.1f})  logit "
                        f"{found.logit:.1e}  loss {found.loss:.2f}  {found.seconds:.0f} s {' '.join(found.failed)}",
                        flush=True,
                    )
                    if arguments.out:
                        document = {"steps": arguments.steps, "cells": [asdict(one) for one in cells]}
                        arguments.out.write_text(json.dumps(document, indent=1))
    if arguments.page:
        arguments.page.write_text(page(cells, arguments.steps))


if __name__ == "__main__":
    main()
