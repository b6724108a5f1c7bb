"""Cost of recording where people train: a small GPT with AdamW, and a small CNN with BatchNorm, recorded / bare.

    python bench/recording_networks.py [--steps 60] [--rounds 5] [--kinds float16,float32,rows-float16,rows-float32,projected-float16,projected-float32]
        [--networks GPT,CNN]

Bare and recorded trainings take turns within one run, since the machine's speed changes from one second to the next. What counts is the median
of the ratios of neighbouring turns, by the processor's time of all threads: the writer's is part of it, waiting for others is not.
The first steps are not counted: in them the rows are found, by running the model a few times more (0.1 to 0.2 s, once).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dualform

FIRST_STEPS = 2
RESULTS = Path(__file__).parent / "results" / "recording-networks.json"
LENGTH, VOCABULARY = 64, 256


class Block(nn.Module):
    """Attention and a feed-forward network, as GPT-2 has them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.attend(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        added: Tensor = self.narrow(F.gelu(self.widen(self.norm2(x))))
        return x + added


class GPT(nn.Module):
    """A language model of some blocks."""

    def __init__(
        self, vocabulary: int = VOCABULARY, width: int = 192, heads: int = 6, layers: int = 4, length: int = LENGTH
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).expand_as(x)
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))
        return logits


def cnn() -> nn.Module:
    """Three convolutions with BatchNorm for images of 32 × 32 pixels."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


def text() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (16, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "GPT, 4 layers of 192, AdamW": (GPT, text),
    "CNN with BatchNorm, AdamW": (cnn, images),
}


def seconds_of(name: str, kind: str, steps: int, folder: Path) -> float:
    """The processor's time of some steps of a training, bare or recorded, until everything is on the disk. kind: bare, or [keep-]dtype."""
    make, draw = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder = None
    if kind != "bare":
        *keep, dtype = kind.split("-")
        recorder = dualform.record(model, optimizer, folder, dtype=dtype, keep=keep[0] if keep else "slots")
    began = 0.0
    for step in range(FIRST_STEPS + steps):
        if step == FIRST_STEPS:
            began = time.process_time()
        x, y = draw()
        if recorder is not None:
            recorder.batch(sample_id=range(len(x)))
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if recorder is not None:
        recorder.close()
    return time.process_time() - began


def keep(name: str, kind: str, ratio: float, steps: int, rounds: int) -> None:
    """Write a result, in place of the one of this network and kind."""
    results = json.loads(RESULTS.read_text())
    results["ratios"].setdefault(name, {})[kind] = ratio
    results["of"][name] = {"steps": steps, "rounds": rounds}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--kinds", default="float16,float32,rows-float16,rows-float32,projected-float16,projected-float32"
    )
    parser.add_argument("--networks", default="GPT,CNN", help="others keep the results that they have")
    given = parser.parse_args()
    for name in NETWORKS:
        if name.partition(" ")[0].strip(",") not in given.networks.split(","):
            continue
        warm_up = Path(tempfile.mkdtemp(prefix="dualform-"))
        seconds_of(name, "float32", 1, warm_up / "run")  # what is imported is no part of a training
        shutil.rmtree(warm_up)
        for kind in given.kinds.split(","):
            ratios = []
            for _ in range(given.rounds):
                folder = Path(tempfile.mkdtemp(prefix="dualform-"))
                bare = seconds_of(name, "bare", given.steps, folder)
                ratios.append(seconds_of(name, kind, given.steps, folder / "run") / bare)
                shutil.rmtree(folder)
            ratio = round(statistics.median(ratios), 3)
            print(f"{name}, {kind}: {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
            keep(name, kind, ratio, given.steps, given.rounds)


if __name__ == "__main__":
    main()
