"""Networks people train, of every kind of layer: each trained for real in float64, rebuilt, asked and masked."""

import contextlib
import copy
import gc
import weakref
from dataclasses import dataclass, field

import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dualform
from dualform import projection
from dualform.errors import NotRecordedError, QuestionError, RecordingError

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


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads wait for each other longer than these networks take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


FEW = ("cnn", "sequences", "lstm", "packed gru", "lstm cells", "decoder", "gpt", "norms")
"""The networks that are trained by every optimizer; the others by two."""
RUNS = [f"{n}: {o}" for n in NETWORKS for o in OPTIMIZERS if n in FEW or o != "rmsprop"]


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    """Nobody may change it."""
    network, optimizer = request.param.split(": ")
    return train(network, optimizer, tmp_path_factory.mktemp("run") / "run", chunk_bytes=20_000)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


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
        found = run.dual.at(STEPS // 2).model()
    assert_close(parameters(found), run.checkpoints[STEPS // 2])
    assert_close(dict(run.dual.at(0).model().state_dict()), run.checkpoints[0], atol=0)
    assert_close(dict(run.dual.at(STEPS).model().state_dict()), run.checkpoints[STEPS], atol=0)


def test_a_mask_and_its_opposite_add_up(run):
    condition = (pl.col("label") < 2) | (pl.col("step") == 1)
    one, other = (parameters(run.dual.masked(**{how: condition}, read="kept")) for how in ("only", "drop"))
    nothing = parameters(run.dual.masked(only=pl.lit(False), read="kept"))
    assert_close({n: one[n] + other[n] - nothing[n] for n in one}, run.checkpoints[-1])
    assert_close(parameters(run.dual.masked(only=pl.lit(True), read="kept")), run.checkpoints[-1])
    assert_close(parameters(run.dual.masked(only=condition)), one)  # with fewer slots, the same


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
    with_them, nothing = (parameters(dual.masked(only=some, read="kept")) for some in (condition, pl.lit(False)))
    slopes = [torch.autograd.grad(one, list(model.parameters()), retain_graph=True) for one in target(model(queries))]
    products = {  # like the parameter, for each query
        name: torch.stack([slope[place] for slope in slopes]) * (with_them[name] - nothing[name])
        for place, name in enumerate(with_them)
    }
    answers, together = dual.contributions(queries, target=target), torch.zeros(3, dtype=torch.float64)
    for layer in dual.store.manifest.layers:
        answer = answers[layer.name]
        all_scores = [some for one in (answer, *answer.tied.values()) for some in one.scores(where=condition)]
        found = sum(scores.sum(1) for _, scores in all_scores)
        together += found
        if not answer.tied:
            parts = [products[u.parameter][:, slice(*u.rows) if u.rows else slice(None)] for u in layer.uses]
            expected = sum(part.flatten(1).sum(1) for part in parts)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda t, y=layer: f"{y.name}: {t}")
    torch.testing.assert_close(together, sum(p.flatten(1).sum(1) for p in products.values()), rtol=1e-9, atol=1e-12)


# Training is what it was


@pytest.mark.parametrize("network", NETWORKS)
def test_training_is_bitwise_the_same(path, network):
    """Dropout too: the random numbers that are drawn again are put back."""
    recorded, plain = train(network, "adamw", path, steps=3), train(network, "adamw", steps=3)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(recorded.model.state_dict()[name], value), name
    assert torch.equal(recorded.rng, plain.rng)


# Tied weights


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tied_weights_have_slots_from_both_layers(path, optimizer):
    run = train("gpt", optimizer, path)
    dual = run.dual
    users = [layer.name for layer in dual.store.users("tokens.weight")]
    assert users == ["tokens", "head"]
    answers = dual.contributions(run.inputs, target=target)
    assert list(answers["head"].tied) == ["tokens"]
    assert list(answers["tokens"].tied) == ["head"]
    assert answers["up"].tied == answers["attention.q"].tied == {}
    own, other = (one.total("label")["total"].to_numpy().reshape(SAMPLES, -1).sum(1) for one in (answers["head"], answers["head"].tied["tokens"]))  # fmt: skip
    parts = answers["head"].parts()
    assert parts["slots"].to_list() == pytest.approx((own + other).tolist(), rel=1e-11)
    assert abs(other).max() > 1e-3
    assert parts["remainder"].abs().max() <= 1e-12
    without = dual.masked(drop=pl.col("label") == 1)
    assert without.head.weight is without.tokens.weight


def test_padding_is_never_written_to(path):
    """The row of padding_idx moves by what the head writes alone."""
    run = train("gpt", "sgd", path)
    chunk = next(run.dual.store.chunks("tokens"))
    numbers, errors = chunk.keys(torch.float64).places, chunk.errors(torch.float64)
    assert (numbers == 0).any()
    assert not errors[numbers == 0].any()
    assert errors[numbers != 0].any()


# Truncated backpropagation through time


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_carried_over_batches(path, kind, optimizer):
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": kind(WIDTH, 4, num_layers=2, dropout=0.2), "head": nn.Linear(4, CLASSES)}).double()
    made, state = OPTIMIZERS[optimizer](model.parameters()), None
    with dualform.record(model, made, path, batch_axis={"head": 1}) as recorder:
        for _ in range(STEPS):
            recorder.batch(stream=range(ROWS))
            made.zero_grad()
            output, state = model["body"](torch.randn(TIME, ROWS, WIDTH, dtype=torch.float64), state)
            output = model["head"](output)
            F.cross_entropy(output.flatten(0, 1), torch.arange(TIME * ROWS) % CLASSES).backward()
            made.step()
            state = tuple(one.detach() for one in state) if isinstance(state, tuple) else state.detach()
    assert_exact(dualform.open(path, model))
    keys = dualform.open(path).layer("body.l1").keys.reshape(STEPS, ROWS, TIME, 8)
    assert not keys[0, :, 0, 4:].any()
    assert keys[1, :, 0, 4:].any()  # what the batch before left


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_state_carried_within_a_batch(path, kind):
    """Two calls, one backward pass: what the first does to the second counts."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": kind(WIDTH, 4), "head": nn.Linear(4, CLASSES)}).double()
    made = OPTIMIZERS["adamw"](model.parameters())
    with dualform.record(model, made, path, batch_axis={"head": 1}) as recorder:
        for _ in range(STEPS):
            recorder.batch(stream=range(ROWS))
            made.zero_grad()
            first, state = model["body"](torch.randn(TIME, ROWS, WIDTH, dtype=torch.float64))
            second, _ = model["body"](torch.randn(TIME, ROWS, WIDTH, dtype=torch.float64), state)
            output = model["head"](first + second)
            F.cross_entropy(output.flatten(0, 1), torch.arange(TIME * ROWS) % CLASSES).backward()
            made.step()
    assert_exact(dualform.open(path, model))
    assert dualform.open(path).store.slots("body") == 2 * STEPS * TIME * ROWS


# Parts and gates of recurrent layers


RECURRENT = {"lstm": "body.l1_reverse", "gru": "body.l0", "rnn": "body.l0_reverse", "lstm cells": "cell"}
GATES = {"lstm": "ifgo", "gru": "rzn", "rnn": "h", "lstm cells": "ifgo"}


def everything(answer):
    return torch.cat([scores for _, scores in answer.scores()], -1)


@pytest.mark.parametrize("network", RECURRENT)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parts_and_gates_add_up(path, network, optimizer):
    run, layer = train(network, optimizer, path, steps=3), RECURRENT[network]
    attention = run.dual.attend(run.inputs)[layer]
    weights = [everything(attention.part(name)) for name in ("input", "recurrent")]
    torch.testing.assert_close(sum(weights), everything(attention), rtol=0, atol=1e-13)
    assert all(part.abs().max() > 1e-3 for part in weights)
    torch.testing.assert_close(everything(attention.part("both")), everything(attention), rtol=0, atol=0)
    totals = attention.part("input").total("label")["total"] + attention.part("recurrent").total("label")["total"]
    assert totals.to_list() == pytest.approx(attention.total("label")["total"].to_list(), abs=1e-12)
    answer = run.dual.contributions(run.inputs, target=target)[layer]
    whole = everything(answer)
    assert whole.abs().max() > 1e-6
    parts, gates = ("input", "recurrent"), GATES[network]
    torch.testing.assert_close(sum(everything(answer.part(name)) for name in parts), whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(sum(everything(answer.gate(name)) for name in gates), whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(everything(answer.part("both")), whole, rtol=0, atol=0)


def test_what_has_no_parts_and_no_gates(path):
    run = train("gru", "sgd", path, steps=2)
    attention, answers = run.dual.attend(run.inputs), run.dual.contributions(run.inputs, target=target)
    for answer in (attention["head"], answers["head"]):
        with pytest.raises(QuestionError, match="recurrent layers have the parts"):
            answer.part("input")
    with pytest.raises(QuestionError, match=r'part\("left"\)|"input", "recurrent" and "both"'):
        attention["body.l0"].part("left")
    with pytest.raises(QuestionError, match="'head' is not recurrent"):
        answers["head"].gate("i")
    with pytest.raises(QuestionError, match=r"the gates of layer 'body\.l0' are 'r', 'z', 'n'"):
        answers["body.l0"].gate("f")


# Rows and positions


class Marked(nn.Module):
    """A body over (rows, time, features), whichever axis it wants first."""

    def __init__(self, body, call):
        super().__init__()
        self.body, self.call, self.head = body, call, nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.call(self.body, x).mean(1))


def time_first(body, x):
    return body(x.transpose(0, 1))[0].transpose(0, 1)


def packed(body, x):
    lengths = torch.tensor([TIME - 2, TIME, TIME - 1, TIME])[: len(x)]
    output, _ = body(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    return pad_packed_sequence(output, batch_first=True, total_length=TIME)[0]


def in_a_loop(body, x):
    state, outputs = None, []
    for time in range(x.shape[1]):
        state = body(x[:, time], state)
        outputs.append(state)
    return torch.stack(outputs, 1)


def attend(body, x):
    x = x if body.batch_first else x.transpose(0, 1)
    output = body(x, x, x)[0]
    return output if body.batch_first else output.transpose(0, 1)


BODIES = {
    "lstm, batch first": ("body", nn.LSTM(WIDTH, WIDTH, batch_first=True), lambda body, x: body(x)[0]),
    "lstm, time first": ("body", nn.LSTM(WIDTH, WIDTH), time_first),
    "gru, packed": ("body", nn.GRU(WIDTH, WIDTH), packed),
    "cells": ("body", nn.RNNCell(WIDTH, WIDTH), in_a_loop),
    "attention, batch first": ("body.k", nn.MultiheadAttention(WIDTH, 2, batch_first=True), attend),
    "attention, time first": ("body.q", nn.MultiheadAttention(WIDTH, 2), attend),
    "convolution": ("body", nn.Conv1d(WIDTH, WIDTH, 1), lambda body, x: body(x.transpose(1, 2)).transpose(1, 2)),
}


@pytest.mark.parametrize("body", BODIES)
def test_a_slot_has_the_name_and_the_position_of_its_sample(path, body):
    """Keys of length one: the key most like a query is itself. There are as many rows as times, to be mistaken for each other."""
    layer, module, call = BODIES[body]
    torch.manual_seed(0)
    model = Marked(copy.deepcopy(module), call).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = F.normalize(torch.randn(12, TIME, WIDTH, dtype=torch.float64), dim=2)
    assert TIME == 4
    with dualform.record(model, optimizer, path) as recorder:
        for ids in torch.randperm(12).split(TIME):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.cross_entropy(model(x[ids]), ids % CLASSES).backward()
            optimizer.step()
    dual = dualform.open(path, model)
    assert_exact(dual)
    attention = dual.attend(x[:TIME])[layer]
    attention = attention.part("input") if attention.layer.kind == "recurrent" else attention
    top = attention.top(1).filter(pl.col("weight") > 1 - 1e-12)
    assert top.height >= (9 if body == "gru, packed" else TIME * TIME)  # what is beyond a sequence's end has no key
    assert top["sample_id"].to_list() == top["query"].to_list()
    positions = top["call"] if body == "cells" else top["slot_position"]
    assert positions.to_list() == top["position"].to_list()


@pytest.mark.parametrize("network", ["cnn", "lstm", "packed gru", "gru cells", "encoder", "gpt", "norms"])
def test_earlier_steps_leave_no_graph_behind(path, network):
    """A hook that holds the tensor it hangs on would keep every activation until Python's collector comes by."""
    alive = []

    def watch(module, arguments, output):
        outputs = output if isinstance(output, tuple) else (output,)
        alive.extend(weakref.ref(t) for t in outputs if isinstance(t, torch.Tensor))

    handle = nn.modules.module.register_module_forward_hook(watch)
    gc.collect()
    gc.disable()
    try:
        train(network, "sgd", path, steps=3)
        earlier = alive[: len(alive) * 2 // 3]  # of the first two steps of three
        assert len(earlier) > 3
        assert not [ref() for ref in earlier if ref() is not None]
    finally:
        gc.enable()
        handle.remove()


# Some output units of a huge layer


class Decoding(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.tokens, self.body = nn.Embedding(CLASSES, 4), nn.Linear(4, 6)
        self.decoder = nn.Linear(6, 20, bias=bias)

    def forward(self, tokens):
        return self.decoder(self.body(self.tokens(tokens)).tanh().mean(1))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bias", [False, True])
def test_some_outputs_of_a_huge_layer(path, optimizer, bias):
    run = train((lambda: Decoding(bias), tokens), optimizer, path, outputs={"decoder": [3, 1, 3]})
    plain = train((lambda: Decoding(bias), tokens), optimizer, path.with_name("plain"))
    dual, all_of_it = run.dual, plain.dual
    assert_exact(dual)
    reasons = dict(dual.verify().frame.select("parameter", "reason").iter_rows())
    assert reasons["decoder.weight"].endswith("(2 of 20 rows: outputs=)")
    assert dual.store.layer("decoder")[1].outputs == (1, 3)
    assert next(dual.store.chunks("decoder")).errors(torch.float64).shape[1] == 2
    one, other = (d.attend(run.inputs)["decoder"].top(5) for d in (dual, all_of_it))
    assert one.equals(other)
    for unit in (1, 3):
        answers = [d.contributions(run.inputs, target=unit)["decoder"] for d in (dual, all_of_it)]
        torch.testing.assert_close(*map(everything, answers), rtol=0, atol=1e-13)
        parts = answers[0].parts()
        assert parts["remainder"].abs().max() <= 1e-12
        expected = run.model.eval()(run.inputs)[:, unit].tolist()
        assert parts["target"].to_list() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(
        *(everything(d.contributions(run.inputs, target=7)["body"]) for d in (dual, all_of_it)), rtol=0, atol=1e-13
    )
    assert_close(dict(dual.at(STEPS).model().state_dict()), run.checkpoints[-1], atol=0)
    found, expected = (d.masked(drop="label = 1", layers=["tokens", "body"]) for d in (dual, all_of_it))
    assert_close(parameters(found), parameters(expected))


def test_what_some_outputs_cannot_answer(path):
    run = train((Decoding, tokens), "adamw", path, outputs={"decoder": [1, 3]})
    with pytest.raises(
        NotRecordedError, match=r"output 2 of layer 'decoder', whose error signals were not kept.*2 of 20"
    ):
        run.dual.contributions(run.inputs, target=2)["decoder"].top(1)
    with pytest.raises(NotRecordedError, match=r"masked\(\) needs all error signals of 'decoder.weight'.*outputs="):
        run.dual.masked(drop="label = 1")
    with pytest.raises(NotRecordedError, match=r"network after step 2 needs.*a step that has a snapshot: \[0, 6\]"):
        run.dual.at(2).model()


@pytest.mark.parametrize(
    ("network", "outputs", "words"),
    [
        (Decoding, {"decoder": [20]}, r"outputs=\{'decoder': …\}: expected some units from 0 to 19"),
        (Decoding, {"decoder": []}, "expected some units from 0 to 19"),
        (Decoding, {"coder": [1]}, r"outputs names 'coder', which is not recorded\. Recorded layers: .*'decoder'"),
        (Decoding, {"tokens": [1]}, "only for layers like nn.Linear"),
        (Cnn, {"second": [1]}, "only for layers like nn.Linear"),
        (Gpt, {"head": [1]}, "its weight is shared with 'tokens', which needs all of it"),
        (Norms, {"matrix": [1]}, "only for layers like nn.Linear"),
    ],
)
def test_outputs_that_cannot_be_chosen(path, network, outputs, words):
    model = network()
    with pytest.raises(RecordingError, match=words):
        dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), path, outputs=outputs)


def test_some_outputs_and_deltas_of_groups_do_not_go_together(path):
    model = Decoding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RecordingError, match='totals of it can be of "keys" only'):
        dualform.record(model, optimizer, path, outputs={"decoder": [1]}, totals=["label"])


# What is left out, and what is refused


def old_weight_norm(module, name="weight"):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(module, name)


class Doubled(nn.LSTM):
    def forward(self, x, state=None):
        return super().forward(2 * x, state)


LEFT_OUT = {
    "old-style weight normalisation": (lambda: old_weight_norm(nn.Linear(3, 3)), "weight is no parameter"),
    "of a convolution": (lambda: old_weight_norm(nn.Conv1d(3, 3, 2)), "weight is no parameter"),
    "of an LSTM": (lambda: old_weight_norm(nn.LSTM(3, 3), "weight_hh_l0"), "one of its weights is no parameter"),
    "parametrised": (lambda: parametrizations.weight_norm(nn.Linear(3, 3)), "its weight is parametrised"),
    "spectral": (lambda: parametrizations.spectral_norm(nn.Conv2d(3, 3, 2)), "its weight is parametrised"),
    "inside an attention": (lambda: attention_with(parametrizations.weight_norm), "parametrised"),
    "bag": (lambda: nn.EmbeddingBag(3, 3), "no rule covers a parameter of EmbeddingBag"),
    "sparse": (lambda: nn.Embedding(3, 3, sparse=True), r"sparse \(sparse=True\)"),
    "max_norm": (lambda: nn.Embedding(3, 3, max_norm=1.0), "max_norm changes its weight during the forward pass"),
    "proj_size": (lambda: nn.LSTM(3, 3, proj_size=2), r"\(proj_size\)"),
    "a forward of its own": (lambda: Doubled(3, 3), "its type Doubled has a forward of its own"),
    "bfloat16": (lambda: nn.Linear(3, 3).bfloat16(), "its weight is bfloat16"),
    "lazy": (lambda: nn.LazyLinear(3), "lazy layer"),
    "transposed": (lambda: nn.ConvTranspose1d(3, 3, 2), "no rule covers a parameter of ConvTranspose1d"),
}


def attention_with(change):
    attention = nn.MultiheadAttention(3, 1)
    change(attention.out_proj)
    return attention


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("layer", LEFT_OUT)
def test_a_layer_that_is_left_out_is_named_once_with_the_reason(path, layer):
    make, reason = LEFT_OUT[layer]
    model = nn.ModuleDict({"fine": nn.Linear(3, 2), "odd": make()})
    trained = [p for p in model.parameters() if not isinstance(p, nn.parameter.UninitializedParameter)]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    with pytest.warns(UserWarning, match=f"not recorded: 'odd.*{reason}") as said:
        recorder = dualform.record(model, optimizer, path)
    assert len(said) == 1
    with recorder:
        for _ in range(2):
            recorder.batch(sample_id=[1, 2])
            optimizer.zero_grad()
            model["fine"](torch.randn(2, 3)).square().sum().backward()
            optimizer.step()
    dual = dualform.open(path, model)
    assert dual.verify().passed
    assert any(name.startswith("odd") for name in dual.info()["left_out"])


def test_what_no_rule_covers_inside_an_attention_is_named(path):
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, add_bias_kv=True, add_zero_attn=True)
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            x = x.transpose(0, 1)
            return self.head(self.attention(x, x, x)[0].mean(0))

    with pytest.warns(UserWarning, match="'attention.bias_k': no rule covers .*'attention.bias_v': no rule covers"):
        run = train((Biased, vectors), "adamw", path)
    assert_exact(run.dual)


