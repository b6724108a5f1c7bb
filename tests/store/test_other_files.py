"""A store that is not a folder: read through another class with the methods of `Files`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from inconsistent import answers, network, record

import dualform
from dualform.errors import StoreDamagedError, StoreMissingError


class FilesInMemory:
    """The files of a store as a dictionary of bytes, which can only be read."""

    location = "memory:store"

    def __init__(self, content):
        self.content = content

    def size(self, name):
        return len(self.read(name))

    def read(self, name):
        if name not in self.content:
            raise StoreDamagedError(f"{self.location}/{name} is missing.") from FileNotFoundError(name)
        return self.content[name]

    def read_range(self, name, begin, end):
        return self.read(name)[begin:end]

    def map(self, name):
        return np.frombuffer(bytearray(self.read(name)), np.uint8)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other") / "run"
    record(folder)
    return folder


@pytest.fixture
def files(recorded):
    paths = [path for path in recorded.rglob("*") if path.is_file()]
    return FilesInMemory({str(path.relative_to(recorded)): path.read_bytes() for path in paths})


def influence(place):
    return dualform.open(place, network()).influence(torch.arange(8), target=1).top(3, by="sample_id").rows()


def test_it_answers_as_the_folder_does(recorded, files):
    assert answers(files) == answers(recorded)
    assert influence(files) == influence(recorded)


def test_nothing_is_written_to_it(files):
    before = dict(files.content)
    influence(files)  # keeps curvature beside a store in a folder
    assert files.content == before
    assert not Path(files.location).exists()


def test_it_can_be_reopened(files):
    assert dualform.open(files).reopened().store.files is files


def test_damage_is_named_by_its_location(files):
    name = "chunk-000001/slots.safetensors"
    files.content[name] = files.content[name][:-1] + b"?"
    with pytest.raises(StoreDamagedError, match=f"memory:store/{name} is damaged"):
        dualform.open(files).verify()


def test_no_store_there():
    with pytest.raises(StoreMissingError, match="memory:store holds no recording"):
        dualform.open(FilesInMemory({}))
