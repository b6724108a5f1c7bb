"""Training a language model as the paper: truncated backpropagation with carried state, Adam, clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dualform.paper.language.model import LanguageModel, State
from dualform.paper.language.reading import Batch
from dualform.paper.language.settings import Settings
from dualform.paper.language.text import Ids

LOGITS = 1 << 22
"""So many logits are made at a time, if the output layer is not recorded."""
STREAMS = 10
"""So many places of a test text are read side by side."""


def adam(model: nn.Module, settings: Settings) -> torch.optim.Adam:
    """The optimizer."""
    return torch.optim.Adam(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)


def start(model: LanguageModel, rows: int) -> State:
    """The state before the first token."""
    zeros = torch.zeros(1, rows, model.shape.state)
    return zeros, zeros.clone()


def train_step(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    read: Batch,
    state: State,
    step: int,
    settings: Settings,
    *,
    whole: bool = False,
) -> tuple[float, State]:
    """One update; gives the loss in nats per token and the state to go on with.

    whole: the output layer runs once over everything, so that it can be recorded with the positions of the text.
    """
    with _own_randomness(settings.seed, step):
        kept = (torch.rand(1, settings.batch, 1) >= settings.forget).float()
        optimizer.zero_grad()
        hidden, state = model.hidden(read.tokens, (state[0] * kept, state[1] * kept))
        following = read.following
        if settings.predicted < 1:
            some = torch.randperm(settings.window)[: max(1, round(settings.window * settings.predicted))]
            hidden, following = hidden[:, some], following[:, some]
        if whole:
            loss = cross_entropy(model.decoder(hidden).flatten(0, 1), following.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            total = float(loss.detach())
        else:
            total = _in_pieces(model, hidden, following)
    nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    optimizer.step()
    return total, (state[0].detach(), state[1].detach())


def _in_pieces(model: LanguageModel, hidden: Tensor, following: Tensor) -> float:
    """Loss and gradients with bounded memory: logits of a large vocabulary take gigabytes."""
    rows = max(1, LOGITS // (hidden.shape[1] * model.shape.vocabulary))
    leaf, total = hidden.detach().requires_grad_(), 0.0
    for some, next_ones in zip(torch.split(leaf, rows), torch.split(following, rows), strict=True):
        loss = cross_entropy(model.decoder(some).flatten(0, 1), next_ones.flatten(), reduction="sum")
        loss = loss / following.numel()
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    hidden.backward(leaf.grad)  # type: ignore[no-untyped-call]
    return total


@contextmanager
def _own_randomness(seed: int, step: int) -> Iterator[None]:
    """What is random in a step depends on its number, so that a training that goes on later is the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed((seed << 32) + step)
        yield


@torch.no_grad()
def evaluate(model: LanguageModel, ids: Ids, *, most: int | None = None) -> float:
    """Nats per token of a text (or of its first `most` tokens), read in STREAMS stretches side by side, each with its state."""
    ids = ids[:most]
    rows = max(1, min(STREAMS, len(ids) // 2))
    length = (len(ids) - 1) // rows
    text = torch.from_numpy(ids[: rows * length + 1].astype("int64"))
    tokens, following = text[:-1].reshape(rows, length), text[1:].reshape(rows, length)
    window = max(1, LOGITS // (rows * model.shape.vocabulary))
    state, total, training = start(model, rows), 0.0, model.training
    model.eval()
    for some, next_ones in zip(torch.split(tokens, window, 1), torch.split(following, window, 1), strict=True):
        logits, state = model(some, state)
        total += float(cross_entropy(logits.flatten(0, 1), next_ones.flatten(), reduction="sum"))
    model.train(training)
    return total / following.numel()


def bits(nats: float) -> float:
    """Per character."""
    return nats / math.log(2)


def perplexity(nats: float) -> float:
    """Per word."""
    return math.exp(nats)