def compiled(model):
    model.compile(backend="eager")
    return model


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch about itself
@pytest.mark.parametrize(
    ("wrapped", "words"),
    [
        (nn.DataParallel, r"DataParallel runs copies of the model.*record\(model\.module, …\)"),
        (torch.compile, r"compiled \(torch\.compile\).*Record the model without compiling it"),
        (compiled, r"compiled \(torch\.compile\)"),
        (lambda model: nn.Sequential(nn.DataParallel(model)), "DataParallel runs copies"),
        (lambda model: nn.Sequential(torch.compile(model)), r"compiled \(torch\.compile\)"),
    ],
)
def test_models_that_run_as_something_else_are_refused(path, wrapped, words):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RecordingError, match=words):
        dualform.record(wrapped(model), optimizer, path)
    assert not path.exists()


# Settings of optimizers, and loops


def groups(model):
    """No decay for biases and normalisations, and another learning rate for the head."""
    small = [p for name, p in model.named_parameters() if p.dim() < 2 and not name.startswith("head")]
    large = [p for name, p in model.named_parameters() if p.dim() > 1 and not name.startswith("head")]
    return [
        {"params": small, "weight_decay": 0.0},
        {"params": large, "betas": (0.8, 0.95)},
        {"params": list(model.head.parameters()), "lr": 0.05},
    ]


