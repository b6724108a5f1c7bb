"""A small Transformer language model, recorded: the network of remark 3.5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualform
from dualform.language.text import Ids, Text
from dualform.progress import Progress, ignore_progress
from dualform_paper.language.reading import batch

PLACE = "place"
"""The column with each slot's position in the training text."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides the outcome."""

    width: int = 96
    heads: int = 4
    blocks: int = 3
    window: int = 64
    """So many tokens are read at a time."""
    batch: int = 24
    steps: int = 1500
    lr: float = 2e-3
    clip: float = 1.0
    seed: int = 0


class Block(nn.Module):
    """Attention and a small network, each added to what comes in."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor, *, shares: bool = False) -> tuple[Tensor, Tensor | None]:
        """x (rows, time, width), mask (rows · heads, time, time); with shares, also the softmax's, (rows, heads, time, time)."""
        read = self.before_attention(x)
        found, weights = self.attention(
            read, read, read, attn_mask=mask, need_weights=shares, average_attn_weights=False
        )
        x = x + found
        return x + self.network(self.before_network(x)), weights


class Transformer(nn.Module):
    """Tokens (rows, time) → logits of the next ones (rows, time, vocabulary).

    How far back a token is enters the softmax alone (ALiBi, Press et al. 2022): a key of the first level says what was read, and nothing
    about where in its window it stood.
    """

    def __init__(self, vocabulary: int, settings: Settings):
        super().__init__()
        self.heads = settings.heads
        self.embedding = nn.Embedding(vocabulary, settings.width)
        self.blocks = nn.ModuleList(Block(settings.width, settings.heads) for _ in range(settings.blocks))
        self.norm, self.decoder = nn.LayerNorm(settings.width), nn.Linear(settings.width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Run over some tokens."""
        logits, _ = self._run(tokens, shares=False)
        return logits

    def shares(self, tokens: Tensor) -> list[Tensor]:
        """The second level: for each block the softmax over what came before, (rows, heads, time, time)."""
        return self._run(tokens, shares=True)[1]

    def _run(self, tokens: Tensor, *, shares: bool) -> tuple[Tensor, list[Tensor]]:
        x, found = self.embedding(tokens), []
        mask = distances(tokens.shape[1], self.heads).to(x).repeat(len(tokens), 1, 1)
        for block in self.blocks:
            x, weights = block(x, mask, shares=shares)
            if weights is not None:
                found.append(weights)
        return self.decoder(self.norm(x)), found


def distances(time: int, heads: int) -> Tensor:
    """(heads, time, time): what is taken off for each step back, half as much from head to head; −∞ for what comes later."""
    back = torch.arange(time).unsqueeze(1) - torch.arange(time)
    slopes = 2.0 ** -torch.arange(1, heads + 1).reshape(-1, 1, 1)
    return torch.where(back >= 0, -slopes * back, -torch.inf)


def layer(block: int, part: str = "v") -> str:
    """The name of a projection: part is "q", "k" or "v"."""
    return f"blocks.{block}.attention.{part}"


def built(text: Text, settings: Settings) -> Transformer:
    """With PyTorch's own initial weights, but embeddings of the size that the blocks add."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = Transformer(len(text.vocabulary), settings)
        nn.init.normal_(model.embedding.weight, std=0.02)
        return model


def train(
    text: Text,
    settings: Settings,
    folder: Path,
    progress: Progress = ignore_progress,
    *,
    slots: bool = False,
) -> list[float]:
    """Train and record the attention's projections: sums of keys for each position of the text, or all slots. Gives the loss of each step."""
    model, losses = built(text, settings), list[float]()
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule(settings.steps))
    recording = dualform.record(
        model,
        optimizer,
        folder,
        layers="blocks.*.attention",
        keep="slots" if slots else "totals",
        totals=None if slots else {PLACE: "keys"},
        totals_bytes=2 << 30,
        overwrite=True,
    )
    with recording as recorder:
        for step in range(settings.steps):
            read = batch(text.train.ids, step, settings.batch, settings.window)
            recorder.batch(**{PLACE: read.positions})
            optimizer.zero_grad()
            loss = cross_entropy(model(read.tokens).flatten(0, 1), read.following.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            rate.step()
            losses.append(loss.item())
            progress("training", step + 1, settings.steps)
    return losses


@torch.no_grad()
def evaluate(model: Transformer, ids: Ids, window: int) -> float:
    """Nats per token of a text, where each is predicted from the half window before it at least, but for the first."""
    model.eval()
    total, half = 0.0, window // 2
    for begin in range(0, len(ids) - 1, half):
        read = torch.from_numpy(ids[begin : begin + window + 1].astype("int64")).unsqueeze(0)
        first = half if begin else 0
        if read.shape[1] <= first + 1:
            break
        logits = model(read[:, :-1])[:, first:]
        total += float(cross_entropy(logits.flatten(0, 1), read[:, first + 1 :].flatten(), reduction="sum"))
    return total / (len(ids) - 1)


def _schedule(steps: int) -> Callable[[int], float]:
    """Up over the first twentieth, then evenly down."""
    rise = max(1, steps // 20)
    return lambda step: min((step + 1) / rise, max(0.0, (steps - step) / max(1, steps - rise)))
