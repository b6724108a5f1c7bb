"""The model of a disk that the campaign of power losses uses."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from campaigns.disk import Call, Disk


def call(kind, path="", *, serial=0, offset=0, other="", data=b""):
    return Call(kind, serial, offset, str(path), str(other), data)


@pytest.fixture
def disk(tmp_path):
    """An empty folder, in which one file is written and not flushed."""
    disk = Disk(tmp_path)
    disk.apply(call("create", tmp_path / "file", serial=1, offset=1))
    disk.apply(call("write", serial=1, data=b"content"))
    return disk


def lost(disk):
    return disk.after_power_loss(random.Random(0), "lost")


def test_what_was_written_is_there_for_programs(disk):
    assert disk.everything() == {"file": b"content"}


def test_a_file_needs_a_flush_of_its_folder(disk, tmp_path):
    disk.apply(call("fsync", serial=1))
    assert lost(disk) == {}
    disk.apply(call("open", tmp_path, serial=2))
    disk.apply(call("fsync", serial=2))
    assert lost(disk) == {"file": b"content"}


def test_a_name_without_a_flush_of_its_file_is_an_empty_file(disk, tmp_path):
    disk.apply(call("open", tmp_path, serial=2))
    disk.apply(call("fsync", serial=2))
    assert lost(disk) == {"file": b""}


def test_a_rename_happens_as_a_whole_or_not_at_all(disk, tmp_path):
    disk.apply(call("fsync", serial=1))
    disk.apply(call("open", tmp_path, serial=2))
    disk.apply(call("fsync", serial=2))
    disk.apply(call("rename", tmp_path / "file", other=tmp_path / "new"))
    left = [disk.after_power_loss(random.Random(seed), "any") for seed in range(20)]
    assert {tuple(files) for files in left} == {("file",), ("new",)}
    assert disk.everything() == {"new": b"content"}


def test_a_removed_file_may_come_back(disk, tmp_path):
    disk.apply(call("fsync", serial=1))
    disk.apply(call("open", tmp_path, serial=2))
    disk.apply(call("fsync", serial=2))
    disk.apply(call("unlink", tmp_path / "file"))
    assert disk.everything() == {}
    assert lost(disk) == {"file": b"content"}


def test_a_torn_write_leaves_some_of_its_sectors(tmp_path):
    (tmp_path / "file").write_bytes(b"a" * 2048)
    disk = Disk(tmp_path)
    disk.apply(call("open", tmp_path / "file", serial=1))
    disk.apply(call("write", serial=1, data=b"b" * 2048))
    left = [disk.after_power_loss(random.Random(seed), "torn")["file"] for seed in range(40)]
    sectors = {data[low : low + 512] for data in left for low in range(0, 2048, 512)}
    assert sectors == {b"a" * 512, b"b" * 512}
    assert any(0 < data.count(b"b") < 2048 for data in left)


def test_files_in_folders_are_found_after_the_folder_was_renamed(tmp_path):
    disk = Disk(tmp_path)
    disk.apply(call("mkdir", tmp_path / ".chunk"))
    disk.apply(call("create", tmp_path / ".chunk" / "file", serial=1, offset=1))
    disk.apply(call("write", serial=1, data=b"x"))
    disk.apply(call("rename", tmp_path / ".chunk", other=tmp_path / "chunk"))
    assert disk.everything() == {"chunk/file": b"x"}
