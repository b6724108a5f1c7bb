"""Runs that know their data, from the folder alone."""

import json
import shutil

import pytest
import torch

from dualform import plugins
from dualform.errors import DataError, StoreMissingError
from dualform.explorer.drawing import fit_drawing
from dualform.explorer.runs import find
from dualform.explorer.session import Session
from dualform.language.text import load_text
from dualform_paper.language.recording import train as train_language
from dualform_paper.language.settings import Settings as LanguageSettings
from dualform_paper.settings import settings_for
from dualform_paper.tasks import load
from dualform_paper.training import train


def test_the_demo(session, folder):
    digits = session.subject
    assert digits.title == "Digits (the demo)"
    key = session.book.key(0)
    assert digits.train.input(key).shape == (64,)
    assert digits.show_training(key).ink


@pytest.mark.data
def test_a_run_of_the_paper(tmp_path):
    settings = settings_for("continual", steps=3, width=12, train_images=200, test_images=30, batch=20)
    train(settings, load(settings), tmp_path / "run", lambda *_: None)
    found = Session(find(tmp_path / "run"))
    run = found.run()
    assert run.parts == ["mnist", "fashion-mnist"]
    assert run.by == ["dataset", "sample_id"]
    assert run.tests == 60
    assert run.units[0].name == "0 / T-shirt"
    sources = found.scoring.sources("test:31", "4", "attention", target=None, k=4, absolute=False, last=True)
    dataset, sample = sources.highest[0].key
    assert dataset in run.parts
    assert sources.highest[0].shown.width == 28
    change = found.edits.change("test:31", "\"dataset\" = 'mnist'")
    assert change.dropped_rows == 60
    assert found.predictions.examples(part="mnist", number=3).examples[0].input == "test:3"
    assert found.reading.sample([dataset, str(sample)], "4", k=3).readers
    digit, garment = (found.predictions.prediction(address) for address in ("test:3", "test:31"))
    assert digit.label.name == str(digit.label.value)  # each by the names of its own dataset
    assert {unit.name for unit in digit.units} == set("0123456789")
    assert garment.label.name in {unit.name for unit in garment.units} > {"T-shirt", "ankle boot"}
    assert run.units[9].name == "9 / ankle boot"


def test_a_language_run(tmp_path):
    (tmp_path / "own.txt").write_text("the wolf and the lamb stood by the stream. " * 20)
    text = load_text(tmp_path / "own.txt")
    settings = LanguageSettings(4, 6, 2, 3, 1e-2, 1.0, window=10)
    train_language(text, settings, tmp_path / "run")
    found = Session(find(tmp_path / "run"))
    assert found.run().text.prompt
    assert [view.missing != "" for view in found.run().views] == [False, True, True]
    passages = found.text.passages("the wolf", None, "lstm", "attention", target=None, gate=None, part="both", k=3)
    assert len(passages.highest) == 3


def test_a_run_that_does_not_know_its_data(tmp_path, folder):
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "demo.json").unlink()
    with pytest.raises(DataError, match=r"explore\(train=…, test=…\)"):
        find(tmp_path / "run")
    with pytest.raises(StoreMissingError):
        find(tmp_path / "nothing")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"width": "__import__(1)"}', '{"width": 99999999999}', '{"width": -1}', '{"seed": "x"}']
)
def test_a_settings_file_that_is_none(tmp_path, folder, content):
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "demo.json").write_text(content)
    with pytest.raises(DataError, match="not what dualform writes"):
        find(tmp_path / "run")


def test_a_run_of_the_paper_names_the_extra_where_its_reader_is_missing(tmp_path, folder, monkeypatch):
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "demo.json").rename(tmp_path / "run" / "trained.json")
    monkeypatch.setattr(plugins, "entry_points", lambda group: {})
    with pytest.raises(
        DataError, match=r"is a run of the paper's experiments. To show it: pip install 'dualform\[paper\]'"
    ):
        find(tmp_path / "run")


def test_a_paper_file_that_is_none(tmp_path, folder):
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "demo.json").unlink()
    (tmp_path / "run" / "trained.json").write_text(json.dumps({"settings": {"phases": [{"datasets": ["../../etc"]}]}}))
    with pytest.raises(DataError, match=r"trained.json is not what dualform writes there"):
        find(tmp_path / "run")


def test_a_drawing_is_brought_to_the_middle():
    ink = torch.zeros(32, 32)
    ink[2:12, 1:3] = 1
    found = fit_drawing(ink, 28, (20, 20))
    rows, columns = torch.nonzero(found > 0.5).T
    assert rows.max() - rows.min() == 19
    assert abs(float(rows.float().mean()) - 13.5) <= 1
    assert abs(float(columns.float().mean()) - 13.5) <= 1
    assert not fit_drawing(torch.zeros(32, 32), 28, (20, 20)).any()
    assert fit_drawing(torch.ones(32, 32), 8, (8, 8)).min() > 0.9
