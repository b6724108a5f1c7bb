"""Totals of every type of layer, where model and store have different types of numbers."""

import itertools

import polars as pl
import pytest
import torch
from torch import nn

import dualform
from dualform.layers.rules import RULES

ROWS, STEPS = 3, 3
TORCH = {"float32": torch.float32, "float64": torch.float64}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4),
}


class Whole(nn.Module):
    """One layer, and the mean of what it gives for each row: outputs (rows, 2)."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        found = self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        while isinstance(found, tuple):
            found = found[0]
        flat = found.flatten(1)
        signs = torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype)
        return torch.stack([(flat * signs).mean(1), flat.square().mean(1)], 1)


def numbers(*shape):
    return lambda: torch.randn(ROWS, *shape, dtype=torch.float64)


LAYERS = {
    nn.Linear: (lambda: nn.Linear(4, 3), numbers(4)),
    nn.Embedding: (lambda: nn.Embedding(6, 3, padding_idx=0), lambda: torch.randint(0, 6, (ROWS, 4))),
    nn.Conv1d: (lambda: nn.Conv1d(2, 4, 3, padding=1, groups=2), numbers(2, 5)),
    nn.Conv2d: (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), numbers(2, 4, 5)),
    nn.Conv3d: (lambda: nn.Conv3d(1, 2, 2, stride=2), numbers(1, 4, 4, 4)),
    nn.LayerNorm: (lambda: nn.LayerNorm(4), numbers(4)),
    nn.RMSNorm: (lambda: nn.RMSNorm(4), numbers(4)),
    nn.GroupNorm: (lambda: nn.GroupNorm(2, 4), numbers(4, 3)),
    nn.BatchNorm1d: (lambda: nn.BatchNorm1d(4), numbers(4)),
    nn.BatchNorm2d: (lambda: nn.BatchNorm2d(2), numbers(2, 3, 3)),
    nn.BatchNorm3d: (lambda: nn.BatchNorm3d(2), numbers(2, 2, 3, 2)),
    nn.MultiheadAttention: (lambda: nn.MultiheadAttention(4, 2, batch_first=True), numbers(5, 4)),
    nn.LSTM: (lambda: nn.LSTM(3, 4, batch_first=True), numbers(5, 3)),
    nn.GRU: (lambda: nn.GRU(3, 4, batch_first=True), numbers(5, 3)),
    nn.RNN: (lambda: nn.RNN(3, 4, batch_first=True), numbers(5, 3)),
    nn.LSTMCell: (lambda: nn.LSTMCell(3, 4), numbers(3)),
    nn.GRUCell: (lambda: nn.GRUCell(3, 4), numbers(3)),
    nn.RNNCell: (lambda: nn.RNNCell(3, 4), numbers(3)),
}


def train(path, kind, model_dtype, store_dtype, optimizer, **settings):
    torch.manual_seed(0)
    layer, inputs = LAYERS[kind]
    model = Whole(layer()).to(TORCH[model_dtype])
    made = OPTIMIZERS[optimizer](model.parameters())
    with dualform.record(model, made, path, dtype=store_dtype, **settings) as recorder:
        for step in range(STEPS):
            x = inputs()
            x = x.to(TORCH[model_dtype]) if x.is_floating_point() else x
            labels = (torch.arange(ROWS) + step) % 2
            recorder.batch(label=labels, same=labels)
            made.zero_grad()
            model(x).square().sum().backward()
            made.step()
    return dualform.open(path, model)


def test_every_type_of_layer_is_here():
    assert set(LAYERS) == set(RULES)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("store_dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("model_dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_group_deltas_are_those_of_the_slots(tmp_path, kind, model_dtype, store_dtype, optimizer):
    dual = train(tmp_path / "run", kind, model_dtype, store_dtype, optimizer, totals=["label"])
    assert dual.verify().passed, str(dual.verify())
    from_totals = dual.masked(drop=pl.col("label") == 1)
    from_slots = dual.masked(drop=pl.col("same") == 1, read="kept")
    tolerance = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-9}
    assert_close(from_totals, from_slots, max(tolerance[model_dtype], tolerance[store_dtype]))


def assert_close(found, expected, bar):
    for (name, one), other in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(one, other[1], rtol=bar, atol=bar, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("model_dtype", "store_dtype"), list(itertools.product(TORCH, repeat=2)))
@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_totals_that_are_built_later_or_kept_alone(tmp_path, kind, model_dtype, store_dtype):
    later = train(tmp_path / "later", kind, model_dtype, store_dtype, "sgd")
    dualform.build_totals(tmp_path / "later", by="label")
    alone = train(tmp_path / "alone", kind, model_dtype, store_dtype, "sgd", totals=["label"], keep="totals")
    assert alone.verify().passed, str(alone.verify())
    found, expected = (dual.masked(drop=pl.col("label") == 1) for dual in (alone, later.reopened()))
    assert_close(found, expected, 1e-9 if model_dtype == store_dtype == "float64" else 1e-5)
