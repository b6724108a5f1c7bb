"""Networks people train, of every kind of layer, and a training that can be recorded."""

import contextlib
import copy
from dataclasses import dataclass, field

import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dualform
from lion import Lion

SAMPLES, ROWS, TIME, WIDTH, CLASSES, STEPS = 8, 3, 4, 6, 5, 6
GAP = 1e-11


# The networks: each gives (rows, classes), or (rows, time, classes)


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 6, (3, 2), stride=2, groups=2, dilation=(1, 2), bias=False)
        self.last_norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)), inplace=True)
        return self.head(self.last_norm(self.second(x)).relu().mean((2, 3)))


class Sequences(nn.Module):
    """Convolutions over sequences whose length is another one in each batch."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(WIDTH, 4, 3, padding="same", padding_mode="replicate")
        self.second = nn.Conv1d(4, 4, 2, stride=2, padding=1)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.second(self.first(x.transpose(1, 2)).tanh()).tanh().mean(2))


class Recurrent(nn.Module):
    def __init__(self, kind, *, packed=False, states=False, **settings):
        super().__init__()
        self.body = kind(WIDTH, 4, **settings)
        self.packed, self.states = packed, states
        self.head = nn.Linear(4 * (1 + self.body.bidirectional), CLASSES)

    def forward(self, x):
        if self.packed:
            lengths = torch.tensor([2, TIME, 1, 3])[torch.arange(len(x)) % 4]
            output, last = self.body(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
            output = pad_packed_sequence(output, batch_first=True, total_length=TIME)[0]
        else:
            output, last = self.body(x if self.body.batch_first else x.transpose(0, 1))
            output = output if self.body.batch_first else output.transpose(0, 1)
        if self.states:  # the last states instead of the outputs
            last = last[0] * last[1] if isinstance(last, tuple) else last
            return self.head(last[-1])
        return self.head(output)


class Cells(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell, self.head = kind(WIDTH, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        state = None
        for time in range(x.shape[1]):
            state = self.cell(x[:, time], state)
        return self.head(state[0] + state[1] if isinstance(state, tuple) else state)


class Encoder(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 7, dropout=0.2, batch_first=True, **settings)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[1:, -1] = True
        return self.head(self.layer(x, src_key_padding_mask=padding).mean(1))


class Decoder(nn.Module):
    """A decoder layer with cross-attention, time first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 3, 7, dropout=0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        target, memory = x[:, :2].transpose(0, 1), x.flip(2).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(2, dtype=x.dtype)
        return self.head(self.layer(target, memory, tgt_mask=mask, tgt_is_causal=True)[-1])


class Attention(nn.Module):
    """Separate projections, and a loss that depends on the attention weights too."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, kdim=4, vdim=3, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        output, weights = self.attention(x, x[..., :4], x[..., 3:])
        return self.head(output.mean(1)) + weights.square().sum(2)[:, :1]


class Gpt(nn.Module):
    """Token and position embeddings, a block, and a head that shares the tokens' table."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH, padding_idx=0)
        self.places = nn.Embedding(TIME, WIDTH)
        self.before, self.after = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(TIME).expand(len(tokens), -1))
        mask = nn.Transformer.generate_square_subsequent_mask(TIME, dtype=x.dtype)
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False, attn_mask=mask, is_causal=True)[0]
        return self.head(x + self.down(F.gelu(self.up(self.after(x)))))


