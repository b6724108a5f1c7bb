"""The folder behind a store: reading parts of files, publishing and removing."""

import os
from pathlib import Path

import numpy as np
import pytest

from dualform.errors import StoreDamagedError
from dualform.store.files import LocalFiles


@pytest.fixture
def files(tmp_path):
    return LocalFiles(tmp_path)


@pytest.mark.parametrize(("begin", "end", "expected"), [(0, 3, b"abc"), (2, 4, b"cd"), (4, 99, b"ef"), (9, 12, b"")])
def test_ranges_end_where_the_file_ends(files, begin, end, expected):
    files.write("letters", b"abcdef")
    assert files.read_range("letters", begin, end) == expected
    assert files.read("letters") == b"abcdef"
    assert files.size("letters") == 6


def test_a_missing_file(files):
    for read in (files.read, files.size, files.open, lambda name: files.read_range(name, 0, 1)):
        with pytest.raises(StoreDamagedError, match="nothing is missing, though the manifest names it"):
            read("nothing")


def test_a_published_file_replaces_the_one_before(files):
    files.write("name", b"old")
    files.write(".name", b"new")
    files.publish(".name", "name")
    assert files.read("name") == b"new"
    assert files.list() == ["name"]


def test_a_published_folder_replaces_the_one_before(files):
    files.write("chunk/old", b"1")
    files.write(".chunk/new", b"2")
    files.publish(".chunk", "chunk")
    assert files.read("chunk/new") == b"2"
    assert os.listdir(files.path("chunk")) == ["new"]
    assert files.list() == ["chunk"]


@pytest.mark.parametrize("name", ["file", "folder/file"])
def test_names_are_flushed_after_they_are_given(files, monkeypatch, name):
    """First what is in a folder, then its new name, then the store that holds it."""
    events = []
    flush = os.fsync

    def note_flush(descriptor):
        events.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        flush(descriptor)

    top = name.split("/")[0]
    monkeypatch.setattr(os, "fsync", note_flush)
    for way in ("rename", "replace"):
        original = getattr(Path, way)
        monkeypatch.setattr(
            Path, way, lambda path, target, move=original: (events.append("rename"), move(path, target))
        )
    files.write(f".{name}", b"content")
    files.publish(f".{top}", top)
    inside = ["flush .folder"] if "/" in name else []
    written = Path(f".{name}").name
    assert events == [f"flush {written}", *inside, "rename", f"flush {files.folder.name}"]


def test_of_a_link_only_the_link_is_removed(files, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "precious").write_text("precious")
    files.path("link").symlink_to(elsewhere)
    files.remove("link")
    files.remove("nothing")
    assert files.list() == []
    assert (elsewhere / "precious").read_text() == "precious"


def test_a_file_is_written_beside_a_link_and_not_through_it(files, tmp_path_factory):
    precious = tmp_path_factory.mktemp("elsewhere") / "precious"
    precious.write_text("precious")
    files.path("link").symlink_to(precious)
    with files.create("link", header_size=4, data_size=3) as output:
        output.append([np.frombuffer(b"abc", np.uint8)])
        output.finish(b"head")
    assert files.read("link") == b"headabc"
    assert precious.read_text() == "precious"
