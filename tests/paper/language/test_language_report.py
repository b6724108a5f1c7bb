"""A tiny recorded language model is asked; attention by position beside a loop over its slots."""

import numpy as np
import pytest
import torch
from made import made

from dualform.language.recorded import RecordedLanguageModel
from dualform_paper.language import queries, report, tables
from dualform_paper.language.queries import Query, Table
from dualform_paper.language.recording import train
from dualform_paper.language.settings import Settings
from dualform_paper.language.tables import answered

STORY = "the fox saw the crow . the crow ate <unk> cheese .\n"
BOOK = made("a fox ate the cheese . the crow saw a fox .\n" * 3, "word", STORY * 5 + "a")
SETTINGS = Settings(embedding=4, state=6, batch=2, steps=12, lr=1e-2, clip=1.0, window=5)
TABLE = Table(5, "eating", "a fox [ate] the", ("crow [ate] cheese",))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same training with sums by position and with all slots."""
    found = {keep: tmp_path_factory.mktemp(keep) / "run" for keep in ("totals", "slots")}
    for keep, folder in found.items():
        train(BOOK, SETTINGS, folder, keep=keep)
    return found


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setitem(queries.TABLES, "made", (TABLE,))
    monkeypatch.setattr(tables, "OUTSIDE", 2)
    monkeypatch.setitem(tables.WINDOW, "word", 4)


def test_attention_is_the_mean_over_the_visits(folders, asked):
    query = Query("test", 0, 9)
    found = answered(RecordedLanguageModel(folders["totals"]), query)
    slots = RecordedLanguageModel(folders["slots"]).dual
    vector = slots.attend(torch.tensor(query.prompt(BOOK).astype("int64"))[None])["lstm"].queries[0, -1]
    keys = slots.layer("lstm").keys
    places = np.concatenate([np.array(row) for row in slots.rows["text_position"].to_list()])
    each = [
        [float(key @ vector) for key, place in zip(keys, places, strict=True) if place == n]
        for n in range(len(BOOK.train))
    ]
    visits = [len(some) for some in each]
    assert min(visits) != max(visits)
    means = [sum(some) / max(len(some), 1) for some in each]
    for place in (*found.top, *found.lexical):
        assert place.attention == pytest.approx(means[place.position], abs=2e-3)  # slots are stored in float16
        assert place.visits == visits[place.position]
    assert found.top[0].attention == pytest.approx(max(means), abs=2e-3)


def test_the_papers_queries_come_first_and_then_those_by_the_rule(folders, asked):
    answers = report.ask(RecordedLanguageModel(folders["totals"]), count=4)
    assert [one.asked.table for one in answers] == [5, None, None, None, None]
    (theirs,) = answers[0].theirs
    assert theirs.token == answers[0].asked.token == "ate"
    titles = [section.title for section in report.sections(BOOK, answers)]
    assert titles[2] == "Table 5: eating"


def test_a_text_without_tables_has_queries_by_the_rule_alone(folders, asked, monkeypatch):
    monkeypatch.delitem(queries.TABLES, "made")
    answers = report.ask(RecordedLanguageModel(folders["totals"]), count=2)
    assert [one.asked.table for one in answers] == [None, None]
