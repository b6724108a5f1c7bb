"""Commands that are given the address of a recording."""

import json

import pytest
from typer.testing import CliRunner

import dualform
from dualform import demo
from dualform.cli import app
from object_server import ObjectServer

pytest.importorskip("obstore", reason="obstore is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

RUN = "s3://bucket/demo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):

    folder = tmp_path_factory.mktemp("addresses") / "demo"
    settings = demo.Settings(epochs=1, train_images=100, width=8)
    demo.train(folder, demo.load(settings), settings)
    return folder


@pytest.fixture(autouse=True)
def server(folder, monkeypatch, tmp_path):
    with ObjectServer() as server:
        for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("ENDPOINT", server.endpoint)):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("DUALFORM_CACHE", str(tmp_path / "cache"))
        dualform.copy(folder, RUN)
        yield server


def said(*arguments):
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_same_is_said(folder):
    for command in ("info", "verify"):
        there = json.loads(said(command, RUN, "--json"))
        here = json.loads(said(command, folder, "--json"))
        if command == "info":
            assert (there.pop("path"), here.pop("path")) == (RUN, str(folder))
        assert there == here


def test_a_copy(folder, tmp_path):
    found = json.loads(said("copy", RUN, tmp_path / "back", "--json"))
    assert found["location"] == str(tmp_path / "back")
    assert said("copy", folder, RUN).startswith(f"{RUN}: 0 files copied (0 bytes), ")
    assert said("verify", tmp_path / "back", "--json") == said("verify", folder, "--json")


def test_an_export(folder, tmp_path):
    said("export", RUN, "--to", tmp_path / "there")
    said("export", folder, "--to", tmp_path / "here")
    assert (tmp_path / "there" / "rows.parquet").read_bytes() == (tmp_path / "here" / "rows.parquet").read_bytes()


def test_the_explorer(folder):
    from dualform.explorer.runs import find
    from dualform.explorer.session import Session

    there = Session(find(RUN))
    here = Session(find(folder))
    assert there.verify() == here.verify()
    asked = ("test:3", "0", "attention")
    settings = {"target": None, "k": 4, "absolute": False, "last": True}
    assert there.scoring.sources(*asked, **settings) == here.scoring.sources(*asked, **settings)


def test_what_needs_a_folder():
    found = CliRunner().invoke(app, ["totals", RUN, "--by", "label"])
    assert found.exit_code == 2
    assert f"{RUN} is an address, which can only be read here" in found.output
