"""Weights that are exactly zero and have no gradient, under coupled weight decay: 1 − lr·decay/ε is about −1,000 there."""

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import dualform
from reference import elementwise as reference

STEPS, LATE, SAMPLES, FEATURES, CLASSES = 40, 30, 10, 5, 3
NEVER, FROM_LATE_ON = 3, 4
"""Features that are zero, always or until step LATE; the weights of both begin as zeros."""
OPTIMIZERS = {
    "adam": (torch.optim.Adam, {"lr": 1e-3}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}),
    "maximize": (torch.optim.Adam, {"lr": 1e-3, "maximize": True}),
    "nadam": (torch.optim.NAdam, {"lr": 2e-3}),
    "radam": (torch.optim.RAdam, {"lr": 1e-3, "betas": (0.9, 0.99)}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-10}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "rmsprop with momentum": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}),
    "adamax": (torch.optim.Adamax, {"lr": 2e-3}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0, "eps": 1e-6}),
    "adadelta with huge decay": (torch.optim.Adadelta, {"lr": 1.0, "eps": 1e-6, "weight_decay": 30.0}),
    "adam with huge decay": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 10.0}),
    "adam with tiny eps": (torch.optim.Adam, {"lr": 1e-3, "eps": 1e-30}),
}
SOME = ["adam", "nadam", "rmsprop with momentum", "adamax", "adadelta with huge decay"]
LABELS = torch.arange(SAMPLES) % CLASSES
INPUTS = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
INPUTS[:, NEVER] = 0


def batch_of(step):
    return (torch.arange(4) * 3 + step) % SAMPLES


def inputs_of(step, dtype):
    inputs = INPUTS[batch_of(step)].to(dtype)
    if step < LATE:
        inputs[:, FROM_LATE_ON] = 0
    return inputs


