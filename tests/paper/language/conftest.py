"""A tiny language model, trained once in each way."""

import pytest
from story import SETTINGS, STORY

from dualform.language.text import load_text
from dualform_paper.language.recording import train


@pytest.fixture(scope="session")
def story(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(STORY * 4, encoding="utf-8")
    return load_text(path)


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(STORY * 8, encoding="utf-8")
    return load_text(path, "word")


@pytest.fixture(scope="session")
def runs(tmp_path_factory, story):
    """Folders: the same training with totals and with all slots."""
    folder = tmp_path_factory.mktemp("runs")
    for keep in ("totals", "slots"):
        train(story, SETTINGS, folder / keep, keep=keep)
    return folder
