"""Contributions of keep="projected": right on average, and as far off as their standard errors say."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import NotRecordedError
from dualform.layers.keys import Vectors
from dualform.layers.layer import Layer, Use
from dualform.layers.projected import SlotViews, projected_layer
from dualform.query.projected_contributions import _Spread
from dualform.record import begin
from recorded_networks import train

TIME = 6
WIDTH = 32
CLASSES = 20
SAMPLES = 8


class Sequences(nn.Module):
    """Layers of every form, none of them longer than a matrix can be taken of."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.body = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True)
        self.head = nn.Linear(WIDTH // 2, CLASSES)

    def forward(self, tokens):
        x = self.norm(self.tokens(tokens))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.body(x)[0])


def tokens(count):
    return torch.randint(0, CLASSES, (count, TIME), generator=torch.Generator().manual_seed(2))


def recorded(path, steps=6, optimizer=torch.optim.SGD, **settings):
    torch.manual_seed(0)
    model = Sequences().double()
    made = optimizer(model.parameters(), 0.1)
    data = tokens(SAMPLES)
    with dualform.record(model, made, path, **settings) as recorder:
        for step in range(steps):
            ids = torch.arange(4 * (step % 2), 4 * (step % 2) + 4)
            recorder.batch(sample_id=ids, label=ids % 3)
            made.zero_grad()
            F.cross_entropy(model(data[ids]).flatten(0, 1), data[ids].roll(1, 1).flatten()).backward()
            made.step()
    return dualform.open(path, model)


def target(output):
    return output[:, -1, 3]


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("exact") / "run")


def test_estimates_are_right_on_average_and_intervals_cover(exact, tmp_path, monkeypatch):
    inputs = tokens(3)
    answers = exact.contributions(inputs, target=target)
    true = {name: answers[name].total("sample_id")["total"].to_torch() for name in answers}
    true[""] = answers.total("sample_id")["total"].to_torch()
    draws = 25
    found = {name: [] for name in true}
    for seed in range(draws):
        monkeypatch.setattr(begin, "private_seed", lambda seed=seed: 1000 + seed)
        dual = recorded(tmp_path / str(seed), keep="projected", projection=16)
        estimated = dual.contributions(inputs, target=target)
        for name in true:
            table = (estimated[name] if name else estimated).total("sample_id")
            has_errors = not name or dual.store.layer(name)[1].projected_from is not None
            assert ("standard_error" in table.columns) == has_errors
            error = table["standard_error"].to_torch() if has_errors else torch.zeros(len(table), dtype=torch.float64)
            found[name].append(torch.stack([table["total"].to_torch(), error]))
    for name, tables in found.items():
        totals, errors = torch.stack(tables, 1)
        if not errors.any():
            torch.testing.assert_close(totals.mean(0), true[name], rtol=0, atol=1e-12)
            continue
        off = totals - true[name]
        covered = float((off.abs() <= 1.96 * errors).double().mean())
        # Of 95 %: scores of one draw are off together, and there are but 25; below, there are more
        assert 0.84 <= covered <= 0.99, name
        # Squares of errors, in the mean over draws and groups, are what the standard errors say
        assert float(off.square().mean() / errors.square().mean()) == pytest.approx(1, abs=0.35), name
        bias = off.mean(0) / (errors.square().mean(0) / draws).sqrt()
        assert float(bias.abs().mean()) < 1.4, name  # 0.8 of a normal number


def test_intervals_of_inner_products_cover_95_percent():
    covered = []
    for number, (d_out, d_in, rank) in enumerate([(128, 160, 1), (128, 160, 8), (50, 160, 2), (160, 50, 2)]):
        for alike in (0.0, 0.3):
            off, error = drawn_estimates(d_out, d_in, rank, alike, seed=number)
            covered.append(float((off.abs() <= 1.96 * error).double().mean()))
            # Neither too narrow nor much wider than they need to be, and right on average
            assert 0.4 <= float(off.square().mean() / error.square().mean()) <= 1.4
            assert abs(float(off.mean())) <= 3.5 * float(off.std()) / len(off) ** 0.5
    # Each is a mean of 100; where query and row are alike, products have long tails
    assert min(covered) >= 0.8
    assert 0.9 <= sum(covered) / len(covered) <= 0.99


