import polars as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.dual.masked import masked_by_groups
from dualform.dual.totals import find_totals
from dualform.errors import UnexplainedError
from dualform.projection import Projection
from dualform.record import begin
from halves import require


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_under_autocast_the_key_is_recorded_as_it_was_cast(tmp_path, kind):
    torch.manual_seed(0)
    first = (
        nn.Linear(16, 6)
        if kind == "linear"
        else nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 3), nn.Flatten())
    )
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(6 if kind == "linear" else 12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = torch.randn(20, 16), torch.randint(0, 4, (20,))
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for ids in torch.arange(20).repeat(3).split(5):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(inputs[ids]).float(), labels[ids])
            loss.backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    certificate = dual.verify()
    assert certificate.passed, certificate
    assert (
        certificate.frame.filter(pl.col("parameter").str.ends_with("weight"))["reason"].str.contains("autocast").all()
    )
    key = next(iter(dual.store.chunks(dual.layers[0]))).keys(torch.float32).vectors()
    assert torch.equal(key, key.half().float())


def test_without_autocast_nothing_is_said_of_it(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=[0, 1])
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    assert not dualform.open(tmp_path / "run").verify().frame["reason"].str.contains("autocast").any()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_autocast_may_come_and_go_beside_totals(tmp_path, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 4))
    optimizer = kind(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(20, 16), torch.arange(20) % 4
    with dualform.record(model, optimizer, tmp_path / "run", totals=["label"]) as recorder:
        for step, ids in enumerate(torch.arange(20).split(5)):
            recorder.batch(sample_id=ids, label=labels[ids])
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=step % 2 == 0):
                loss = F.cross_entropy(model(inputs[ids]).float(), labels[ids])
            loss.backward()
            optimizer.step()
    view = find_totals(dualform.open(tmp_path / "run").store, ["label"], 4, deltas=True)
    torch.testing.assert_close(masked_by_groups(view, "0.weight").float(), model[0].weight.detach(), rtol=0, atol=1e-5)


class Sequences(nn.Module):
    """Words, a body over their positions, and a head."""

    def __init__(self, body):
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(20, 8), body, nn.Linear(8, 3)

    def forward(self, words):
        x = self.words(words)
        if isinstance(self.body, nn.MultiheadAttention):
            x = self.body(x, x, x, need_weights=self.body.dropout > 0)[0]
        else:
            x = self.body(x)[0]
        return self.head(x.mean(1))


def train_on_sequences(path, body, length=7, steps=4, before_step=lambda model: None, **settings):
    torch.manual_seed(0)
    model = Sequences(body())
    words, labels = torch.randint(0, 20, (30, length)), torch.arange(30) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, optimizer, path, **settings) as recorder:
        for ids in torch.randint(0, 30, (steps, 6)):
            recorder.batch(sample_id=ids, label=labels[ids])
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = model(words[ids])
            F.cross_entropy(output.float(), labels[ids]).backward()
            before_step(model)
            optimizer.step()
    return dualform.open(path, model)


ATTENTIONS = {
    "plain": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    "one projection each": lambda: nn.MultiheadAttention(8, 2, kdim=8, vdim=8, bias=False, batch_first=True),
    "dropout": lambda: nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True),
}


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention_under_autocast(tmp_path, kind):
    require(torch.bfloat16)
    dual = train_on_sequences(tmp_path / "run", ATTENTIONS[kind])
    certificate = dual.verify()
    assert certificate.passed, certificate
    # What was computed again is the same: nothing but the rounding of each gradient remains. (That of a weight is seen through R.)
    biases = certificate.frame.filter(pl.col("parameter").str.ends_with("bias"))
    assert biases["residual"].max() < torch.finfo(torch.bfloat16).eps / 2