def train(path, optimizer, settings, *, precision=torch.float64, dtype="float64", steps=STEPS, first=0.0, every=STEPS,
          **recording):  # fmt: skip
    """A linear classifier. first: what the weights of features that are zero at first begin as."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES)).to(precision)
    with torch.no_grad():
        model[0].weight[:, NEVER:] = first
    made = optimizer(model.parameters(), **{"weight_decay": 1e-2, **settings})
    with dualform.record(model, made, path, dtype=dtype, **recording) as recorder:
        for step in range(steps):
            ids = batch_of(step)
            recorder.batch(sample_id=ids, label=LABELS[ids])
            made.zero_grad()
            loss = F.cross_entropy(model(inputs_of(step, precision)), LABELS[ids])
            (-loss if settings.get("maximize") else loss).backward()
            made.step()
            if step % every == every - 1:
                recorder.seal()
    return dualform.open(path, model)


def queries(precision):
    inputs = INPUTS[:3].to(precision).clone()
    inputs[:, NEVER] = 2.0  # so that weights of the feature that was always zero are asked for
    return inputs


def scores(answer):
    return torch.cat([found.scores for found in answer.scores()], -1).double()


def by_reference(dual, optimizer, settings):
    """What every slot wrote to the weight, (slots, classes, features), and what is left of the first one; float64."""
    settings = {"weight_decay": 1e-2, **settings}
    chunks = list(dual.store.chunks("0"))
    keys = torch.cat([chunk.keys(torch.float64).vectors() for chunk in chunks]).numpy()
    errors = torch.cat([chunk.errors(torch.float64) for chunk in chunks]).numpy()
    each = len(batch_of(0))
    parts = errors[:, :, None] * keys[:, None, :]
    gradients = parts.reshape(-1, each, *parts.shape[1:]).sum(1)
    first = dual.store.snapshot(0)["model.0.weight"].double().numpy()
    maps, last = reference.sizes(optimizer.__name__, first, gradients, **settings)
    written = np.stack([reference.written(maps, slot // each, part) for slot, part in enumerate(parts)])
    return written, reference.kept_from_the_beginning(maps, first), last


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_contribution_is_that_of_a_plain_loop(tmp_path, name):
    optimizer, settings = OPTIMIZERS[name]
    dual = train(tmp_path / "run", optimizer, settings)
    written, left, last = by_reference(dual, optimizer, settings)
    trained = dual.model()[0].weight.detach().numpy()
    np.testing.assert_allclose(trained, last, rtol=1e-9, atol=1e-12)
    assert (trained[:, NEVER] == 0).all()
    assert (trained[:, FROM_LATE_ON] != 0).any()
    for unit in range(CLASSES):
        answer = dual.contributions(queries(torch.float64), target=unit)["0"]
        expected = np.einsum("si,qi->qs", written[:, unit], queries(torch.float64).numpy())
        bias_uses = [use for use in answer.layer.uses if use.role == "bias"]
        biases = scores(answer._with(answer._scorer.for_uses(bias_uses)))
        found = (scores(answer) - biases).numpy()
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9 * np.abs(expected).max())
        assert answer.parts()["remainder"].abs().max() <= 1e-9 * np.abs(expected).sum()
    masked = dual.masked(only="label = 1")[0].weight.detach().numpy()
    kept = np.array([int(LABELS[i]) == 1 for step in range(STEPS) for i in batch_of(step)])
    np.testing.assert_allclose(masked, left + written[kept].sum(0), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in OPTIMIZERS), *((name, "float16") for name in SOME)]
)
def test_answers_are_finite_and_add_up_in_float32(tmp_path, name, dtype):
    optimizer, settings = OPTIMIZERS[name]
    dual = train(tmp_path / "run", optimizer, settings, precision=torch.float32, dtype=dtype, every=8)
    assert_finite_and_adding_up(dual, dtype)


def assert_finite_and_adding_up(dual, dtype):
    answer = dual.contributions(queries(torch.float32), target=1)["0"]
    found = scores(answer)
    assert found.isfinite().all()
    parts = answer.parts()
    assert np.isfinite(parts.select(pl.col(pl.Float64)).to_numpy()).all()
    size = float(found.abs().sum()) + float(parts["initial"].abs().max())
    bar = {"float32": 1e-5, "float16": 1e-2}[dtype]
    first = dual.store.snapshot(0)["model.0.weight"].abs()
    has_digits = not ((first > 0) & (first < torch.finfo(torch.float32).tiny)).any()
    if has_digits:
        assert parts["remainder"].abs().max() <= bar * size
    total = answer.total("label").group_by("query").agg(pl.col("total").sum()).sort("query")["total"]
    np.testing.assert_allclose(total.to_numpy(), parts["slots"].to_numpy(), atol=1e-5 * size)
    assert answer.top(3)["contribution"].is_finite().all()
    without, only = (dual.masked(**{way: "label = 1"}, workers=1)[0].weight.double() for way in ("drop", "only"))
    nothing = dual.masked(drop="true")[0].weight.double()
    full = dual.masked(only="true")[0].weight.double()
    for one in (without, only, nothing, full):
        assert one.isfinite().all()
    limit = without.abs() + only.abs() + nothing.abs() + full.abs()
    assert ((without + only - nothing - full).abs() <= 1e-4 * limit.max()).all()
    beside = dual.masked(drop="label = 1", workers=2)[0].weight.double()
    assert beside.isfinite().all()
    if has_digits:
        assert (beside - without).abs().max() <= 10 * bar * limit.max()


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("keep", ["slots", "totals"])
def test_totals_that_were_kept_are_finite_too(tmp_path, name, keep):
    optimizer, settings = OPTIMIZERS[name]
    dual = train(tmp_path / "run", optimizer, settings, precision=torch.float32, dtype="float32", totals=["label"],
                 keep=keep)  # fmt: skip
    plain = train(tmp_path / "plain", optimizer, settings, precision=torch.float32, dtype="float32")
    answer, scanned = (one.contributions(queries(torch.float32), target=1)["0"] for one in (dual, plain))
    kept, expected = (one.total("label")["total"].to_numpy() for one in (answer, scanned))
    np.testing.assert_allclose(kept, expected, rtol=1e-4, atol=1e-6 * float(scores(scanned).abs().sum()))
    assert dual.verify().passed
    assert dual.masked(drop="label = 1")[0].weight.isfinite().all()
    assert answer.parts()["initial"].is_finite().all()


class Bag(nn.Module):
    """The mean of its words' vectors; word 0 is padding."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 4)

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1))


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_the_vector_of_padding(tmp_path, name, silent):
    torch.manual_seed(0)
    optimizer, settings = OPTIMIZERS[name]
    model, tokens = Bag(), torch.randint(0, 9, (12, 7))
    made = optimizer(model.parameters(), **{"weight_decay": 1e-2, **settings})
    with dualform.record(model, made, tmp_path / "run") as recorder:
        for _ in range(STEPS):
            ids = torch.randperm(12)[:6]
            recorder.batch(sample_id=ids)
            made.zero_grad()
            loss = F.cross_entropy(model(tokens[ids]), ids % 4)
            (-loss if settings.get("maximize") else loss).backward()
            made.step()
    dual = dualform.open(tmp_path / "run", model)
    answer = dual.contributions(tokens[:2], silent=silent)["words"]
    assert scores(answer).isfinite().all()
    assert answer.parts().select(pl.col(pl.Float64).is_finite().all()).row(0) == (True,) * 5
    assert answer.top(5, absolute=True)["contribution"].is_finite().all()


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("first", [1e-44, 1e-30, -1e-12])
def test_tiny_weights_that_only_decay(tmp_path, name, first):
    """What is left of them may be larger than they were by more than float32 can say."""
    optimizer, settings = OPTIMIZERS[name]
    dual = train(tmp_path / "run", optimizer, settings, precision=torch.float32, dtype="float32", first=first, every=8)
    assert dual.model()[0].weight.isfinite().all()
    assert_finite_and_adding_up(dual, "float32")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_that_cancel_exactly_have_written_nothing(tmp_path, name):
    """Two rows with the same input pull in opposite directions: their gradients cancel in every step."""
    optimizer, settings = OPTIMIZERS[name]
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight[0] = 0
    made = optimizer(model.parameters(), **{"weight_decay": 1e-2, **settings})
    inputs, signs = torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    with dualform.record(model, made, tmp_path / "run", totals=["side"]) as recorder:
        for step in range(STEPS):
            recorder.batch(side=[0, 1])
            made.zero_grad()
            (model(inputs) * signs).sum().backward()
            made.step()
            if step % 8 == 7:
                recorder.seal()
    dual = dualform.open(tmp_path / "run", model)
    assert (dual.model().weight[0] == 0).all()
    answers = dual.contributions(inputs, target=0)
    answer = answers[next(iter(answers))]
    assert scores(answer).isfinite().all()
    assert answer.total("side")["total"].is_finite().all()
    for workers in (1, 2):
        assert dual.masked(drop="side = 0", workers=workers).weight.isfinite().all()


@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    decay=st.sampled_from([1e-4, 1e-2, 1.0, 100.0]),
    eps=st.sampled_from([1e-8, 1e-16, 1e-38, 1e-3]),
    lr=st.sampled_from([1e-4, 1e-2, 1.0]),
    first=st.sampled_from([0.0, 1e-40, 1e-20, 1e-3]),
    dtype=st.sampled_from(["float32", "float16"]),
    steps=st.integers(1, STEPS),
)
def test_what_training_kept_finite_stays_finite(tmp_path_factory, name, decay, eps, lr, first, dtype, steps):
    optimizer, settings = OPTIMIZERS[name]
    settings = {**settings, "weight_decay": decay, "eps": eps, "lr": lr}
    folder = tmp_path_factory.mktemp("rest")
    dual = train(
        folder / "run", optimizer, settings, precision=torch.float32, dtype=dtype, steps=steps, first=first, every=8
    )
    assume(dual.model()[0].weight.isfinite().all())
    assert_finite_and_adding_up(dual, dtype)
