"""A query answered beside rankings written out, and what is said of it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from made import made

from dualform_paper.language import report, tables
from dualform_paper.language.queries import Query, Table
from dualform_paper.language.tables import answer

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
    visits = np.full(len(attention), 2)
    return answer(BOOK, query, attention, attention[::-1], visits, [("crow", 0.75), ("the", 0.25)])


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


def test_among_the_same_words_the_state_ranks(attention):
    found = answered(Query("test", 0, 4, TABLE, (5, 8, 0)), attention)  # crow, crow, the; a crow asks
    state = attention[::-1]
    crows = sorted(
        (place for place in range(len(state)) if BOOK.train.ids[place] == BOOK.numbers["crow"]), key=lambda p: -state[p]
    )
    assert [one.state_rank for one in found.theirs] == [crows.index(5) + 1, crows.index(8) + 1, None]
    assert found.same == len(crows)


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


@pytest.fixture
def shown(attention, monkeypatch):
    """The sections for three queries."""
    monkeypatch.setattr(report, "KS", (1, 3))
    train = Query("train", 15, 20, replace(TABLE, number=4))
    queries = [Query("test", 0, 1, TABLE, (5, 7)), train, Query("test", 0, 4)]
    found = report.sections(BOOK, [answered(one, attention) for one in queries], dropout=0.5)
    json.dumps([section.data for section in found])
    return {section.title: section.text for section in found}


def test_every_query_has_its_place(shown, attention):
    assert list(shown) == [
        "The paper's passages in our ranking",
        "How to read the tables",
        "Table 5: foxes",
        "Table 4: foxes",
        "Queries chosen by a rule",
        "How far does a search by the letter agree?",
        "Negative examples",
    ]
    ranks = [ranked(attention).index(place) + 1 for place in (5, 7)]
    assert f"| {ranks[0]}, {ranks[1]} |" in shown["The paper's passages in our ranking"]
    assert "With dropout 0.5" in shown["The paper's passages in our ranking"]
    assert "The query is of the training text" in shown["Table 4: foxes"]
    assert "The query is of the training text" not in shown["Table 5: foxes"]
    assert [line.split(" |")[0] for line in shown["Table 5: foxes"].splitlines() if line.startswith("| paper")] == [
        "| paper 1",
        "| paper 2",
    ]
    assert shown["Queries chosen by a rule"].count("<details>") == 1
    assert "over 3 queries" in shown["How far does a search by the letter agree?"]


def test_nothing_of_the_text_is_read_as_markdown(shown):
    content = "\n".join(shown.values())
    assert "<unk>" not in content
    assert "&lt;unk&gt;" in content
    rows = [line for line in content.splitlines() if line.startswith("| attention 1")]
    assert len(rows) == 3
    assert all(line.replace("\\|", "").count("|") == 8 for line in rows)


def test_where_there_is_no_negative_example_it_is_said(attention, monkeypatch):
    monkeypatch.setattr(tables, "OUTSIDE", len(attention))
    monkeypatch.setattr(report, "KS", (1, 3))
    found = answered(Query("test", 0, 4), attention)
    assert found.negative is None
    assert "No match by BM25" in report.sections(BOOK, [found])[-1].text


def test_without_queries_there_is_nothing_to_tell():
    assert report.sections(BOOK, []) == []
