"""Slots that wrote nothing take no part in answers, unless they are asked for."""

import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from torch import nn

import dualform
from dualform.errors import NotRecordedError
from dualform.query import search as searching
from dualform.query.search import candidates, index
from padded import PADDING, ROWS, SAMPLES, TOKENS, network, one_hot, padding_of, train, with_embedding
from reference import ranking

QUERIES = torch.arange(SAMPLES)


@pytest.fixture(scope="module")
def dual(tmp_path_factory):
    return train(tmp_path_factory.mktemp("padded") / "run", chunk_bytes=700)


@pytest.fixture(scope="module")
def padding(dual):
    return padding_of(dual)


def scores_of(answer):
    """Every score, (queries, slots), and the numbers of the slots."""
    pieces = list(answer.scores())
    scores = torch.cat([scores.reshape(-1, scores.shape[-1]) for _, scores in pieces], 1)
    return torch.cat([numbers for numbers, _ in pieces]), scores


def signed_for(way, scores):
    """Scores of which the largest are asked for."""
    return {"highest": scores, "lowest": -scores, "absolute": scores.abs()}[way]


def head_of(scores, numbers, k, *, way="highest"):
    """The slots that a full sort of one query's scores puts first."""
    return [int(numbers[place]) for place in ranking.top(signed_for(way, scores).tolist(), k)]


def is_head(found, scores, numbers, *, way):
    """Whether a full sort could begin with these slots: scores that differ by rounding alone may come in either order."""
    place = {int(number): place for place, number in enumerate(numbers)}
    signed = signed_for(way, scores)
    mine = signed[[place[slot] for slot in found]]
    best = signed.sort(descending=True).values[: len(found)]
    return len(set(found)) == len(found) and torch.allclose(mine, best)


@pytest.fixture(params=["all scores", "index"])
def search(request, monkeypatch):
    """All scores are computed, or bounds tell which few are."""
    if request.param == "index":
        monkeypatch.setattr(index, "FEWEST_SLOTS", 0)
        monkeypatch.setattr(candidates, "MANY", 1e9)
        monkeypatch.setattr(searching, "scan_top_k", None)


# Which slots are silent


@pytest.mark.parametrize("keep", ["slots", "keys"])
@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_padding_and_ignored_labels_are_silent_in_every_layer(tmp_path, precision, keep):
    dual = train(tmp_path / "run", precision=precision, keep=keep)
    for layer in dual.layers:
        assert dual.slots(layer)["silent"].to_list() == padding_of(dual).tolist()


def test_layers_of_other_forms(tmp_path):
    dual = train(tmp_path / "run", model=with_embedding())
    for layer in dual.layers:
        assert dual.slots(layer)["silent"].to_list() == padding_of(dual).tolist()


def test_ordinary_batches_with_a_row_that_has_no_label(tmp_path):
    """One slot for each row, which the compiled loop takes as a whole."""
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = torch.tensor([1, -100, 2, 3])
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(6):  # memory that is used again must not remember
            recorder.batch(sample_id=torch.arange(4))
            optimizer.zero_grad()
            wanted = labels if step % 2 == 0 else labels.clamp(min=0)
            nn.functional.cross_entropy(model(one_hot(QUERIES, torch.float32)[:4, 0]), wanted).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    for layer in dual.layers:
        assert dual.slots(layer)["silent"].to_list() == ([False, True, False, False] + [False] * 4) * 3


