"""The same against moto's S3, where its server is on the path: it cannot be in this environment, as it needs an older python-dateutil."""

import http.client
import shutil
import socket
import subprocess
import time

import pytest
from inconsistent import answers, record

import dualform
from dualform.errors import StoreError, StoreMissingError
from object_server import Fault, ObjectServer

pytest.importorskip("obstore", reason="obstore is not installed")

from dualform.store import remote

RUN = "s3://bucket/run"
MOTO = shutil.which("moto_server")

pytestmark = pytest.mark.skipif(MOTO is None, reason="moto_server is not installed (pipx install 'moto[server]')")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def make_bucket(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("PUT", "/bucket")
    assert connection.getresponse().status == 200


@pytest.fixture(scope="module")
def moto():
    port = free_port()
    process = subprocess.Popen(
        [MOTO, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(300):
            try:
                make_bucket(port)
                break
            except OSError:
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def test_there_and_back(moto, monkeypatch, tmp_path):
    record(tmp_path / "run")
    expected = answers(tmp_path / "run")
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    monkeypatch.setitem(remote.RETRIES, "max_retries", 2)
    with ObjectServer(upstream=moto) as server:
        for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("ENDPOINT", server.endpoint)):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("DUALFORM_CACHE", str(tmp_path / "cache"))
        with pytest.raises(StoreMissingError, match="there is no bucket 'other'"):
            dualform.copy(tmp_path / "run", "s3://other/run")
        server.fail(Fault("500", "^PUT .*updates", times=1000))
        with pytest.raises(StoreError, match="it goes on from here"):
            dualform.copy(tmp_path / "run", RUN)
        with pytest.raises(StoreMissingError):
            dualform.open(RUN)
        server.faults.clear()
        dualform.copy(tmp_path / "run", RUN)
        server.fail(Fault("cut", "^GET .*slots"), Fault("500", "list-type"), Fault("change", "^GET .*rows"))
        is_same = answers(RUN) == expected
        assert is_same
        record(tmp_path / "run", seed=2, resume=4)
        dualform.copy(tmp_path / "run", RUN)  # removes the manifest first
        dualform.copy(RUN, tmp_path / "back")
    is_same = answers(tmp_path / "back") == answers(tmp_path / "run") != expected
    assert is_same
