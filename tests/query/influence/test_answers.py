"""Influence as an answer: sums over segments, layers, groups and positions; and what it refuses."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.errors import MaskError, NotRecordedError, QuestionError, UnknownLayerError
from dualform.query.influence.scores import LinearScores
from training import FEATURES, Run, network, samples, sgd, train

METHODS = ("whitened", "kernel", "sketch")
SEGMENTS = [(0, 2), (2, 5), (5, 6)]


@pytest.fixture(scope="module")
def asked():
    return torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def table(answer):
    """rows (n,) and scores (queries, n)."""
    pieces = list(answer.scores())
    return torch.cat([rows for rows, _ in pieces]).numpy(), torch.cat([scores for _, scores in pieces], 1).numpy()


@pytest.mark.parametrize("method", METHODS)
def test_segments_add_up(dual, asked, method):
    whole = dual.influence(asked, method=method, segments=SEGMENTS).total("sample_id")
    parts = [dual.influence(asked, method=method, segments=[one]).total("sample_id") for one in SEGMENTS]
    summed = pl.concat(parts).group_by("query", "sample_id").agg(pl.col("total").sum())
    both = whole.join(summed, on=["query", "sample_id"], how="left").fill_null(0)
    np.testing.assert_allclose(both["total"], both["total_right"], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_the_plain_table_of_scores(dual, asked, method):
    found = dual.influence(asked, method=method, segments=SEGMENTS)
    rows, scores = table(found)
    assert rows.tolist() == list(range(30))
    columns = dual.rows
    top = found.top(4)
    for query in range(3):
        expected = np.argsort(-scores[query], kind="stable")[:4]
        mine = top.filter(pl.col("query") == query)
        np.testing.assert_allclose(mine["influence"], scores[query, expected], rtol=1e-9)
        assert mine["sample_id"].to_list() == columns["sample_id"].to_numpy()[mine["row"].to_numpy()].tolist()
    late = found.total("label", where=pl.col("step") >= 3)
    for query, label, total in late.rows():
        here = (columns["label"].to_numpy() == label) & (columns["step"].to_numpy() >= 3)
        np.testing.assert_allclose(total, scores[query, here].sum(), rtol=1e-9, atol=1e-11)
    best = found.top(1, by="sample_id", lowest=True)
    sums = {s: scores[:, columns["sample_id"].to_numpy() == s].sum(1) for s in columns["sample_id"].unique()}
    assert best["influence"].to_list() == pytest.approx([min(v[q] for v in sums.values()) for q in range(3)], rel=1e-9)
    per = found.top(1, per="task", absolute=True)
    assert per.height == 6


def test_rows_outside_of_segments_take_no_part(dual, asked):
    found = dual.influence(asked, segments=[(1, 3)])
    assert table(found)[0].tolist() == list(range(5, 15))
    assert table(found["2"])[0].tolist() == list(range(5, 15))
    assert set(found["2"].top(50)["step"]) == {1, 2}
    assert found.top(50)["row"].n_unique() == 10


def test_it_is_lazy_about_chunks_and_queries(trained, asked):
    """Asking one by one is asking all."""
    whole = trained.dual.influence(asked, target=[0, 1, 2], segments=SEGMENTS)
    for query, target in enumerate([0, 1, 2]):
        one = trained.dual.influence(asked[query : query + 1], target=target, segments=SEGMENTS)
        np.testing.assert_allclose(table(one)[1][0], table(whole)[1][query], rtol=1e-9, atol=1e-12)


def test_the_target_is_the_margin_of_the_final_answer_or_a_function(dual, asked):
    answers = dual.model()(asked).argmax(1)
    by_answer = table(dual.influence(asked, segments=SEGMENTS))[1]
    np.testing.assert_array_equal(by_answer, table(dual.influence(asked, target=answers, segments=SEGMENTS))[1])

    def margin(output):
        p = output.softmax(1)[range(3), answers]
        return (p / (1 - p)).log()

    np.testing.assert_allclose(
        table(dual.influence(asked, target=margin, segments=SEGMENTS))[1], by_answer, rtol=1e-6, atol=1e-9
    )


def test_what_was_until_then(dual, trained, asked):
    found = dual.at(4).influence(asked, segments=[(0, 2), (2, 4)])
    expected = dual.influence(asked, target=dual.at(4).model()(asked).argmax(1), segments=[(0, 2), (2, 4)])
    np.testing.assert_allclose(table(found)[1], table(expected)[1], rtol=1e-9, atol=1e-12)


def test_one_layer_alone(dual, asked):
    found = dual.influence(asked, layers="2", segments=SEGMENTS)
    assert list(found) == ["2"]
    np.testing.assert_allclose(
        table(found)[1], table(dual.influence(asked, segments=SEGMENTS)["2"])[1], rtol=1e-9, atol=1e-12
    )
    with pytest.raises(UnknownLayerError, match="left out, or not called"):
        found["0"]
    with pytest.raises(UnknownLayerError, match="was not recorded"):
        found["9"]


# Language models: rows are passages, positions are tokens

TIME, TOKENS = 4, 6


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.body, self.head = (
            nn.Embedding(TOKENS, 5),
            nn.LSTM(5, 4, batch_first=True),
            nn.Linear(4, TOKENS),
        )

    def forward(self, tokens):
        return self.head(self.body(self.tokens(tokens))[0])


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    path = tmp_path_factory.mktemp("language") / "run"
    torch.manual_seed(0)
    model = Language().double()
    texts = torch.randint(0, TOKENS, (6, TIME + 1), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, path, chunk_bytes=3000) as recorder:
        for step in range(6):
            ids = torch.arange(3) + 3 * (step % 2)
            recorder.batch(sample_id=ids, token=texts[ids, :TIME])
            optimizer.zero_grad()
            F.cross_entropy(model(texts[ids, :TIME]).flatten(0, 1), texts[ids, 1:].flatten()).backward()
            optimizer.step()
    return Run(Path(path), model)


def likely(output):
    return output[:, -1].log_softmax(-1)[:, 2]


def test_passages_and_tokens_of_a_language_model(language):
    prompts = torch.tensor([[1, 2, 3, 4], [0, 0, 5, 1]])
    found = language.dual.influence(prompts, target=likely)
    assert found.segments == [(0, 2), (2, 4), (4, 6)]
    passages = found.total("sample_id")
    tokens = found.total(["sample_id", "token", "position"])
    again = tokens.group_by("query", "sample_id").agg(pl.col("total").sum()).sort("query", "sample_id")
    np.testing.assert_allclose(passages["total"], again["total"], rtol=1e-9, atol=1e-12)
    assert found.top(2, by=["sample_id", "position"]).columns[:5] == [
        "query",
        "rank",
        "influence",
        "sample_id",
        "slot_position",
    ]
    last = found["head"].total("sample_id", where=pl.col("position") == TIME - 1)
    slots = found["head"].top(100, where=pl.col("position") == TIME - 1)
    assert last["total"].sum() == pytest.approx(slots["influence"].sum())
    # where= on positions, in the sum over layers
    early, late = (found.total("sample_id", where=where) for where in (pl.col("position") < 2, pl.col("position") >= 2))
    np.testing.assert_allclose(early["total"] + late["total"], passages["total"], rtol=1e-9, atol=1e-12)


def test_rows_have_no_position(language):
    found = language.dual.influence(torch.tensor([[1, 2, 3, 4]]), target=likely)
    with pytest.raises(MaskError, match="rows have no position"):
        found.top(3, where=pl.col("position") == 1)
    with pytest.raises(QuestionError, match="rows have no position"):
        found.top(3, per="token")
    with pytest.raises(QuestionError, match="rows have no position"):
        found.total("token", absolute=True)


@pytest.mark.parametrize("method", ["kernel", "sketch"])
def test_many_labels_a_row_are_refused(language, method):
    with pytest.raises(
        NotRecordedError, match=r'several slots for each row .*, hence several labels.*method="whitened"'
    ):
        language.dual.influence(torch.tensor([[1, 2, 3, 4]]), target=likely, method=method)


def test_a_language_model_needs_a_target(language):
    with pytest.raises(QuestionError, match="Say what the target is: a function of the output"):
        language.dual.influence(torch.tensor([[1, 2, 3, 4]]))


# What is refused


def test_no_layers_have_no_influence(trained, asked):
    with pytest.raises(QuestionError, match="influence\\(\\) of no layers"):
        trained.dual.influence(asked, layers=[])


@pytest.mark.parametrize("method", ["kernel", "sketch"])
def test_other_losses_are_refused_by_kernel_and_sketch(tmp_path, asked, method):
    model, (inputs, _) = network(), samples()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(3):
            recorder.batch(sample_id=torch.arange(12))
            optimizer.zero_grad()
            F.mse_loss(model(inputs), torch.ones(12, 4, dtype=torch.float64)).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    with pytest.raises(NotRecordedError, match=r"not those of a softmax cross-entropy"):
        dual.influence(asked, method=method)
    assert dual.influence(asked).top(1).height == 3


def test_the_kernel_refuses_what_memory_does_not_allow(dual, asked):
    with pytest.raises(
        QuestionError, match=r'has 10 rows, .* with memory=100 bytes there may be 3\. Ask method="sketch"'
    ):
        dual.influence(asked, method="kernel", segments=[(0, 2)], memory=100)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"method": "best"}, "expected one of 'whitened', 'kernel', 'sketch'"),
        ({"damping": 0.0}, "expected a number above 0"),
        ({"size": 0}, "expected at least 1"),
        ({"target": 9}, "the output has units 0 to 3"),
        ({"segments": 0}, "expected at least 1"),
    ],
)
def test_settings_that_make_no_sense(dual, asked, settings, says):
    with pytest.raises(QuestionError, match=says):
        dual.influence(asked, **settings)


def test_what_the_store_cannot_answer(tmp_path, asked, trained):
    with pytest.raises(QuestionError, match="needs the model"):
        dualform.open(trained.path).influence(asked)
    for keep, settings, says in (
        ("keys", {}, "keeps keys only"),
        ("totals", {"totals": ["label"]}, "keeps totals only"),
    ):
        run = train(tmp_path / keep, keep=keep, **settings)
        with pytest.raises(NotRecordedError, match=says):
            run.dual.influence(asked)


def test_another_column_takes_no_other_scores(dual, asked, monkeypatch):
    influence = dual.influence(asked)
    of_samples = influence.total("sample_id")
    monkeypatch.setattr(LinearScores, "of_rows", None)  # cannot be called again
    of_labels = influence.total("label")
    for query in range(len(asked)):
        sums = [table.filter(pl.col("query") == query)["total"].sum() for table in (of_samples, of_labels)]
        assert sums[0] == pytest.approx(sums[1])
