"""A query answered beside rankings written out, and what its page says."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from made import made

from dualform.paper.language import tables
from dualform.paper.language.queries import Query, Table
from dualform.paper.language.report import page
from dualform.paper.language.tables import answer

WORDS = "the fox saw a | crow . the crow had <unk> cheese . " * 6
BOOK = made("the fox had a crow .", "word", WORDS)
TABLE = Table(5, "foxes", "the [fox]", ("saw a | [crow]", "the [crow] had"))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Windows and limits that fit such a text."""
    monkeypatch.setitem(tables.WINDOW, "word", 4)
    monkeypatch.setattr(tables, "OUTSIDE", 3)
    monkeypatch.setattr(tables, "KS", (1, 3))


@pytest.fixture
def attention():
    return np.random.default_rng(0).standard_normal(len(BOOK.train))


def answered(query, attention):
    return answer(BOOK, query, attention, np.full(len(attention), 2), [("crow", 0.75), ("the", 0.25)])


def ranked(scores):
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))


def test_the_best_passages_come_first_and_apart(attention):
    found = answered(Query("test", 0, 4), attention)
    expected = []
    for place in ranked(attention):
        if all(abs(place - other) >= 4 for other in expected):
            expected.append(place)
    assert [one.position for one in found.top] == expected[:3]
    assert [one.rank for one in found.top] == [ranked(attention).index(place) + 1 for place in expected[:3]]
    assert all(one.visits == 2 and one.attention == attention[one.position] for one in found.top)
    assert [found.lexical[0].lexical_rank, found.lexical[0].token] == [1, found.lexical[0].token]


def test_the_papers_passages_stand_with_our_ranks(attention):
    query = Query("test", 0, 1, TABLE, (5, 7))
    found = answered(query, attention)
    assert [one.position for one in found.theirs] == [5, 7]
    assert [one.rank for one in found.theirs] == [ranked(attention).index(place) + 1 for place in (5, 7)]
    assert (found.asked.table, found.asked.shared, found.asked.token) == (5, "foxes", "fox")


def test_a_query_of_the_training_text_is_left_out_and_its_rank_told(attention):
    attention[20] = attention.max() + 1
    found = answered(Query("train", 15, 20), attention)
    assert (found.own.position, found.own.rank) == (20, 1)
    near = range(17, 24)
    assert not {one.position for one in (*found.top, *found.lexical, found.negative)} & set(near)


def test_the_negative_example_is_far_from_what_is_attended(attention):
    found = answered(Query("test", 0, 4), attention)
    attended = ranked(attention)[:3]
    assert all(abs(found.negative.position - place) >= 4 for place in attended)
    assert found.negative.lexical_rank > 0


def test_what_is_retrieved_is_counted(attention):
    query = Query("test", 0, 4)
    found = answered(query, attention)
    best = ranked(attention)[: tables.BEST]
    ids = BOOK.train.ids
    assert found.retrieved.same_token == pytest.approx(np.mean([ids[p] == BOOK.test.ids[4] for p in best]))
    crow = BOOK.numbers["crow"]
    assert found.retrieved.answer == pytest.approx(np.mean([ids[min(p + 1, len(ids) - 1)] == crow for p in best]))


def results(answers):
    settings = {"embedding": 8, "state": 16, "lr": 1e-3, "clip": 1.0, "dropout": 0.5, "weight_decay": 0.0, "batch": 2,
                "window": 5, "forget": 0.01, "seed": 0}  # fmt: skip
    trained = {"keep": "totals", "steps": 30, "seconds": 60.0, "nbytes": 10**9, "losses": [(30, 1.0)], "test": 2.0}
    return {
        "text": {"name": "wikitext-2", "unit": "word", "vocabulary": 9, "train": len(BOOK.train), "test": 6},
        "settings": settings, "trained": trained, "epochs": 4.2, "visits": {"least": 4, "most": 5}, "shown": 1,
        "answers": json.loads(json.dumps([asdict(one) for one in answers])),
    }  # fmt: skip


@pytest.fixture
def shown(attention, monkeypatch):
    monkeypatch.setattr("dualform.paper.language.report.KS", (1, 3))
    train = Query("train", 15, 20)
    queries = [Query("test", 0, 1, TABLE, (5, 7)), replace(train, table=replace(TABLE, number=4)), Query("test", 0, 4)]
    return page(
        results([answered(one, attention) for one in queries]), "dualform paper wikitext-2", ["## More\n\nwords"]
    )


def test_the_page_has_every_query(shown):
    assert "Made by `dualform paper wikitext-2`" in shown
    assert "30 steps, 4.2 epochs" in shown
    assert "perplexity: 3 in training at the end, 7 on the test text" in shown
    assert "Each position was visited 4 to 5 times" in shown
    assert "## Table 5: foxes" in shown
    assert "The query is of the training text" in shown.split("## Table 4")[1].split("\n## ")[0]
    assert "The query is of the training text" not in shown.split("## Table 5")[1].split("\n## ")[0]
    assert "### Query 1" in shown
    assert shown.endswith("## More\n\nwords\n")


def test_nothing_of_the_text_is_read_as_markdown(shown):
    assert "<unk>" not in shown
    assert "&lt;unk&gt;" in shown
    rows = [line for line in shown.splitlines() if line.startswith("| attention 1")]
    assert len(rows) == 3
    assert all(line.replace("\\|", "").count("|") == 7 for line in rows)


def test_a_page_without_negative_examples_says_so(attention, monkeypatch):
    monkeypatch.setattr(tables, "OUTSIDE", len(attention))
    monkeypatch.setattr("dualform.paper.language.report.KS", (1, 3))
    found = answered(Query("test", 0, 4), attention)
    assert found.negative is None
    assert "No match by BM25" in page(results([found]), "")