def drawn_estimates(d_out, d_in, rank, alike, seed):
    """By how much 100 estimates of an inner product are off, and their standard errors."""
    layer = Layer("map", "linear", d_in, d_out, (Use("weight", "weight"), Use("bias", "bias")))
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(rank, d_in, generator=generator, dtype=torch.float64)
    errors = torch.randn(rank, d_out, generator=generator, dtype=torch.float64)
    query = torch.randn(d_in, generator=generator, dtype=torch.float64) + alike * keys[0]
    slope = torch.randn(d_out, generator=generator, dtype=torch.float64) + alike * errors[0]
    exact = ((keys @ query + 1) * (errors @ slope)).sum()
    off = torch.zeros(100, dtype=torch.float64)
    error = torch.zeros(100, dtype=torch.float64)
    for draw in range(100):
        stored = projected_layer(layer, 64, draw)
        views = SlotViews.of(stored)
        seen = [views.keys(Vectors(keys)), views.errors(errors)]
        asked = [views.keys(Vectors(query[None])), views.errors(slope[None])]
        table = (asked[1].T @ asked[0]) * (seen[1].T @ seen[0])
        of_bias = asked[1][0] * seen[1].sum(0)
        spread = _Spread(views, 1)
        spread.add(stored.uses[0], table[None])
        spread.add(stored.uses[1], of_bias[None])
        off[draw] = table.sum() + of_bias.sum() - exact
        error[draw] = spread.variance().sqrt()
    return off, error


def test_every_row_has_a_standard_error(tmp_path):
    dual = recorded(tmp_path / "run", keep="projected", projection=4)
    answer = dual.contributions(tokens(2), target=target)["conv"]
    best = answer.top(3)
    assert best.columns[:4] == ["query", "rank", "contribution", "standard_error"]
    by_row = answer.total(["step", "sample_id"])
    for line in best.iter_rows(named=True):
        [total] = by_row.filter(query=line["query"], step=line["step"], sample_id=line["sample_id"]).to_dicts()
        assert line["contribution"] == pytest.approx(total["total"], rel=1e-12)
        assert line["standard_error"] == pytest.approx(total["standard_error"], rel=1e-9)
    by_label = answer.top(2, by="label")
    totals = answer.total("label")
    for line in by_label.iter_rows(named=True):
        [total] = totals.filter(query=line["query"], label=line["label"]).to_dicts()
        assert line["standard_error"] == pytest.approx(total["standard_error"], rel=1e-12)
    some = answer.total("label", where="step < 3")
    assert (some["standard_error"] < totals["standard_error"]).any()


def test_what_estimates_cannot_answer_is_refused(tmp_path):
    inputs = tokens(2)
    dual = recorded(tmp_path / "run", keep="projected", projection=4)
    answer = dual.contributions(inputs, target=target)["conv"]
    for question in (answer.parts, lambda: answer.part("input"), lambda: answer.gate("i")):
        with pytest.raises(NotRecordedError, match="needs exact sums, but it keeps random projections"):
            question()
    with pytest.raises(NotRecordedError, match="absolute=True of layer 'conv' needs exact sums"):
        answer.total("label", absolute=True)
    adam = recorded(tmp_path / "adam", optimizer=torch.optim.Adam, keep="projected", projection=4)
    with pytest.raises(NotRecordedError, match=r"Its optimizer \(of the Adam family\) multiplies each number"):
        adam.contributions(inputs, target=target)
    tied = train("gpt", "sgd", tmp_path / "tied", keep="projected", projection=3)
    with pytest.raises(NotRecordedError, match=r"'tokens' .* shares a weight with 'head'"):
        tied.dual.contributions(tied.inputs[:2], target=lambda output: output[:, -1, 1])


class Attention(nn.Module):
    """Query, key and value have different rows of one weight."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.body = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        x = self.tokens(tokens)
        return self.head(self.body(x, x, x, need_weights=False)[0])


def test_the_parts_of_an_attention_share_no_weight(tmp_path, monkeypatch):
    seeds = itertools.count(1000)
    monkeypatch.setattr(begin, "private_seed", lambda: next(seeds))
    torch.manual_seed(0)
    model = Attention().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = tokens(SAMPLES)
    projections = {"all": {}} | {str(draw): {"keep": "projected", "projection": WIDTH // 2} for draw in range(8)}
    recorders = [dualform.record(model, optimizer, tmp_path / name, **keep) for name, keep in projections.items()]
    for _ in range(3):
        for recorder in recorders:
            recorder.batch(sample_id=range(SAMPLES))
        optimizer.zero_grad()
        F.cross_entropy(model(data).flatten(0, 1), data.roll(1, 1).flatten()).backward()
        optimizer.step()
    for recorder in recorders:
        recorder.close()
    exact, *estimated = [
        dualform.open(tmp_path / name, model).contributions(data[:2], target=target) for name in projections
    ]
    for name in ("body.q", "body.k", "body.v"):
        true = exact[name].total("sample_id")["total"].to_torch()
        tables = [one[name].total("sample_id") for one in estimated]
        off = torch.stack([table["total"].to_torch() - true for table in tables])
        errors = torch.stack([table["standard_error"].to_torch() for table in tables])
        assert float(off.square().mean() / errors.square().mean()) == pytest.approx(1, abs=0.8), name
        bias = off.mean(0) / (errors.square().mean(0) / len(tables)).sqrt()
        assert float(bias.abs().mean()) < 2, name  # 0.8 of a normal number
