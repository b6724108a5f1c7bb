"""Tensors that are checked as they are read, stretch by stretch."""

import numpy as np
import pytest
import torch

from dualform.errors import StoreDamagedError
from dualform.store.mapped import TensorFile
from dualform.store.safe import write_tensors

TABLE = np.arange(70, dtype=np.float32).reshape(10, 7)


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "some.safetensors"
    return path, write_tensors(path, {"table": [TABLE], "none": [np.zeros((0, 3), np.float32)]})


@pytest.mark.parametrize("rows", [1, 3, 10, 11])
def test_stretches_are_the_tensor(written, rows):
    file = TensorFile(*written)
    for _ in range(2):  # checked, and then known
        found = list(file.stretches("table", rows))
        assert [low for low, _ in found] == list(range(0, 10, rows))
        assert torch.equal(torch.cat([some for _, some in found]), torch.from_numpy(TABLE))
    assert torch.equal(file["table"], torch.from_numpy(TABLE))
    assert [tuple(some.shape) for _, some in file.stretches("none", rows)] == [(0, 3)]


@pytest.mark.parametrize("rows", [1, 3, 10, 11])
def test_damage_is_raised_in_the_place_of_the_last_stretch(written, rows):
    path, file = written
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    seen = []
    with pytest.raises(StoreDamagedError, match="the checksum of 'table' does not fit"):
        for low, _ in TensorFile(path, file).stretches("table", rows):
            seen.append(low)
    assert len(seen) == -(-10 // rows) - 1


def test_a_tensor_that_is_not_there(written):
    with pytest.raises(StoreDamagedError, match="it has no tensor 'other'"):
        list(TensorFile(*written).stretches("other", 1))