SETTINGS = {
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "coupled and decoupled decay": (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "loops": (torch.optim.AdamW, {"foreach": False, "amsgrad": True}),
    "foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "fused": (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    "fused adam": (torch.optim.Adam, {"fused": True, "weight_decay": 0.1}),
    "fused sgd": (torch.optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "fused adagrad": (torch.optim.Adagrad, {"fused": True}),
    "maximize": (torch.optim.AdamW, {"maximize": True}),
    "maximize with decay": (torch.optim.Adam, {"maximize": True, "weight_decay": 0.1, "foreach": True}),
    "a tensor as learning rate": (torch.optim.AdamW, {"lr": torch.tensor(0.01, dtype=torch.float64)}),
    "rmsprop": (torch.optim.RMSprop, {"foreach": True, "momentum": 0.9, "maximize": True}),
    "nadam": (torch.optim.NAdam, {"foreach": True, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (torch.optim.RAdam, {"foreach": False, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0, "foreach": True}),
    "adamax": (torch.optim.Adamax, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_of_optimizers(path, settings):
    kind, options = SETTINGS[settings]
    run = train("encoder", lambda p: kind(p, **{"lr": 0.01, **options}), path)
    assert_exact(run.dual)
    assert_close(parameters(run.dual.at(4).model()), run.checkpoints[4])


def loop(path, *, make=Encoder, optimizer=None, schedule=None, parts=1, clip=None, steps=STEPS):
    """A training loop with everything people put into it."""
    torch.manual_seed(0)
    model = make().double()
    made = torch.optim.AdamW(groups(model), lr=0.02, weight_decay=0.1) if optimizer is None else optimizer(model)
    scheduler = None if schedule is None else schedule(made)
    x, checkpoints = vectors(SAMPLES, 0), []
    with dualform.record(model, made, path) as recorder:
        for step in range(steps):
            made.zero_grad()
            for part in range(parts):
                ids = (torch.arange(ROWS) + 2 * step + part) % SAMPLES
                recorder.batch(sample_id=ids, label=LABELS[ids])
                ((1 + part) / parts * F.cross_entropy(model(x[ids]), LABELS[ids])).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            made.step()
            if scheduler is not None:
                scheduler.step()
            checkpoints.append(copy.deepcopy(model.state_dict()))
    dual = dualform.open(path, model)
    assert_exact(dual)
    assert_close(parameters(dual.at(4).model()), checkpoints[3])
    return dual, x


SCHEDULES = {
    "warm-up, then cosine": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 2), torch.optim.lr_scheduler.CosineAnnealingLR(o, 4)],
        milestones=[2],
    ),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS),  # betas move too
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_and_parameter_groups_under_adamw(path, schedule):
    loop(path, schedule=SCHEDULES[schedule])


@pytest.mark.parametrize("clip", [None, 1e-2, 1e9])
def test_accumulation_and_clipping_under_adamw(path, clip):
    dual, x = loop(path, parts=3, clip=clip)
    parts = dual.contributions(x, target=1)["head"].parts()
    assert parts["remainder"].abs().max() <= 1e-12
    assert dual.store.slots("head") == STEPS * 3 * ROWS


def test_two_kinds_of_optimizers_for_one_layer(path):
    """The weights by AdamW, the biases by SGD: some coefficients are matrices, others numbers."""
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM, states=True).double()
    weights = torch.optim.AdamW([p for p in model.parameters() if p.dim() > 1], lr=0.02)
    biases = torch.optim.SGD([p for p in model.parameters() if p.dim() < 2], lr=0.1, momentum=0.9)
    x = vectors(SAMPLES, 0)
    with dualform.record(model, [weights, biases], path) as recorder:
        for _ in range(STEPS):
            recorder.batch(label=LABELS)
            model.zero_grad()
            F.cross_entropy(model(x), LABELS).backward()
            weights.step()
            biases.step()
    dual = dualform.open(path, model)
    assert_exact(dual)
    parts = dual.contributions(x, target=1)["head"].parts()
    assert parts["remainder"].abs().max() <= 1e-12
    assert everything(dual.contributions(x, target=1)["body"]).sum() != 0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("overflow", [None, 3])
def test_a_loss_scaler_that_leaves_unscaling_to_a_fused_optimizer(path, kind, unscale, overflow):
    """Then .grad is scaled when the optimizer sees it: it divides by itself, and skips by itself what is not finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    optimizer = kind(model.parameters(), lr=0.02, fused=True, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = vectors(SAMPLES, 0)[:, 0].float()
    with dualform.record(model, optimizer, path) as recorder:
        for step in range(STEPS):
            recorder.batch(label=LABELS)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), LABELS) * (float("inf") if step == overflow else 1.0)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert all(p.isfinite().all() for p in model.parameters())
    certificate = dualform.open(path, model).verify()
    assert certificate.passed, str(certificate)


# Small things that broke


def test_keys_that_the_audit_cannot_see(path, monkeypatch):
    """What a normalisation without bias gives adds up to zero, and so does its product with an R of ones alone."""
    ones = lambda inputs, outputs, dtype, generator: torch.ones(inputs, 1, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(projection, "random_columns", ones)
    train((lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(TIME * WIDTH, bias=False), nn.Linear(TIME * WIDTH, CLASSES)), vectors), "sgd", path, steps=1)  # fmt: skip


def test_a_bias_of_several_axes_that_moves_on_rounding_alone(path):
    def make():
        return nn.Sequential(
            nn.LayerNorm((TIME, WIDTH)),
            nn.Flatten(),
            nn.Linear(TIME * WIDTH, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, CLASSES),
        )

    assert_exact(train((make, vectors), "sgd", path).dual)


@pytest.mark.parametrize("network", ["cnn", "sequences", "gru", "lstm cells", "attention", "gpt2", "norms"])
def test_an_empty_batch_is_a_batch(path, network):
    make, entries = NETWORKS[network]
    torch.manual_seed(0)
    model = make().double()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with dualform.record(model, optimizer, path) as recorder:
        for step in range(4):
            ids = torch.arange(0 if step % 2 else ROWS)
            recorder.batch(sample_id=ids, label=LABELS[ids])
            optimizer.zero_grad()
            model(entries(SAMPLES, step)[ids]).square().sum().backward()
            optimizer.step()
    dual = dualform.open(path, model)
    assert_exact(dual)
    assert dual.rows.height == 2 * ROWS


def test_weights_whose_gradients_are_zeroed_by_hand(path):
    """Slots are kept for the bias's sake; the weight moves by momentum and decay alone."""

    def freeze(model):
        model.c_fc.weight.grad.zero_()

    run = train("gpt2", "adamw", path, before_step=freeze, totals=["label"])
    assert_exact(run.dual)
    assert_close(parameters(run.dual.masked(only="label >= 0")), run.checkpoints[-1])


def test_one_axis_that_both_the_user_and_the_module_name(path):
    """batch_axis is counted in what the user's module gets: with batch_first the rows come first."""
    run = train(
        (lambda: Recurrent(nn.LSTM, batch_first=True), lambda count, step: vectors(count, step)[:, :ROWS]),
        "sgd", path, steps=2, batch_axis={"body": 0, "head": 0},
    )  # fmt: skip
    keys, rows = run.dual.layer("body").keys.reshape(2, ROWS, ROWS, -1)[..., :WIDTH], run.dual.rows
    for step in range(2):
        ids = rows.filter(pl.col("step") == step)["sample_id"].to_list()
        torch.testing.assert_close(keys[step], run.inputs[ids], rtol=0, atol=0)


def test_rows_are_found_in_a_larger_batch(path):
    """Each row comes twice, the second time backwards: 2 × rows sequences."""

    class Twice(Recurrent):
        def forward(self, x):
            return super().forward(torch.cat([x, x.flip(1)])).unflatten(0, (2, -1)).sum(0)

    made = (lambda: Twice(nn.LSTM, batch_first=True, states=True), vectors)
    run = train(made, "sgd", path, layers="body", steps=1)
    slots = run.dual.slots("body").with_columns(run.dual.rows["sample_id"][run.dual.slots("body")["row"]])
    keys = run.dual.layer("body").keys[:, :WIDTH]
    for sample in slots["sample_id"].unique().to_list():
        mine = keys[torch.from_numpy((slots["sample_id"] == sample).to_numpy())]
        both = torch.cat([run.inputs[sample], run.inputs[sample].flip(0)])
        assert sorted(mine.tolist()) == sorted(both.tolist())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_a_mask_leaves_a_bias_alone_that_moves_on_rounding_alone(path, kind):
    """Before batch normalisation; otherwise 1/eps would make a million of a slot's part."""
    run = train("cnn", lambda p: kind(p, lr=1e-3), path)
    assert_exact(run.dual)
    masked = parameters(run.dual.masked(drop="label = 1"))
    assert_close({"first.bias": masked["first.bias"]}, {"first.bias": run.checkpoints[-1]["first.bias"]})
    assert max(float(value.abs().max()) for value in masked.values()) < 10
