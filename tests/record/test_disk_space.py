"""A disk that will be full before the training ends is told of early, once."""

import warnings
from collections import namedtuple
from types import SimpleNamespace

import pytest

from dualform.record import disk_space
from training import train

Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.fixture
def free(monkeypatch):
    def leave(nbytes):
        monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda folder: Usage(10**12, 10**12 - nbytes, nbytes))

    return leave


def bytes_per_step(path, **settings):
    """Of a recording whose chunks are sealed at the end only: what its steps take in memory."""
    seen = []
    original = disk_space.DiskSpace.add

    def add(self, step, nbytes):
        seen.append(nbytes)
        original(self, step, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_space.DiskSpace, "add", add)
        train(path, steps=2, **settings)
    return seen[0]


def test_it_warns_if_what_is_free_does_not_last_as_long_again(tmp_path, free):
    step = bytes_per_step(tmp_path / "before")
    free(19 * step)
    with pytest.warns(UserWarning, match=r"will be full after about 1\d more steps.*keep=\"rows\"") as told:
        train(tmp_path / "run", steps=50)
    assert len(told) == 1


def test_it_is_silent_while_there_is_room(tmp_path, free):
    step = bytes_per_step(tmp_path / "before")
    free(1000 * step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path / "run", steps=50)
        train(tmp_path / "short", steps=19)  # too early to tell
        free(0)
        train(tmp_path / "totals", steps=25, keep="totals", totals=["label"])


def test_it_knows_how_long_the_training_will_be(tmp_path, free):
    step = bytes_per_step(tmp_path / "before")
    free(200 * step)
    with pytest.warns(UserWarning, match=r"full after about (199|200) more steps.*and 980 are still to come"):
        train(tmp_path / "run", steps=25, expected_steps=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path / "enough", steps=25, expected_steps=200)


class Writer:
    """Stands for one that has sealed some steps."""

    location = "somewhere"
    held_bytes = 100

    def __init__(self, sealed_steps, sealed_bytes):
        files = [("chunk", SimpleNamespace(size=sealed_bytes))]
        self.manifest = SimpleNamespace(end_step=sealed_steps, files=lambda: files)


def test_what_is_sealed_tells_better_than_memory(free):
    """Inputs that come again are stored once, and take memory each time."""
    writer = Writer(0, 0)
    watch = disk_space.DiskSpace(writer)
    writer.manifest = Writer(10, 500).manifest  # 50 bytes a step
    free(1099)
    for step in range(19):
        watch.add(step, 1000)
    with pytest.warns(UserWarning, match="after about 19 more steps of 50 bytes each"):  # 100 bytes are on their way
        watch.add(19, 1000)


def test_a_step_that_is_handed_over_twice_counts_once(free):
    free(0)
    watch = disk_space.DiskSpace(Writer(0, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            watch.add(0, 1000)


def test_a_disk_that_does_not_say_is_left_alone(tmp_path, monkeypatch):
    def unknown(folder):
        raise OSError("no such thing")

    monkeypatch.setattr(disk_space.shutil, "disk_usage", unknown)
    train(tmp_path / "run", steps=25)
