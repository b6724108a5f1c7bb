"""A scan is a scorer and a reducer over pieces, in this thread or on an executor."""

from concurrent.futures import ThreadPoolExecutor

import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal

import dualform
from dualform.query import executors
from dualform.query import scan as scanning
from dualform.query.answer import Answer
from dualform.query.executors import runner_of
from dualform.query.scan import scan
from dualform.query.scorer import Scorer, Selection
from training import samples, train

INPUTS, _ = samples()
QUESTIONS = {
    "top": lambda answer: answer.top(5),
    "top where": lambda answer: answer.top(5, where=pl.col("label") != 1, absolute=True),
    "top per label": lambda answer: answer.top(2, per="label"),
    "top by sample": lambda answer: answer.top(3, by="sample_id"),
    "total": lambda answer: answer.total("label"),
    "total of sizes": lambda answer: answer.total("sample_id", absolute=True),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = train(tmp_path_factory.mktemp("scan") / "run", steps=12, chunk_bytes=2000)
    assert len(run.dual.store.manifest.chunks) > 2
    return run


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("kind", ["attend", "contributions"])
@pytest.mark.parametrize("tasks_ahead", [0, 8])
def test_an_executor_changes_no_answer(trained, monkeypatch, question, kind, tasks_ahead):
    monkeypatch.setattr(executors, "TASKS_AHEAD", tasks_ahead)
    monkeypatch.setattr(scanning, "TASK_BYTES", 1)
    ask = QUESTIONS[question]
    with ThreadPoolExecutor(3) as pool:
        dual = dualform.open(trained.dual.store.location, trained.model, executor=pool)
        for layer in dual.layers:
            found = ask(getattr(dual, kind)(INPUTS)[layer])
            expected = ask(getattr(trained.dual, kind)(INPUTS)[layer])
            assert_frame_equal(found, expected, check_exact=True)


def test_parts_and_influence_on_an_executor(trained):
    with ThreadPoolExecutor(3) as pool:
        dual = dualform.open(trained.dual.store.location, trained.model, executor=pool)
        assert_frame_equal(dual.contributions(INPUTS)["2"].parts(), trained.dual.contributions(INPUTS)["2"].parts())
        found, expected = (d.influence(INPUTS[:2], segments=[(0, 12)]) for d in (dual, trained.dual))
        assert_frame_equal(found.total("label"), expected.total("label"))
        assert_frame_equal(found["2"].top(3), expected["2"].top(3))


def test_an_error_in_a_task_reaches_the_one_who_asks(trained, monkeypatch):
    attention = trained.dual.attend(INPUTS)["2"]
    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(attention, "_executor", runner_of(pool))
        monkeypatch.setattr(attention._scorer, "score", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            attention.total("sample_id", absolute=True)


class KeyLength(Scorer):
    """A new kind of score: how long a slot's key is, whatever the query."""

    value = "length"

    def score(self, queries, run, low, high):
        return run.keys(self.dtype, low, high).vectors().norm(dim=1).expand(queries.stop - queries.start, -1)


class Count:
    """A new reducer: how many scores are above a limit."""

    def __init__(self, limit):
        self.limit = limit
        self.count = 0

    def empty(self):
        return Count(self.limit)

    def add(self, tile):
        self.count += int((tile.scores > self.limit).sum())

    def merge(self, other):
        self.count += other.count


def test_a_new_scorer_and_a_new_reducer(trained):
    store = trained.dual.store
    scorer = KeyLength(store, store.layer("2")[1], trained.dual.end_step, 1, torch.float64)
    lengths = trained.dual.layer("2").keys.norm(dim=1)
    top = Answer(scorer, {"query": 1}).top(4)
    assert top["slot"].to_list() == lengths.sort(descending=True, stable=True).indices[:4].tolist()
    assert top["length"].to_list() == lengths.sort(descending=True).values[:4].tolist()
    limit = float(lengths.median())
    pieces = Selection(scorer, None, silent=True).pieces
    with ThreadPoolExecutor(2) as pool:
        for executor in (None, pool):
            assert scan(pieces(), scorer, Count(limit), executor).count == int((lengths > limit).sum())


class Highest:
    """A new reducer: the highest score of each query."""

    def __init__(self, queries):
        self.scores = torch.full((queries,), -torch.inf)

    def empty(self):
        return Highest(len(self.scores))

    def add(self, tile):
        self.scores = torch.maximum(self.scores, tile.scores.amax(1))

    def merge(self, other):
        self.scores = torch.maximum(self.scores, other.scores)


@pytest.mark.parametrize("where", [None, pl.col("label") == 1])
def test_a_reducer_of_ones_own_sees_every_score(trained, where):
    expected = trained.dual.attend(INPUTS)["2"].top(1, where=where)["weight"].to_torch()
    with ThreadPoolExecutor(3) as pool:
        for executor in (None, pool):
            dual = dualform.open(trained.dual.store.location, trained.model, executor=executor)
            found = dual.attend(INPUTS)["2"].reduce(Highest(len(INPUTS)), where=where)
            torch.testing.assert_close(found.scores, expected.to(found.scores.dtype))


class HighestPerGroup:
    """Another one: the highest score of each group, over all queries."""

    def __init__(self, groups):
        self.groups = groups
        self.scores = torch.full((len(groups),), -torch.inf, dtype=torch.float64)

    def empty(self):
        return HighestPerGroup(self.groups)

    def add(self, tile):
        codes = torch.from_numpy(self.groups(tile.piece.run)[tile.places])
        self.scores.scatter_reduce_(0, codes, tile.scores.amax(0).double(), "amax")

    def merge(self, other):
        self.scores = torch.maximum(self.scores, other.scores)


def test_a_reducer_of_ones_own_can_tell_groups_apart(trained):
    answer = trained.dual.attend(INPUTS)["2"]
    groups = answer.groups("label")
    found = groups.values.with_columns(highest=answer.reduce(HighestPerGroup(groups)).scores.numpy())
    expected = answer.top(1, per="label").group_by("label").agg(pl.col("weight").max().alias("highest")).sort("label")
    assert_frame_equal(found, expected)
