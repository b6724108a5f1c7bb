"""Small networks with every kind of layer, trained for real; each gives (rows, classes)."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import dualform
from training import Run, checkpoint

CLASSES, SAMPLES, ROWS, TIME, WIDTH, TOKENS = 3, 7, 3, 4, 5, 6


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")
        self.norm = nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 6, (3, 2), stride=2, groups=2)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x)).tanh()).tanh().mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH, padding_idx=0)
        self.body = kind(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, tokens):
        return self.head(self.body(self.tokens(tokens))[0][:, -1])


class Cell(nn.Module):
    """One module, called several times."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.RNNCell(WIDTH, 4), nn.Linear(4, CLASSES, bias=False)

    def forward(self, x):
        state = None
        for time in range(x.shape[1]):
            state = self.cell(x[:, time], state)
        return self.head(state)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH + 1, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH + 1)
        self.wide = nn.Conv1d(WIDTH + 1, 4, 1)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        x = F.pad(x, (0, 1), value=1.0)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(self.wide(x.transpose(1, 2)).tanh().mean(2))


def pictures(generator):
    return torch.randn(SAMPLES, 2, 5, 5, generator=generator, dtype=torch.float64)


def sequences(generator):
    return torch.randn(SAMPLES, TIME, WIDTH, generator=generator, dtype=torch.float64)


def tokens(generator):
    return torch.randint(0, TOKENS, (SAMPLES, TIME), generator=generator)


NETWORKS = {
    "convolutions": (Convolutions, pictures),
    "lstm": (lambda: Recurrent(nn.LSTM), tokens),
    "gru": (lambda: Recurrent(nn.GRU), tokens),
    "cell": (Cell, sequences),
    "encoder": (Encoder, sequences),
}
LABELS = torch.arange(SAMPLES) % CLASSES


def inputs(name):
    """All samples of a network."""
    return NETWORKS[name][1](torch.Generator().manual_seed(5))


def train(name, path, *, adam=False, steps=4, **settings):
    """Train and record a network in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = NETWORKS[name][0]().double()
    given = inputs(name)
    make = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.05)
    run = Run(Path(path), model, checkpoints=[checkpoint(model)])
    order = torch.Generator().manual_seed(1)
    with dualform.record(model, optimizer, path, dtype="float64", chunk_bytes=3000, **settings) as recorder:
        for _ in range(steps):
            ids = torch.randint(0, SAMPLES, (ROWS,), generator=order)
            recorder.batch(sample_id=ids, label=LABELS[ids])
            optimizer.zero_grad()
            F.cross_entropy(model(given[ids]), LABELS[ids]).backward()
            optimizer.step()
            run.ids.append(ids)
            run.checkpoints.append(checkpoint(model))
    return run
