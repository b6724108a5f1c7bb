import pytest
from tiny_language_model import STORY, train_language_model

from dualform.language.text import load_text


@pytest.fixture(scope="session")
def story(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(STORY * 4, encoding="utf-8")
    return load_text(path)


@pytest.fixture(scope="session")
def runs(tmp_path_factory, story):
    """The folder of the same training, recorded as "totals" and as "slots"."""
    folder = tmp_path_factory.mktemp("runs")
    for keep in ("totals", "slots"):
        train_language_model(story, folder / keep, keep=keep)
    return folder