class Cells(nn.Module):
    """A cell, called at one time after the other."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state, outputs = None, []
        for now in x.unbind(1):
            state = self.cell(now, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return (torch.stack(outputs, 1),)


RECURRENT = {
    "rnn": lambda: nn.RNN(8, 8, batch_first=True),
    "gru": lambda: nn.GRU(8, 8, batch_first=True),
    "lstm": lambda: nn.LSTM(8, 8, batch_first=True),
    "two layers of rnn": lambda: nn.RNN(
        8, 4, 2, batch_first=True, bidirectional=True, dropout=0.3, nonlinearity="relu"
    ),
    "two layers of gru": lambda: nn.GRU(8, 4, 2, batch_first=True, bidirectional=True, dropout=0.3),
    "two layers of lstm": lambda: nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True, dropout=0.3),
    "rnn cells": lambda: Cells(nn.RNNCell(8, 8)),
    "gru cells": lambda: Cells(nn.GRUCell(8, 8)),
    "lstm cells": lambda: Cells(nn.LSTMCell(8, 8)),
}


@pytest.mark.parametrize("length", [1, 7, 40])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_under_autocast(tmp_path, kind, length):
    require(torch.bfloat16)
    certificate = train_on_sequences(tmp_path / "run", RECURRENT[kind], length).verify()
    assert certificate.passed, certificate
    is_fused = kind in ("lstm", "two layers of lstm")
    if not is_fused and "cells" not in kind:
        # What was computed again is the same: of the input's bias, which is one sum, nothing but its rounding remains
        biases = certificate.frame.filter(pl.col("parameter").str.contains("bias_ih"))
        assert biases["residual"].max() < torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize("kind", RECURRENT)
def test_gradients_of_recurrent_layers_that_autocast_does_not_explain(tmp_path, kind):
    require(torch.bfloat16)

    def clip_by_value(model):
        for parameter in model.body.parameters():
            nn.utils.clip_grad_value_([parameter], 0.5 * float(parameter.grad.abs().max()))

    with pytest.raises(UnexplainedError, match="clipped by value"):
        train_on_sequences(tmp_path / "run", RECURRENT[kind], before_step=clip_by_value)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adamax])
def test_totals_alone_under_autocast(tmp_path, kind):
    """No residuals are kept, but what rounding may have done is: verify passes, and its floor is near that of a run with slots."""
    require(torch.bfloat16)
    inputs, labels = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3
    floors = {}
    for keep in ("slots", "totals"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        optimizer = kind(model.parameters(), lr=0.01)
        with dualform.record(model, optimizer, tmp_path / keep, keep=keep, totals=["label"]) as recorder:
            for batch in [[0, 1, 2], [3, 4, 5], [6, 7, 8]] * 6:
                ids = torch.tensor(batch)
                recorder.batch(sample_id=ids, label=labels[ids])
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(inputs[ids])
                F.cross_entropy(output.float(), labels[ids], reduction="sum").backward()
                optimizer.step()
        certificate = dualform.open(tmp_path / keep, model).verify()
        assert certificate.passed, certificate
        floors[keep] = certificate.frame.filter(pl.col("parameter").str.ends_with("weight"))["floor"]
    ratio = floors["totals"] / floors["slots"]
    assert ratio.min() > 0.2
    assert ratio.max() < 5


def test_what_rounding_may_have_done_to_totals_is_little(tmp_path):
    require(torch.bfloat16)
    settings = {"keep": "totals", "totals": ["label"]}
    dual = train_on_sequences(tmp_path / "run", ATTENTIONS["plain"], **settings)
    view = find_totals(dual.store, ["label"], dual.end_step, deltas=True)
    rounding = view.rounding_of_gradients("body.in_proj_weight")
    trained = dual.store.snapshot(dual.end_step)["model.body.in_proj_weight"]
    moved = (trained - dual.store.snapshot(0)["model.body.in_proj_weight"]).norm()
    assert 0 < rounding < 0.02 * moved


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, eps=1e-3),
}


@pytest.mark.parametrize("seed", [3, 10, 13, 31])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_lstm_with_one_row_keeps_factors_of_one(tmp_path, monkeypatch, kind, seed):
    """Its only key may nearly vanish through R; its rounding is then all that is seen, and looks like a factor."""
    require(torch.bfloat16)
    monkeypatch.setattr(begin, "private_seed", lambda: seed)
    torch.manual_seed(seed)
    model = nn.LSTM(6, 6, 2, batch_first=True)
    optimizer = OPTIMIZERS[kind](model.parameters())
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(2):
            recorder.batch(sample_id=[0])
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = model(torch.randn(1, 2, 6))[0]
            output.float().square().mean().backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run")
    assert dual.store.updates["factors"].explode().unique().to_list() == [1.0]
    assert dual.verify().passed, dual.verify()


NORMS = {
    "layer": lambda: nn.LayerNorm(6),
    "rms": lambda: nn.RMSNorm(6),
    "group": lambda: nn.GroupNorm(2, 6),
    "batch": lambda: nn.BatchNorm1d(6),
}


def train_a_normalisation(path, norm, second=-1.0, before_step=lambda model: None):
    """Each row comes twice, nearly the same, the second time with its error signal times `second`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), norm(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    once = torch.randn(20, 4)
    inputs = torch.cat([once, once + 0.05 * torch.randn(20, 4)])
    signs = torch.cat([torch.ones(20, 1), second * torch.ones(20, 1)])
    with dualform.record(model, optimizer, path) as recorder:
        for _ in range(3):
            recorder.batch(sample_id=torch.arange(40))
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = model(inputs)
            (output.float().square() * signs).sum().backward()
            before_step(model)
            optimizer.step()
    return dualform.open(path, model)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("kind", NORMS)
def test_a_normalisation_under_autocast_whose_gradient_cancels(tmp_path, kind):
    require(torch.bfloat16)
    if kind == "rms" and not hasattr(torch.ops.aten, "_fused_rms_norm"):
        pytest.skip("before it had a kernel of its own, PyTorch rounded each operation of RMSNorm to 16 bits")
    certificate = train_a_normalisation(tmp_path / "run", NORMS[kind]).verify()
    assert certificate.passed, certificate
    if kind != "layer":  # the kernel of LayerNorm rounds each partial sum; the others compute in float32, and so do we
        weight = certificate.frame.filter(pl.col("parameter") == "1.weight")
        assert weight["residual"].item() < 2e-5


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("kind", NORMS)
def test_a_normalisation_under_autocast_whose_gradient_was_changed(tmp_path, kind):
    require(torch.bfloat16)

    def clip_by_value(model):
        gradient = model[1].weight.grad
        gradient.clamp_(-0.5 * gradient.abs().max(), 0.5 * gradient.abs().max())

    with pytest.raises(UnexplainedError, match="clipped by value"):
        train_a_normalisation(tmp_path / "run", NORMS[kind], second=1.0, before_step=clip_by_value)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm2d(8), lambda: nn.GroupNorm(2, 8)], ids=["batch", "group"])
