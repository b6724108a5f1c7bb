"""Copies of recordings: whole or not there, gone on with, and checked."""

import os
import shutil

import pytest
from inconsistent import answers, record

import dualform
from dualform.errors import StoreDamagedError, StoreError, StoreExistsError, StoreMissingError
from object_server import Fault, ObjectServer

pytest.importorskip("obstore", reason="obstore is not installed")

from dualform.store import remote, uploads
from dualform.store.files import folder_at
from dualform.store.shards import RunFile, write_run

RUN = "s3://bucket/run"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy") / "run"
    record(folder)
    (folder / "demo.json").write_text('{"seed": 0}')
    (folder / "curvature-1.safetensors").write_text("made again")
    (folder / "chunk-000099").mkdir()
    (folder / "chunk-000099" / "rows.parquet").write_text("left over")
    return folder


@pytest.fixture(scope="module")
def expected(recorded):
    return answers(recorded)


@pytest.fixture(autouse=True)
def server(monkeypatch, tmp_path):
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    with ObjectServer() as server:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT", server.endpoint)
        monkeypatch.setenv("DUALFORM_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
        monkeypatch.setitem(remote.RETRIES, "max_retries", 1)
        yield server


def writes(server):
    return [request.path for request in server.requests if request.method == "PUT"]


def is_same(place, expected):
    return answers(place) == expected


def test_there_and_back(server, recorded, expected, tmp_path):
    seen = []
    found = dualform.copy(recorded, RUN, progress=lambda *said: seen.append(said))
    assert is_same(RUN, expected)
    assert found.location == RUN
    assert found.copied == found.files
    assert seen[0] == ("copying", 0, found.copied)
    assert seen[-1] == ("copying", found.copied, found.copied)
    assert writes(server)[-1] == "/bucket/run/manifest.json"
    assert "run/demo.json" in server.objects
    assert not [name for name in server.objects if "curvature" in name or "000099" in name or "lock" in name]

    back = dualform.copy(RUN, tmp_path / "back")
    assert back.files == found.files
    assert is_same(tmp_path / "back", expected)
    left = {path.name for path in (tmp_path / "back").rglob("*") if path.name.startswith(".")}
    assert left == set()


def test_between_folders_and_between_addresses(server, recorded, expected, tmp_path):
    dualform.copy(recorded, tmp_path / "one")
    dualform.copy(f"file://{tmp_path}/one", f"file://{tmp_path}/two")
    assert is_same(tmp_path / "two", expected)
    dualform.copy(tmp_path / "two", RUN)
    dualform.copy(RUN, "s3://bucket/other")
    assert is_same("s3://bucket/other", expected)


def test_from_a_web_server(server, recorded, expected, tmp_path):
    dualform.copy(recorded, RUN)
    dualform.copy(f"{server.endpoint}/bucket/run", tmp_path / "back")
    assert is_same(tmp_path / "back", expected)
    with pytest.raises(StoreError, match="can only be read: web servers take no files"):
        dualform.copy(recorded, f"{server.endpoint}/bucket/new")


def test_large_files_go_in_parts(server, recorded, expected, monkeypatch):
    monkeypatch.setattr(uploads, "PART", 1000)
    dualform.copy(recorded, RUN)
    assert any("partNumber=2" in path for path in writes(server))
    assert is_same(RUN, expected)


def test_nothing_is_copied_twice(server, recorded, tmp_path):
    dualform.copy(recorded, RUN)
    server.requests.clear()
    assert dualform.copy(recorded, RUN).copied == 0
    assert writes(server) == ["/bucket/run/manifest.json"]
    assert not [request for request in server.requests if "delete" in request.path]
    dualform.copy(RUN, tmp_path / "back")
    server.requests.clear()
    assert dualform.copy(RUN, tmp_path / "back").copied == 0


@pytest.mark.parametrize("skip", [0, 3, 11])
def test_an_interrupted_upload(server, recorded, expected, skip):
    server.fail(Fault("500", "^PUT", times=1000, skip=skip))
    with pytest.raises(StoreError, match=f"{RUN}/.* cannot be written: .*Try again: it goes on from here"):
        dualform.copy(recorded, RUN)
    assert "run/manifest.json" not in server.objects
    with pytest.raises(StoreMissingError):
        dualform.open(RUN)
    server.faults.clear()
    there = len(server.objects)
    found = dualform.copy(recorded, RUN)
    assert found.copied == found.files - there
    assert is_same(RUN, expected)


@pytest.mark.parametrize("kind", ["500", "cut"])
def test_an_interrupted_download(server, recorded, expected, tmp_path, kind):
    dualform.copy(recorded, RUN)
    server.fail(Fault(kind, r"^GET /bucket/run/chunk-000002/", times=1000))
    with pytest.raises(StoreError, match=f"{RUN}/chunk-000002/.* cannot be read"):
        dualform.copy(RUN, tmp_path / "back")
    with pytest.raises(StoreMissingError):
        dualform.open(tmp_path / "back")
    server.faults.clear()
    found = dualform.copy(RUN, tmp_path / "back")
    assert 0 < found.copied < found.files
    assert is_same(tmp_path / "back", expected)


def test_faults_that_pass(server, recorded, expected, tmp_path):
    server.fail(Fault("500", "^PUT .*slots"), Fault("cut", "^PUT .*rows"), Fault("cut", "^GET .*slots"))
    dualform.copy(recorded, RUN)
    server.fail(Fault("change", r"^GET /bucket/run/chunk-000001/slots"), Fault("change", "^GET /bucket/run/.*rows"))
    dualform.copy(RUN, tmp_path / "back")
    assert is_same(tmp_path / "back", expected)
    assert not [fault for fault in server.faults if fault.times]


def test_a_run_that_was_trained_further(server, recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "run")
    dualform.copy(tmp_path / "run", RUN)
    record(tmp_path / "run", seed=2, resume=8, steps=12)
    found = dualform.copy(tmp_path / "run", RUN)
    assert 0 < found.copied < found.files / 2
    assert is_same(RUN, answers(tmp_path / "run"))


def test_a_run_that_was_resumed_from_an_earlier_step(server, recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "run")
    dualform.copy(tmp_path / "run", RUN)
    record(tmp_path / "run", seed=2, resume=4)
    server.fail(Fault("500", "^PUT .*chunk-000003", times=1000))
    with pytest.raises(StoreError):
        dualform.copy(tmp_path / "run", RUN)
    with pytest.raises(StoreMissingError):  # neither the one nor the other is there
        dualform.open(RUN)
    server.faults.clear()
    dualform.copy(tmp_path / "run", RUN)
    assert is_same(RUN, answers(tmp_path / "run"))


def test_another_recording_there(server, recorded, tmp_path):
    record(tmp_path / "other", seed=1)
    dualform.copy(tmp_path / "other", RUN)
    with pytest.raises(StoreExistsError, match=f"{RUN} holds another recording already"):
        dualform.copy(recorded, RUN)
    with pytest.raises(StoreExistsError, match="other holds another recording already"):
        dualform.copy(recorded, tmp_path / "other")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(StoreExistsError, match="full is not empty and holds no recording"):
        dualform.copy(recorded, tmp_path / "full")


def test_a_damaged_recording_is_not_copied(server, recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "run")
    path = tmp_path / "run" / "chunk-000001" / "slots.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(StoreDamagedError, match=f"{path} is damaged"):
        dualform.copy(tmp_path / "run", RUN)
    assert "run/manifest.json" not in server.objects
    with pytest.raises(StoreDamagedError, match=f"{path} is damaged"):
        dualform.copy(tmp_path / "run", tmp_path / "copy")


def test_nothing_to_copy(tmp_path):
    with pytest.raises(StoreMissingError, match="nothing holds no recording"):
        dualform.copy(tmp_path / "nothing", RUN)
    with pytest.raises(StoreMissingError, match=f"{RUN} holds no recording"):
        dualform.copy(RUN, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_runs_of_several_folders(server, recorded, expected, tmp_path):
    for rank in range(2):
        shutil.copytree(recorded, tmp_path / "ranks" / f"rank-{rank}")
    write_run(folder_at(tmp_path / "ranks"), RunFile("name", 2))
    dualform.copy(tmp_path / "ranks", RUN)
    heads = [path for path in writes(server) if path.endswith(("manifest.json", "run.json"))]
    assert writes(server)[-3:] == heads
    assert heads[-1] == "/bucket/run/run.json"
    assert is_same(f"{RUN}/rank-1", expected)
    dualform.copy(RUN, tmp_path / "back")
    assert is_same(tmp_path / "back" / "rank-0", expected)