@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_tiny_error_signals_are_not_silent(tmp_path, precision):
    """Their squares vanish, they do not."""
    model = network(precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", on_unexplained="mark") as recorder:
        recorder.batch(sample_id=torch.arange(2))
        (model(one_hot(QUERIES, precision)[:2, 0]) * torch.finfo(precision).tiny).sum().backward()
        optimizer.step()
    assert not dualform.open(tmp_path / "run").slots("2")["silent"].any()


def test_a_convolution(tmp_path):
    """A maximum over positions passes its gradient to one of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 1, 2), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(1, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 2, 6, dtype=torch.float64)
    with dualform.record(model, optimizer, tmp_path / "run", dtype="float64") as recorder:
        recorder.batch(sample_id=torch.arange(4))
        nn.functional.cross_entropy(model(inputs), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    silent = dual.slots("0")["silent"].to_numpy().reshape(4, 5)
    assert (silent.sum(1) == 4).all()
    top = dual.attend(inputs)["0"].top(9)
    assert set(top["slot"].to_list()) == set(np.flatnonzero(~silent.reshape(-1)).tolist())


# Attention


@pytest.mark.parametrize("layer", ["0", "2"])
def test_weights_are_those_of_the_slots_that_wrote(dual, padding, layer):
    every, all_scores = scores_of(dual.attend(one_hot(QUERIES), silent=True)[layer])
    numbers, scores = scores_of(dual.attend(one_hot(QUERIES))[layer])
    assert every.tolist() == list(range(len(padding)))
    assert numbers.tolist() == torch.nonzero(~padding)[:, 0].tolist()
    torch.testing.assert_close(scores, all_scores[:, ~padding], rtol=0, atol=0)


@pytest.mark.parametrize("way", ["highest", "lowest", "absolute"])
@pytest.mark.parametrize("layer", ["0", "2"])
def test_top(dual, padding, search, layer, way):
    options = {} if way == "highest" else {way: True}
    for silent in (False, True):
        answer = dual.attend(one_hot(QUERIES), silent=silent)[layer]
        numbers, scores = scores_of(answer)
        found = answer.top(6, **options)
        best = answer.best(6, **options)
        for query in range(len(scores)):
            listed = found["slot"].to_list()[6 * query : 6 * query + 6]
            assert is_head(listed, scores[query], numbers, way=way)
            assert is_head(best.slots[query].tolist(), scores[query], numbers, way=way)
        assert silent or not padding[found["slot"].to_list()].any()


def test_a_layer_that_is_asked_in_both_ways_remembers_both(dual, padding):
    for _ in range(2):
        for silent in (False, True):
            top = dual.attend(one_hot(QUERIES[:1]), silent=silent)["0"].top(len(padding))
            assert bool(padding[top["slot"].to_list()].any()) == silent


@pytest.mark.parametrize("layer", ["0", "2"])
def test_top_per_group(dual, search, layer):
    answer = dual.attend(one_hot(QUERIES[:2]))[layer]
    numbers, scores = scores_of(answer)
    samples = dual.slots(layer).join(dual.rows.with_row_index("row").cast({"row": pl.Int64}), on="row")["sample_id"]
    samples = torch.tensor(samples.to_list())[numbers]
    found = answer.top(3, per="sample_id")
    for query in range(2):
        first = found.filter((pl.col("query") == query) & (pl.col("position") == 0))
        for sample in range(SAMPLES):
            mine = samples == sample
            expected = head_of(scores[query * PADDING.shape[1]][mine], numbers[mine], 3)
            assert first.filter(pl.col("sample_id") == sample)["slot"].to_list() == expected


@pytest.mark.parametrize("layer", ["0", "2"])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("by", ["sample_id", "token", "step"])
def test_totals_are_sums_over_the_slots_that_wrote(dual, padding, layer, absolute, by):
    for silent in (False, True):
        answer = dual.attend(one_hot(QUERIES[:2]), silent=silent)[layer]
        numbers, _ = scores_of(answer)
        every = answer.top(len(numbers))
        sums = every.group_by("query", "position", by).agg(
            (pl.col("weight").abs() if absolute else pl.col("weight")).sum().alias("expected"), pl.len().alias("slots")
        )
        found = answer.total(by, absolute=absolute).join(sums, on=["query", "position", by], how="left")
        assert found["total"].to_list() == pytest.approx(found["expected"].fill_null(0).to_list(), abs=1e-12)
        bare = answer.sums(by, absolute=absolute)
        assert int(bare.visits.sum()) == (len(padding) if silent else int((~padding).sum()))


def test_visits_of_the_best_groups(dual):
    top = dual.attend(one_hot(QUERIES[:1]))["2"].top(SAMPLES, by="sample_id")
    found = top.filter(pl.col("position") == 0)
    visits = dict(zip(found["sample_id"].to_list(), found["visits"].to_list(), strict=True))
    times = dual.rows["sample_id"].value_counts()
    expected = {s: n * int((~PADDING[s]).sum()) for s, n in times.iter_rows() if int((~PADDING[s]).sum())}
    assert visits == expected  # sample 6 wrote nothing at all


def test_conditions_go_along(dual, padding):
    answer = dual.attend(one_hot(QUERIES[:1]))["2"]
    found = answer.top(100, where=pl.col("step") >= 2)
    steps = torch.from_numpy(dual.slots("2")["step"].to_numpy().copy())
    expected = torch.nonzero(~padding & (steps >= 2))[:, 0].tolist()
    assert sorted(set(found["slot"].to_list())) == expected
    assert not answer.top(3, where=pl.col("padding")).height


def test_an_earlier_moment(dual, padding):
    early = dual.at(2)
    count = 2 * ROWS * PADDING.shape[1]
    numbers, _ = scores_of(early.attend(one_hot(QUERIES[:1]))["2"])
    assert numbers.tolist() == torch.nonzero(~padding[:count])[:, 0].tolist()


def test_numbers_as_keys(tmp_path):
    dual = train(tmp_path / "run", model=with_embedding())
    padding, tokens = padding_of(dual), torch.tensor([[0, 3]])
    found = dual.attend(tokens)["0"].top(len(padding))
    assert not padding[found["slot"].to_list()].any()
    total = dual.attend(tokens)["0"].total("token")
    assert total.filter((pl.col("position") == 0) & (pl.col("token") == 0))["total"].to_list() == [0.0]


# Totals that were kept


@pytest.mark.parametrize("model", [network, with_embedding])
@pytest.mark.parametrize("online", [True, False])
def test_kept_totals_leave_silent_slots_out(tmp_path, online, model):
    settings = {"totals": ["token"]} if online else {}
    dual = train(tmp_path / "run", model=model(), **settings)
    scanned = train(tmp_path / "scanned", model=model())
    if not online:
        dualform.build_totals(tmp_path / "run", "token")
        dual = dual.reopened()
    inputs = one_hot(QUERIES) if model is network else torch.arange(TOKENS)[:, None]
    for layer in dual.attend(inputs):
        for silent in (False, True):
            one, other = (some.attend(inputs, silent=silent)[layer] for some in (dual, scanned))
            assert one.total("token")["total"].to_list() == pytest.approx(other.total("token")["total"].to_list())
            columns = ["query", "position", "rank", "weight", "token", "visits"]
            found, expected = (some.top(3, by="token").select(columns) for some in (one, other))
            assert_frame_equal(found, expected, abs_tol=1e-6)


def test_totals_alone_do_not_know_silent_slots(tmp_path):
    dual = train(tmp_path / "run", keep="totals", totals=["sample_id"])
    expected = train(tmp_path / "slots").attend(one_hot(QUERIES))["2"].total("sample_id")["total"]
    assert dual.attend(one_hot(QUERIES))["2"].total("sample_id")["total"].to_list() == pytest.approx(expected.to_list())
    with pytest.raises(NotRecordedError, match="totals by sample_id with silent=True"):
        dual.attend(one_hot(QUERIES), silent=True)["2"].total("sample_id")


# Contributions


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_contributions(tmp_path, optimizer):
    dual = train(tmp_path / "run", optimizer=lambda parameters: optimizer(parameters, lr=0.05))
    padding = padding_of(dual)
    target = lambda output: output[:, 0, 1]  # noqa: E731
    for layer in dual.layers:
        default, every = (
            dual.contributions(one_hot(QUERIES), target=target, silent=silent)[layer] for silent in (False, True)
        )
        numbers, scores = scores_of(default)
        _, all_scores = scores_of(every)
        assert numbers.tolist() == torch.nonzero(~padding)[:, 0].tolist()
        torch.testing.assert_close(scores, all_scores[:, ~padding], rtol=0, atol=1e-15)
        assert not all_scores[:, padding].any()
        assert_frame_equal(default.parts(), every.parts(), abs_tol=1e-13)
        assert default.parts()["remainder"].abs().max() < (1e-10 if layer == "2" else 1e9)
        for options in ({}, {"lowest": True}, {"absolute": True}):
            found = default.top(len(padding), **options)
            assert not padding[found["slot"].to_list()].any()
            assert every.top(len(padding), **options).height == len(padding) * SAMPLES
        assert default.sums("sample_id").visits.sum() == int((~padding).sum())


# Influence


@pytest.mark.parametrize("silent", [False, True])
def test_influence_of_rows_and_slots(dual, padding, silent):
    answer = dual.influence(one_hot(QUERIES[:2]), target=lambda output: output[:, 0, 1], silent=silent)
    rows = answer.top(1000)
    wrote = {sample for sample in range(SAMPLES) if not PADDING[sample].all()}
    seen = set(dual.rows["sample_id"].to_list())
    assert set(rows["sample_id"].to_list()) == (seen if silent else seen & wrote)
    assert bool(padding[answer["2"].top(1000)["slot"].to_list()].any()) == silent
    groups = answer.top(1000, by="sample_id")
    assert set(groups["sample_id"].to_list()) == (seen if silent else seen & wrote)
