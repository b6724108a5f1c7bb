"""A store at an address: the answers of the folder, whatever the network does."""

import json
import os
import pickle
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from inconsistent import answers, network, record
from torch import nn

import dualform
from dualform.errors import (
    QuestionError,
    StoreChangedError,
    StoreDamagedError,
    StoreError,
    StoreMissingError,
    StorePermissionError,
)
from object_server import Fault, ObjectServer
from training import sgd

pytest.importorskip("obstore", reason="obstore is not installed")

from dualform.store import remote
from dualform.store.remote import RemoteFiles

RUN = "s3://bucket/run"
SLOTS = r"GET /bucket/run/chunk-\d+/slots"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote") / "run"
    record(folder)
    return folder


@pytest.fixture(scope="module")
def expected(recorded):
    return answers(recorded)


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("DUALFORM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    monkeypatch.setitem(remote.RETRIES, "max_retries", 3)


def put(server, folder, prefix="run"):
    for path in folder.rglob("*"):
        if path.is_file():
            server.objects[f"{prefix}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()


@pytest.fixture
def server(recorded, monkeypatch):
    with ObjectServer() as server:
        put(server, recorded)
        monkeypatch.setenv("AWS_ENDPOINT", server.endpoint)
        yield server


def same(found, expected):
    """Whether answers are equal to the last bit. (pytest would print pages of differences.)"""
    return found == expected


def influence(place):
    return dualform.open(place, network()).influence(torch.arange(8), target=1).top(3, by="sample_id").rows()


# The same answers


def test_it_answers_as_the_folder_does(server, expected):
    assert same(answers(RUN), expected)
    assert same(answers(f"{RUN}/"), expected)


def test_over_http(server, expected):
    assert same(answers(f"{server.endpoint}/bucket/run"), expected)


def test_as_the_address_of_a_folder(recorded, expected):
    assert same(answers(f"file://{recorded}"), expected)


def test_the_second_time_only_the_manifest_and_the_list_are_read(server, expected):
    answers(RUN)
    server.requests.clear()
    assert same(answers(RUN), expected)
    paths = [request.path for request in server.requests]
    names = {path.partition("?")[0] for path in paths}
    assert names == {"/bucket/run/manifest.json", "/bucket/run/run.json", "/bucket"}
    assert len(paths) <= 6  # lists come in pages


def test_curvature_is_kept_in_the_cache(server, recorded, tmp_path):
    assert influence(RUN) == influence(recorded)
    made = list((tmp_path / "cache" / "made").rglob("curvature-*"))
    assert made
    before = [path.stat().st_mtime_ns for path in made]
    influence(RUN)
    assert [path.stat().st_mtime_ns for path in made] == before
    assert not any("curvature" in request.path for request in server.requests)


def test_threads_share_it(server, expected):
    found = []
    threads = [threading.Thread(target=lambda: found.append(answers(RUN))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(found, [expected] * 3)


def test_it_can_be_sent_to_another_process(server):
    files = pickle.loads(pickle.dumps(dualform.open(RUN).store.files))
    assert files.location == RUN
    assert files.size("manifest.json") == len(server.objects["run/manifest.json"])


def test_folders_within(server, recorded, expected):
    put(server, recorded, "runs/ranks/rank-0")
    files = RemoteFiles("s3://bucket/runs")
    name = "ranks/rank-0/manifest.json"
    assert json.loads(files.read(name))["format"] == "dualform"
    server.requests.clear()
    assert (
        files.size("ranks/rank-0/chunk-000000/rows.parquet") == (recorded / "chunk-000000/rows.parquet").stat().st_size
    )
    assert "prefix=runs/ranks/rank-0/" in server.requests[0].path


# Ranges, not files


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A recording with chunk files of several megabytes."""
    folder = tmp_path_factory.mktemp("wide") / "run"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 128), nn.Tanh(), nn.Linear(128, 4))
    optimizer = sgd(model)
    with dualform.record(model, optimizer, folder) as recorder:
        for step in range(8):
            recorder.batch(sample_id=torch.arange(128) + 128 * step)
            optimizer.zero_grad()
            model(torch.randn(128, 1024)).square().mean().backward()
            optimizer.step()
    return folder


def test_only_the_layer_that_is_asked_about_is_read(server, wide):
    server.objects.clear()
    put(server, wide)
    query = {"2": torch.randn(1, 128)}
    found = dualform.open(RUN).attend(query)["2"].top(3).write_json()
    assert found == dualform.open(wide).attend(query)["2"].top(3).write_json()
    whole = sum(len(content) for content in server.objects.values())
    read = sum(request.nbytes for request in server.requests)
    assert read < whole / 2, f"{read:,} of {whole:,} bytes"


def test_a_cache_smaller_than_the_store(server, wide, monkeypatch, tmp_path):
    server.objects.clear()
    put(server, wide)
    monkeypatch.setenv("DUALFORM_CACHE_SIZE", "6MB")
    query = {"0": torch.randn(2, 1024), "2": torch.randn(2, 128)}
    there = dualform.open(RUN).attend(query)
    here = dualform.open(wide).attend(query)
    for layer in ("0", "2", "0"):
        assert there[layer].total("sample_id").write_json() == here[layer].total("sample_id").write_json()
    kept = [path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sum(kept) <= 6_000_000


def test_what_nobody_uses_is_let_go(server, wide, monkeypatch):
    server.objects.clear()
    put(server, wide)
    monkeypatch.setattr(remote, "HELD_BYTES", 1)
    files = dualform.open(RUN).store.chunk_file(0)
    keys = files["0.keys"]
    assert files["0.keys"] is keys
    files["1.keys"]  # takes its place among those that are held
    address = id(keys)
    del keys
    assert address not in {id(array) for array, _ in files._content._files.held._arrays}
    assert "0.keys" not in files._checked
    assert torch.equal(files["0.keys"], dualform.open(wide).store.chunk_file(0)["0.keys"])


# What goes wrong on the way


@pytest.mark.parametrize("match", [SLOTS, r"/run/chunk-\d+/rows", "list-type", "/run/manifest"])
@pytest.mark.parametrize("kind", ["500", "503", "cut", "slow"])
def test_faults_that_pass(server, expected, kind, match):
    server.fail(Fault(kind, match, times=1 if kind == "slow" else 2))
    assert same(answers(RUN), expected)
    assert server.faults[0].times == 0


@pytest.mark.parametrize("match", [SLOTS, "/run/chunk-000001/updates", r"/run/snapshot-\d+"])
def test_a_byte_that_changed_on_the_way_is_read_again(server, expected, match):
    server.fail(Fault("change", match))
    assert same(answers(RUN), expected)
    assert server.faults[0].times == 0
    assert same(answers(RUN), expected)


@pytest.mark.parametrize("kind", ["a byte", "the end", "everything"])
def test_a_damaged_cache_is_read_again(server, expected, tmp_path, kind):
    answers(RUN)
    for path in (tmp_path / "cache" / "parts").iterdir():
        content = path.read_bytes()
        path.unlink()
        path.write_bytes({"a byte": b"?" + content[1:], "the end": content[:-1], "everything": b""}[kind])
    assert same(answers(RUN), expected)


@pytest.mark.parametrize("name", ["chunk-000001/slots.safetensors", "chunk-000000/rows.parquet"])
def test_a_changed_object(server, name):
    content = server.objects[f"run/{name}"]
    server.objects[f"run/{name}"] = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    with pytest.raises(StoreDamagedError, match=f"{RUN}/{name} is damaged"):
        answers(RUN)


def test_an_object_that_is_gone(server):
    del server.objects["run/chunk-000001/slots.safetensors"]
    with pytest.raises(
        StoreDamagedError, match=f"{RUN}/chunk-000001/slots.safetensors is missing.*Restore it from a copy"
    ):
        dualform.open(RUN)


def test_an_object_that_goes_while_it_is_read(server):
    dual = dualform.open(RUN, network())
    del server.objects["run/chunk-000002/slots.safetensors"]
    with pytest.raises(StoreDamagedError, match=f"{RUN}/chunk-000002/slots.safetensors is missing"):
        dual.verify()


def test_a_recording_that_is_replaced_while_it_is_read(server, tmp_path):
    dual = dualform.open(RUN, network())
    record(tmp_path / "other", seed=1)
    server.objects.clear()
    put(server, tmp_path / "other")
    with pytest.raises(StoreChangedError, match=f"another recording has replaced that in {RUN}"):
        dual.verify()
    assert same(answers(RUN), answers(tmp_path / "other"))


def test_a_recording_that_goes_on(server, recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "run")
    earlier = answers(RUN)
    record(tmp_path / "run", seed=2, resume=6)
    put(server, tmp_path / "run")
    now = answers(RUN)
    assert same(now, answers(tmp_path / "run"))
    assert not same(now, earlier)


def test_a_list_that_is_not_allowed(server, expected):
    server.fail(Fault("403", "list-type", times=1000))
    assert same(answers(RUN), expected)


# What is said


def test_no_recording_there(server):
    with pytest.raises(StoreMissingError, match="s3://bucket/nothing holds no recording"):
        dualform.open("s3://bucket/nothing")


def test_no_such_bucket(server):
    with pytest.raises(StoreMissingError, match=r"there is no bucket 'other'. Check the address and the endpoint"):
        dualform.open("s3://other/run")


def test_access_is_denied(server):
    server.fail(Fault("403", "rows", times=1000))
    with pytest.raises(
        StorePermissionError, match=r"rows.parquet cannot be read: access is denied.*Set AWS_ACCESS_KEY_ID"
    ):
        dualform.open(RUN).rows  # noqa: B018


def test_no_credentials(server, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(
        StorePermissionError, match=r"no credentials were found. Set AWS_ACCESS_KEY_ID, .*AWS_SKIP_SIGNATURE"
    ):
        dualform.open(RUN)


def test_nobody_answers(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match=f"{RUN}/run.json cannot be reached .*Check the network"):
        dualform.open(RUN)


def test_a_server_without_ranges(recorded):
    """As python -m http.server is."""
    handler = partial(Quiet, directory=recorded.parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as plain:
        threading.Thread(target=plain.serve_forever, daemon=True).start()
        try:
            with pytest.raises(
                StoreError, match="its server sends whole files only, and a recording is read by ranges"
            ):
                influence(f"http://127.0.0.1:{plain.server_port}/{recorded.name}")
        finally:
            plain.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


def test_a_server_that_stays_broken(server):
    server.fail(Fault("500", "manifest", times=1000))
    with pytest.raises(StoreError, match=f"{RUN}/manifest.json cannot be read: .*Try again; what has been read stays"):
        dualform.open(RUN)


def test_trainings_need_a_folder_here(server):
    from dualform.evaluate.retrain import trainings_folder

    assert trainings_folder("runs/a", None) == Path("runs/a-retrained")
    with pytest.raises(QuestionError, match=f"{RUN} is an address: name a folder on this machine for the trainings"):
        trainings_folder(RUN, None)
