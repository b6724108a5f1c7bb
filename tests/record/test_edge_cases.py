"""Small things that broke."""

import polars as pl
import pytest
import torch
from torch import nn

import dualform
from dualform import projection
from recorded_networks import (
    CLASSES,
    LABELS,
    NETWORKS,
    OPTIMIZERS,
    ROWS,
    SAMPLES,
    TIME,
    WIDTH,
    Recurrent,
    assert_close,
    assert_exact,
    parameters,
    train,
    vectors,
)


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
