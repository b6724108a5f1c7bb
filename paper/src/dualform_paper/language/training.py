"""Training a language model as the paper: truncated backpropagation with carried state, Adam, clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dualform.language.model import LanguageModel, State, build_model
from dualform.language.text import Ids
from dualform_paper.language.reading import Batch, batch
from dualform_paper.language.settings import Settings

LOGITS = 1 << 22
"""Logits that are computed at a time, if the output layer is not recorded."""
STREAMS = 10
"""Places of a test text that are read side by side."""


def initial_model(settings: Settings, vocabulary: int) -> LanguageModel:
    """The model before its first step."""
    return build_model(settings.shape(vocabulary), settings.seed, settings.embedding_range)


def batch_of(ids: Ids, step: int, settings: Settings) -> Batch:
    """The tokens of a step."""
    return batch(ids, step, settings.batch, settings.window, epochs=settings.epochs)


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
    """One update; returns the loss in nats per token and the state to go on with.

    whole: the output layer runs once over everything, so that it can be recorded with the positions of the text.
    """
    with _own_randomness(settings.seed, step):
        kept = _kept_state(read, settings)
        optimizer.zero_grad()
        hidden, state = model.hidden(read.tokens, (state[0] * kept, state[1] * kept))
        following = read.following
        if settings.predicted < 1:
            count = max(1, round(settings.window * settings.predicted))
            predicted = torch.randperm(settings.window)[:count]
            hidden = hidden[:, predicted]
            following = following[:, predicted]
        if whole:
            loss = cross_entropy(model.decoder(hidden).flatten(0, 1), following.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            total = float(loss.detach())
        else:
            total = _in_pieces(model, hidden, following)
    nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    optimizer.step()
    return total, (state[0].detach(), state[1].detach())


def _kept_state(read: Batch, settings: Settings) -> Tensor:
    """(1, rows or 1, 1): 1 where the state of the step before is carried on, 0 where it is dropped."""
    rows = 1 if settings.forget_together else settings.batch
    kept = (torch.rand(1, rows, 1) >= settings.forget).float()
    return torch.zeros_like(kept) if read.starts_epoch else kept


def _in_pieces(model: LanguageModel, hidden: Tensor, following: Tensor) -> float:
    """Loss and gradients with bounded memory: logits of a large vocabulary take gigabytes."""
    rows = max(1, LOGITS // (hidden.shape[1] * model.shape.vocabulary))
    leaf = hidden.detach().requires_grad_()
    total = 0.0
    for inputs, targets in zip(torch.split(leaf, rows), torch.split(following, rows), strict=True):
        loss = cross_entropy(model.decoder(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / following.numel()
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    hidden.backward(leaf.grad)  # type: ignore[no-untyped-call]
    return total


@contextmanager
def _own_randomness(seed: int, step: int) -> Iterator[None]:
    """Random numbers of a step depend on its number alone, so that a resumed training is the same as one without a break."""
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
    tokens = text[:-1].reshape(rows, length)
    following = text[1:].reshape(rows, length)
    window = max(1, LOGITS // (rows * model.shape.vocabulary))
    state = start(model, rows)
    total = 0.0
    training = model.training
    model.eval()
    for inputs, targets in zip(torch.split(tokens, window, 1), torch.split(following, window, 1), strict=True):
        logits, state = model(inputs, state)
        total += float(cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    model.train(training)
    return total / following.numel()


def bits(nats: float) -> float:
    """Per character."""
    return nats / math.log(2)


def perplexity(nats: float) -> float:
    """Per word."""
    return math.exp(nats)
