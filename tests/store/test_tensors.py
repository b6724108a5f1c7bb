"""Files that are checked as they are read, whole or stretch by stretch, as tensors and as arrays."""

import gc
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from dualform.errors import StoreDamagedError, StoreError
from dualform.store.files import LocalFiles
from dualform.store.format import File, checksum
from dualform.store.tensors import ArrayFile, TensorFile, read_label, write_tensors

TABLE = np.arange(70, dtype=np.float32).reshape(10, 7)


KINDS = pytest.mark.parametrize("kind", [TensorFile, ArrayFile])


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "some.safetensors"
    tensors = {"table": [TABLE], "none": [np.zeros((0, 3), np.float32)], "flags": [np.array([True, False])]}
    return path, write(path, tensors)


def write(path, tensors, label=None):
    return write_tensors(LocalFiles(path.parent), path.name, tensors, label)


def opened(kind, path, file):
    return kind(LocalFiles(path.parent), path.name, file)


def damage(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@KINDS
def test_names_and_content(written, kind):
    file = opened(kind, *written)
    assert list(file) == ["flags", "none", "table"]
    assert "table" in file
    assert "other" not in file
    np.testing.assert_array_equal(np.asarray(file["table"]), TABLE)
    assert np.asarray(file["flags"]).tolist() == [True, False]
    assert tuple(file["none"].shape) == (0, 3)


@KINDS
@pytest.mark.parametrize("rows", [1, 3, 10, 11])
def test_stretches_are_the_tensor(written, kind, rows):
    file = opened(kind, *written)
    for _ in range(2):  # checked, and then known
        found = list(file.stretches("table", rows))
        assert [low for low, _ in found] == list(range(0, 10, rows))
        np.testing.assert_array_equal(np.concatenate([np.asarray(some) for _, some in found]), TABLE)
    np.testing.assert_array_equal(np.asarray(file["table"]), TABLE)
    assert [tuple(some.shape) for _, some in file.stretches("none", rows)] == [(0, 3)]


@KINDS
@pytest.mark.parametrize("rows", [1, 3, 10, 11])
def test_damage_is_raised_in_the_place_of_the_last_stretch(written, kind, rows):
    path, file = written
    damage(path, -3)
    seen, damaged = [], opened(kind, path, file)
    with pytest.raises(StoreDamagedError, match="the checksum of 'table' does not fit"):
        for low, _ in damaged.stretches("table", rows):
            seen.append(low)
    assert len(seen) == -(-10 // rows) - 1
    with pytest.raises(StoreDamagedError, match="the checksum of 'table' does not fit"):
        damaged["table"]


@KINDS
def test_a_reader_that_stops_early_has_checked_nothing(written, kind):
    path, file = written
    damage(path, -3)
    damaged = opened(kind, path, file)
    next(damaged.stretches("table", 4))
    with pytest.raises(StoreDamagedError, match="the checksum of 'table' does not fit"):
        damaged["table"]


@KINDS
@pytest.mark.parametrize("place", [0, 3, 12, 60])
def test_a_damaged_header(written, kind, place):
    path, file = written
    damage(path, place)
    with pytest.raises(StoreDamagedError, match="the checksum of its header does not fit"):
        opened(kind, path, file)


@KINDS
def test_a_tensor_that_is_not_there(written, kind):
    with pytest.raises(StoreDamagedError, match="it has no tensor 'other'"):
        list(opened(kind, *written).stretches("other", 1))


@KINDS
@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b'{"table":{"dtype":"F32","shape":[99,7],"data_offsets":[0,2772]}}',
        b'{"table":{"dtype":"F32","shape":[-1,7],"data_offsets":[0,2772]}}',
        b'{"table":{"dtype":"F32","shape":[1,7],"data_offsets":[-99,28]}}',
        b'{"table":{"dtype":"F9","shape":[1,7],"data_offsets":[0,28]}}',
        b'{"table":{"shape":[1,7]}}',
        b'{"table":7}',
        b"7",
        b'{"table":{"dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,64]}}',
        b'{"table":{"dtype":"F32","shape":[' + b"9" * 400 + b'],"data_offsets":[0,64]}}',
        b'{"table":{"dtype":"F32","shape":[16.0],"data_offsets":[0,64]}}',
        b'{"table":{"dtype":"F32","shape":[true,16],"data_offsets":[0,64]}}',
        b'{"table":{"dtype":"F32","shape":[16],"data_offsets":[0,64,64]}}',
        b'{"table":{"dtype":"F32","shape":[15],"data_offsets":[4,64]}}',
        b'{"table":{"dtype":"F32","shape":[15],"data_offsets":[0,60]}}',
        b'{"table":{"dtype":"F32","shape":[16],"data_offsets":[0,64],"more":1}}',
        b'{"table":{"dtype":["F32"],"shape":[16],"data_offsets":[0,64]}}',
        b'{"table":{"dtype":"F32","shape":[16],"data_offsets":[0,64]},"other":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"__metadata__":7,"table":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}',
        b'{"__metadata__":{"table":7},"table":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}',
        b'{"table":' + b"[" * 100_000 + b"}",
    ],
)
def test_a_header_that_somebody_has_made_up_is_refused(tmp_path, kind, header):
    path, head = tmp_path / "some.safetensors", len(header).to_bytes(8, "little") + header
    path.write_bytes(head + bytes(64))
    with pytest.raises(StoreDamagedError, match="is damaged"):
        opened(kind, path, File(len(head) + 64, checksum(head)))["table"]