def test_error_signals_that_are_summed_over_positions_in_16_bits(tmp_path, norm, layout, weights):
    """In some layouts PyTorch rounds each partial sum, in weights of 16 bits the whole one."""
    require(torch.bfloat16)
    if layout is torch.channels_last and isinstance(norm(), nn.GroupNorm):
        pytest.skip("PyTorch's GroupNorm crashes in this layout and type")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3), norm(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    model = model.to(weights, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(8))
            optimizer.zero_grad()
            inputs = torch.randn(8, 2, 24, 24).to(weights, memory_format=layout)
            with torch.autocast("cpu", torch.bfloat16, enabled=weights is torch.float32):
                output = model(inputs)
            F.cross_entropy(output.float(), torch.arange(8) % 3).backward()
            optimizer.step()
    assert dualform.open(tmp_path / "run", model).verify().passed


@pytest.mark.parametrize("seed", range(4))
def test_a_head_that_alone_was_clipped_under_autocast(tmp_path, monkeypatch, seed):
    """In the weight, three passes cancel so far that the bound on rounding is above their sum: any factor would explain it, and the surest one,
    that of the other layer, a gradient of hundreds of times its size. The bias tells by what it was clipped."""
    require(torch.bfloat16)
    monkeypatch.setattr(begin, "private_seed", lambda: seed)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-3)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(5):
            optimizer.zero_grad()
            inputs = torch.randn(8, 3)
            error = 3 + torch.randn(8, 3)
            for weight in (1.0, 1.0, -1.9):
                recorder.batch(sample_id=range(8))
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(inputs)
                (weight * output.float() * error).sum().backward()
            nn.utils.clip_grad_norm_(model[2].parameters(), 1e-3)
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert dual.store.updates["residual"].max() < 1
    assert dual.verify().passed


def test_gradients_that_lie_across_the_audits_random_matrix_are_not_refused(tmp_path, monkeypatch):
    """Rows of a gradient that are nearly parallel: R may show little of them, but it shows all of their rounding."""
    require(torch.bfloat16)
    torch.manual_seed(0)
    model = nn.Linear(128, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monkeypatch.setattr(begin, "private_seed", lambda: 0)
    random = Projection.of("weight", (16, 128), torch.float32, 0, vector=False).random
    common = torch.randn(128)
    common -= random[:, 0] * (common @ random[:, 0]) / 128  # all inputs are close to it, and R does not see it
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(5):
            x = common + 1e-3 * torch.randn(8, 128)
            recorder.batch(sample_id=range(8))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert dualform.open(tmp_path / "run", model).verify().passed
