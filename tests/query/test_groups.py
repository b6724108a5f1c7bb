import polars as pl
import pytest
import torch
from torch.nn import functional as F

import dualform
from dualform.errors import QuestionError
from reference import ranking
from training import network, samples, sgd

INPUTS, LABELS = samples()


def all_weights(dual, layer="0", inputs=INPUTS):
    return torch.cat([scores for _, scores in dual.attend(inputs)[layer].scores()], dim=-1)[:, 0]


def group_of(dual, by):
    """The group of each slot, by plain Python."""
    names = [by] if isinstance(by, str) else by
    return [tuple(row[name] for name in names) for row in dual.rows.to_dicts()]


@pytest.mark.parametrize("by", ["label", "task", "sample_id", "step", ["task", "label"]])
@pytest.mark.parametrize("absolute", [False, True])
def test_totals_by_any_column_are_plain_sums(dual, by, absolute):
    names = [by] if isinstance(by, str) else by
    found = dual.attend(INPUTS)["0"].total(by, absolute=absolute)
    assert found.columns == ["query", "position", *names, "total"]
    weights = all_weights(dual)
    weights = weights.abs() if absolute else weights
    for query in range(len(INPUTS)):
        expected = ranking.totals(weights[query].tolist(), group_of(dual, by))
        mine = found.filter(pl.col("query") == query)
        assert mine.select(names).rows() == sorted(expected)
        for *group, total in mine.select(*names, "total").rows():
            assert total == pytest.approx(expected[tuple(group)], abs=1e-13)


def test_totals_of_all_groups_are_the_whole(dual):
    whole = all_weights(dual).sum(1)
    for by in ("label", "step", "position", "sample_id"):
        found = dual.attend(INPUTS)["0"].total(by).group_by("query", maintain_order=True).agg(pl.col("total").sum())
        assert found["total"].to_list() == pytest.approx(whole.tolist(), abs=1e-12)


def test_totals_where(dual):
    found = dual.attend(INPUTS)["0"].total("label", where=pl.col("task") == "early")
    weights = all_weights(dual)
    for query, label, total in found.select("query", "label", "total").rows():
        slots = [s for s, row in enumerate(dual.rows.to_dicts()) if (row["label"], row["task"]) == (label, "early")]
        assert total == pytest.approx(sum(weights[query, slots].tolist()), abs=1e-13)


def test_top_groups_are_the_totals_sorted(dual):
    attention = dual.attend(INPUTS)["0"]
    found = attention.top(3, by="sample_id")
    weights = all_weights(dual)
    for query in range(len(INPUTS)):
        sums = ranking.totals(weights[query].tolist(), [group for (group,) in group_of(dual, "sample_id")])
        names, totals = list(sums), list(sums.values())
        expected = [names[place] for place in ranking.top(totals, 3)]
        mine = found.filter(pl.col("query") == query)
        assert mine["sample_id"].to_list() == expected
        assert mine["rank"].to_list() == [1, 2, 3]


def test_top_groups_come_with_their_visits_and_what_their_rows_share(dual):
    found = dual.attend(INPUTS)["0"].top(30, by="sample_id").filter(pl.col("query") == 0)
    rows = dual.rows
    for row in found.to_dicts():
        mine = rows.filter(pl.col("sample_id") == row["sample_id"])
        assert row["visits"] == mine.height
        assert row["label"] == mine["label"][0]  # a sample has one label
    assert "task" not in found.columns  # but was seen in both tasks
    assert found["visits"].sum() == 30


def test_ties_between_groups_go_to_the_lower_slot(tmp_path):
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run", dtype="float64") as recorder:
        recorder.batch(name=["z", "a", "m", "a"])
        F.cross_entropy(model(INPUTS[[3, 3, 3, 4]]), LABELS[:4]).backward()
        optimizer.step()
    query = torch.zeros(1, 5).double()  # every weight is 0
    found = dualform.open(tmp_path / "run").attend({"0": query})["0"]
    assert found.top(3, by="name")["name"].to_list() == ["z", "a", "m"]
    assert found.top(3)["slot"].to_list() == [0, 1, 2]


def test_floats_booleans_and_nan_make_groups(tmp_path):
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run", dtype="float64") as recorder:
        recorder.batch(hard=[True, False, True, True], score=[0.5, float("nan"), 0.5, float("nan")])
        F.cross_entropy(model(INPUTS[:4]), LABELS[:4]).backward()
        optimizer.step()
    attention = dualform.open(tmp_path / "run").attend({"0": torch.ones(1, 5).double()})["0"]
    assert attention.top(9, by="hard").sort("hard")["visits"].to_list() == [1, 3]
    assert attention.top(9, by="score").sort("score")["visits"].to_list() == [2, 2]


@pytest.mark.parametrize("by", ["colour", ["label", "colour"]])
def test_an_unknown_column(dual, by):
    attention = dual.attend(INPUTS)["0"]
    words = r"no column 'colour'\. Columns: step, position, sample_id, label, task"
    with pytest.raises(QuestionError, match=words):
        attention.total(by)
    with pytest.raises(QuestionError, match=words):
        attention.top(3, by=by)


def test_no_column_at_all(dual):
    with pytest.raises(QuestionError, match=r"by=\[\].*Columns: step"):
        dual.attend(INPUTS)["0"].total([])
