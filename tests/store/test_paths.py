"""Paths that a user may give, and that no recording can have."""

import os
from pathlib import Path

import pytest
from torch import nn

import dualform
from dualform.errors import StoreError, StoreExistsError, StoreMissingError
from training import sgd


def ways(path):
    """Everything that takes the path of a recording."""
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    return [
        lambda: dualform.record(model, optimizer, path),
        lambda: dualform.record(model, optimizer, path, overwrite=True),
        lambda: dualform.record(model, optimizer, path, resume=True),
        lambda: dualform.open(path),
        lambda: dualform.build_totals(path, "sample_id"),
    ]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, in which nothing may appear."""
    (tmp_path / "file").write_text("a file")
    (tmp_path / "circle").symlink_to("circle")
    before = sorted(os.listdir(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "is empty"),
        ("run\0", "null byte"),
        (Path("run\0") / "x", "null byte"),
        ("run\ud800", "not valid Unicode"),
        (os.fsdecode(b"run\x80"), "not valid Unicode"),
        (Path("s3://bucket/run"), r"pathlib.Path took a slash away. Give it as a str: s3://…"),
        (None, "of type NoneType; expected a str"),
        (3, "of type int; expected a str"),
        (b"run", "of type bytes; expected a str"),
        ("x" * 300, "too long: choose a shorter one"),
        ("x/" * 3000, "too long: choose a shorter one"),
        ("circle", "lead in a circle"),
    ],
)
def test_a_path_that_no_recording_can_have(path, message):
    for way in ways(path):
        with pytest.raises(StoreError, match=message):
            way()


@pytest.mark.parametrize("path", ["gs://bucket/run", "file:///run"])
def test_nothing_is_written_to_an_address(path):
    recording, overwriting, resuming, _, totals = ways(path)
    for way in (recording, overwriting, resuming, totals):
        with pytest.raises(
            StoreError, match=f"{path} is an address, which can only be read here.* dualform copy FOLDER {path}"
        ):
            way()


@pytest.mark.parametrize("path", ["foo://bucket/run", "s3:///run", "s3://"])
def test_what_is_no_address_of_a_recording(path):
    pytest.importorskip("obstore", reason="obstore is not installed")
    with pytest.raises(StoreError, match="is not an address of a recording; expected s3://bucket/folder, gs://"):
        dualform.open(path)


def test_the_address_of_a_folder(folder):
    with pytest.raises(StoreMissingError, match=f"{folder} holds no recording"):
        dualform.open(f"file://{folder}")
    with pytest.raises(StoreError, match="names a folder on another machine; expected three slashes"):
        dualform.open("file://elsewhere/run")


@pytest.mark.parametrize("path", ["file", "file/run"])
def test_a_path_at_or_within_a_file(path):
    fresh, overwriting, *existing = ways(path)
    for way in (fresh, overwriting):
        with pytest.raises(StoreExistsError, match="is a file, or within one; a recording is a folder"):
            way()
    for way in existing:
        with pytest.raises(StoreMissingError, match="holds no recording"):
            way()


def test_a_link_to_a_folder_that_is_gone(folder):
    link = folder / "circle"
    link.unlink()
    link.symlink_to("nowhere")
    for way in ways("circle"):
        with pytest.raises(
            StoreMissingError, match=r"a symbolic link to a folder that does not exist|holds no recording"
        ):
            way()