def test_a_tensor_outlives_its_file(written):
    file = opened(TensorFile, *written)
    table = file["table"]
    del file
    gc.collect()
    np.testing.assert_array_equal(np.asarray(table), TABLE)


def test_the_library_reads_what_is_written(written):
    """The header is read here, not by the library; it must mean the same to both."""
    path, file = written
    with safe_open(path, "np") as known:
        assert sorted(known.keys()) == list(opened(ArrayFile, path, file))
        np.testing.assert_array_equal(known.get_tensor("table"), TABLE)


@KINDS
def test_labels(tmp_path, kind):
    path = tmp_path / "some.safetensors"
    file = write(path, {"table": [TABLE]}, "a label")
    assert opened(kind, path, file).label == read_label(LocalFiles(tmp_path), path.name, file) == "a label"
    assert list(opened(kind, path, file)) == ["table"]
    assert opened(kind, path, write(path, {"table": [TABLE]})).label is None


@KINDS
def test_another_size_than_the_manifest_says(written, kind):
    path, file = written
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(StoreDamagedError, match="bytes, the manifest says"):
        opened(kind, path, file)


def test_a_file_that_is_replaced_while_it_is_opened(written, monkeypatch):
    """PyTorch opens it by its name once more."""
    path, file = written
    original = torch.UntypedStorage.from_file

    def replaced(name, *given):
        damage(path, 20)
        return original(name, *given)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replaced)
    with pytest.raises(StoreDamagedError, match="was replaced while it was being opened"):
        opened(TensorFile, path, file)


def test_a_file_that_vanishes_while_it_is_opened(written, monkeypatch):
    path, file = written
    original = torch.UntypedStorage.from_file

    def gone(name, *given):
        path.unlink()
        return original(name, *given)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", gone)
    with pytest.raises(StoreError, match=r"cannot be mapped into memory.* Try again"):
        opened(TensorFile, path, file)


@KINDS
@pytest.mark.parametrize("change", ["dropped", "shortened", "of another type"])
def test_arrays_that_are_not_those_that_were_written(written, kind, change):
    """All sizes and checksums fit, as if another tool had written the file again."""
    path, _ = written
    with safe_open(path, "np") as known:
        tensors = {name: known.get_tensor(name) for name in known.keys()}  # noqa: SIM118
        metadata = known.metadata()
    if change == "dropped":
        del tensors["flags"]
    elif change == "shortened":
        tensors["table"] = tensors["table"][:-1].copy()
    else:
        tensors["table"] = tensors["table"].view(np.int32)
    metadata |= {
        name: checksum(np.ascontiguousarray(array).reshape(-1).view(np.uint8)) for name, array in tensors.items()
    }
    save_file(tensors, path, metadata)
    content = path.read_bytes()
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    with pytest.raises(StoreDamagedError, match="its arrays are not those that were written"):
        opened(kind, path, File(len(content), checksum(header)))


# Tensors that are the same memory


@pytest.fixture
def shared(tmp_path):
    path = tmp_path / "shared.safetensors"
    copied = TABLE.copy()
    tensors = {
        "first": [TABLE[:4], TABLE[4:]],
        "again": [TABLE[:4], TABLE[4:]],
        "copied": [copied],
        "part": [TABLE[:4]],
    }
    return path, write(path, tensors)


@KINDS
def test_tensors_of_the_same_memory_are_stored_once(kind, shared):
    path, file = shared
    assert file.size < 3 * TABLE.nbytes + 2048
    with safe_open(path, "numpy") as stored:
        assert sorted(stored.keys()) == ["again", "copied", "part"]
    read = opened(kind, path, file)
    assert list(read) == ["again", "copied", "first", "part"]
    assert "first" in read
    assert read.shape("first") == TABLE.shape
    assert read.dtype("first") == "F32"
    assert np.array_equal(np.asarray(read["first"]), TABLE)
    assert np.array_equal(np.concatenate([np.asarray(piece) for _, piece in read.stretches("first", 3)]), TABLE)


@pytest.mark.parametrize("aliases", ['{"first": "nothing"}', '{"first": 3}', '{"again": "copied"}', "[]", "{}"])
def test_another_name_must_be_that_of_a_stored_tensor(shared, aliases):
    path, _ = shared
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["dualform.aliases"] = aliases
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)
    head = len(text).to_bytes(8, "little") + text
    path.write_bytes(head + content[8 + length :])
    with pytest.raises(StoreDamagedError):
        opened(TensorFile, path, File(path.stat().st_size, checksum(head)))