class Conv1D(nn.Module):
    """As Hugging Face writes it."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(0.3 * torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj, self.head = Conv1D(7, WIDTH), Conv1D(4, 7), Conv1D(CLASSES, 4)

    def forward(self, x):
        return self.head(self.c_proj(self.c_fc(x).tanh()).tanh().mean(1))


class Norms(nn.Module):
    """Every normalisation. The bias of "map" moves on rounding alone, since a normalisation follows."""

    def __init__(self):
        super().__init__()
        self.rows, self.matrix = nn.BatchNorm1d(TIME, momentum=None), nn.LayerNorm((TIME, WIDTH))
        self.map, self.flat = nn.Linear(TIME * WIDTH, 8), nn.BatchNorm1d(8)
        self.grouped, self.root = nn.GroupNorm(2, 8), nn.RMSNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.flat(self.map(self.matrix(self.rows(x)).tanh().flatten(1)))
        return self.head(self.root(self.grouped(x.tanh())).tanh())


def vectors(count, step):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, TIME, WIDTH, generator=generator, dtype=torch.float64)


def images(count, step):
    return torch.stack([vectors(count, step), vectors(count, step).flip(2).cos()], 1)


def of_many_lengths(count, step):
    return torch.cat([vectors(count, step), vectors(count, step).sin()], 1)[:, : TIME + step % 3]


def tokens(count, step):
    return torch.randint(0, CLASSES, (count, TIME), generator=torch.Generator().manual_seed(3))


NETWORKS = {
    "cnn": (Cnn, images),
    "sequences": (Sequences, of_many_lengths),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.3, batch_first=True), vectors),
    "gru": (lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.3), vectors),
    "rnn": (lambda: Recurrent(nn.RNN, bidirectional=True, bias=False, nonlinearity="relu"), vectors),
    "packed lstm": (lambda: Recurrent(nn.LSTM, packed=True, num_layers=2, dropout=0.3), vectors),
    "packed gru": (lambda: Recurrent(nn.GRU, packed=True, bidirectional=True), vectors),
    "states": (lambda: Recurrent(nn.LSTM, states=True, num_layers=2), vectors),
    "lstm cells": (lambda: Cells(nn.LSTMCell), vectors),
    "gru cells": (lambda: Cells(nn.GRUCell), vectors),
    "rnn cells": (lambda: Cells(nn.RNNCell), vectors),
    "encoder": (Encoder, vectors),
    "norm first": (lambda: Encoder(norm_first=True, activation="gelu", bias=False), vectors),
    "decoder": (Decoder, vectors),
    "attention": (Attention, vectors),
    "gpt": (Gpt, tokens),
    "gpt2": (Gpt2, vectors),
    "norms": (Norms, vectors),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    # A gradient that is nothing but rounding is divided by eps, and so are differences of its parts
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, eps=1e-5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005, centered=True, momentum=0.8, eps=1e-5),
}
WITHOUT_EPS = {
    "lion": lambda p: Lion(p, lr=0.01, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02, weight_decay=0.1),
}
"""They divide by no ε: of a gradient that is nothing but rounding they make a step like any other."""
LABELS = torch.arange(SAMPLES) % CLASSES


@dataclass
class Run:
    path: object
    model: nn.Module
    inputs: torch.Tensor
    """Of all samples."""
    rng: torch.Tensor
    """Of PyTorch, after training."""
    checkpoints: list = field(default_factory=list)

    @property
    def dual(self):
        return dualform.open(self.path, self.model)


class Deaf:
    """Instead of a recorder."""

    def __getattr__(self, name):
        return lambda **_: None


def train(network, optimizer, path=None, *, steps=STEPS, before_step=lambda model: None, **settings):
    """Train a network of the table, or one like them; recorded, if there is a path."""
    make, entries = NETWORKS[network] if isinstance(network, str) else network
    torch.manual_seed(0)
    model = make().double()
    made = ((OPTIMIZERS | WITHOUT_EPS)[optimizer] if isinstance(optimizer, str) else optimizer)(model.parameters())
    order = torch.Generator().manual_seed(1)
    checkpoints = [copy.deepcopy(model.state_dict())]
    with contextlib.ExitStack() as stack:
        recorder = Deaf() if path is None else stack.enter_context(dualform.record(model, made, path, **settings))
        for step in range(steps):
            ids = torch.randperm(SAMPLES, generator=order)[:ROWS]
            recorder.batch(sample_id=ids, label=LABELS[ids])
            made.zero_grad()
            output = model(entries(SAMPLES, step)[ids])
            labels = LABELS[ids] if output.dim() == 2 else LABELS[ids, None].expand(-1, output.shape[1])
            F.cross_entropy(output.flatten(0, -2), labels.flatten()).backward()
            before_step(model)
            made.step()
            checkpoints.append(copy.deepcopy(model.state_dict()))
    return Run(path, model, entries(SAMPLES, 0), torch.get_rng_state(), checkpoints)


def target(output):
    return output[:, 1] if output.dim() == 2 else output[:, -1, 1]


def assert_exact(dual, gap=GAP):
    """Every parameter passes, and those that moved by more than rounding have a small gap."""
    certificate = dual.verify()
    assert certificate.passed, str(certificate)
    assert certificate.frame.filter(pl.col("movement") > 1e-10)["gap"].max() <= gap, str(certificate)


def assert_close(found, expected, atol=1e-12):
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def parameters(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def quiet_about_buffers(model):
    """Running statistics come from snapshots, and that is said."""
    there = any(True for _ in model.buffers())
    return pytest.warns(UserWarning, match="taken from the snapshot at step .*running_mean") if there else contextlib.nullcontext()  # fmt: skip


def everything(answer):
    return torch.cat([scores for _, scores in answer.scores()], -1)
