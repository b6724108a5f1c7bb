"""Networks people train, of every kind of layer: each trained for real in float64, rebuilt, asked and masked."""

import contextlib
import copy
import functools
from dataclasses import dataclass, field

import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dualform

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
    """A bias that moves on rounding alone, since a normalisation follows."""

    def __init__(self):
        super().__init__()
        self.rows, self.matrix = nn.BatchNorm1d(TIME, momentum=None), nn.LayerNorm((TIME, WIDTH))
        self.map, self.flat = nn.Linear(TIME * WIDTH, 8), nn.BatchNorm1d(8)
        self.grouped, self.root = nn.GroupNorm(2, 8), nn.RMSNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.flat(self.map(self.matrix(self.rows(x)).flatten(1)))
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
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005, centered=True, momentum=0.8, weight_decay=0.01),
}
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
    made = (OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer)(model.parameters())
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


@functools.cache
def trained_in(folder, network, optimizer):
    return train(network, optimizer, folder / f"{network} {optimizer}", chunk_bytes=20_000)


@pytest.fixture(scope="module", params=[f"{n}: {o}" for n in NETWORKS for o in OPTIMIZERS])
def run(request, tmp_path_factory):
    """Nobody may change it."""
    network, optimizer = request.param.split(": ")
    return train(network, optimizer, tmp_path_factory.mktemp("run") / "run", chunk_bytes=20_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


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


# Every network under every optimizer


def test_each_parameter_is_its_dual_form(run):
    assert_exact(run.dual)
    assert {name for name, _ in run.model.named_parameters()} == {p.name for p in run.dual.store.manifest.parameters}
    assert run.dual.info()["left_out"] == {}


def test_a_step_in_the_middle_is_the_checkpoint(run):
    with quiet_about_buffers(run.model):
        found = run.dual.at_step(STEPS // 2)
    assert_close(parameters(found), run.checkpoints[STEPS // 2])
    assert_close(dict(run.dual.at_step(0).state_dict()), run.checkpoints[0], atol=0)
    assert_close(dict(run.dual.at_step(STEPS).state_dict()), run.checkpoints[STEPS], atol=0)


def test_a_mask_and_its_opposite_add_up(run):
    condition = (pl.col("label") < 2) | (pl.col("step") == 1)
    one, other = (parameters(run.dual.masked(**{how: condition})) for how in ("keep", "drop"))
    nothing = parameters(run.dual.masked(keep=pl.lit(False)))
    assert_close({n: one[n] + other[n] - nothing[n] for n in one}, run.checkpoints[-1])
    assert_close(parameters(run.dual.masked(keep=pl.lit(True))), run.checkpoints[-1])


def test_contributions_in_the_last_layer_add_up_to_the_logit(run):
    logits = target(run.model.eval()(run.inputs)).tolist()
    parts = run.dual.contributions(run.inputs, target=target)["head"].parts()
    assert parts["target"].to_list() == pytest.approx(logits, rel=1e-12, abs=1e-13)
    others = 0.0
    if isinstance(run.model, Attention):  # there the head is not all
        others = run.model.attention(run.inputs, run.inputs[..., :4], run.inputs[..., 3:])[1].square().sum(2)[:, 0]
        others = pl.Series(others.tolist())
    assert (parts["remainder"] - others).abs().max() <= 1e-12


def test_contributions_in_every_layer_are_what_a_mask_takes_away(run):
    """Σ contributions of some slots = ⟨∂target/∂parameter, what these slots wrote⟩, by autograd and by masks."""
    condition = (pl.col("label") != 1) & (pl.col("step") > 0)
    queries, dual, model = run.inputs[:3], run.dual, run.model.eval()
    with_them, nothing = (parameters(dual.masked(keep=some)) for some in (condition, pl.lit(False)))
    slopes = [torch.autograd.grad(one, list(model.parameters()), retain_graph=True) for one in target(model(queries))]
    products = {  # like the parameter, for each query
        name: torch.stack([slope[place] for slope in slopes]) * (with_them[name] - nothing[name])
        for place, name in enumerate(with_them)
    }
    answers, together = dual.contributions(queries, target=target), torch.zeros(3, dtype=torch.float64)
    for layer in dual.store.manifest.layers:
        answer = answers[layer.name]
        all_scores = [some for one in (answer, *answer.tied.values()) for some in one.contributions(where=condition)]
        found = sum(scores.sum(1) for _, scores in all_scores)
        together += found
        if not answer.tied:
            parts = [products[u.parameter][:, slice(*u.rows) if u.rows else slice(None)] for u in layer.uses]
            expected = sum(part.flatten(1).sum(1) for part in parts)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda t, y=layer: f"{y.name}: {t}")
    torch.testing.assert_close(together, sum(p.flatten(1).sum(1) for p in products.values()), rtol=1e-9, atol=1e-12)
