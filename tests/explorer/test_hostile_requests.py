"""Hostile conditions against a running explorer: each is refused at once, and nothing outside of the run is read."""

import sys
import time

import httpx
import pytest
from clients import bearer

import hostile
from dualform.explorer.server import Server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs inotify")


@pytest.fixture(scope="module")
def client(session):
    with Server(session) as server:
        with httpx.Client(base_url=server.address, headers=bearer(server), timeout=60) as opened:
            yield opened


def as_job(client, drop):
    """Start an edit, and wait for its end; gives the answer that refuses it, or the job."""
    answer = client.post("api/jobs", json={"kind": "edit", "input": "test:3", "drop": drop})
    while answer.status_code < 400 and answer.json()["state"] in ("waiting", "running"):
        time.sleep(0.01)
        answer = client.get(f"api/jobs/{answer.json()['id']}")
    return answer


def test_hostile_conditions_are_refused_everywhere(client, tmp_path):
    secret = tmp_path / "secret.csv"
    secret.write_text("my-password,other\n1,2\n")
    with hostile.listening() as (url, requests), hostile.opened(secret) as was_opened:
        for drop in hostile.conditions(secret, url):
            if "\ud800" in drop:
                continue  # no client can send it
            began = time.monotonic()
            for address, params in (("api/edit", {"input": "test:3"}), ("api/accuracy", {})):
                answer = client.get(address, params={"drop": drop, **params})
                assert answer.status_code in (400, 422), drop
                assert answer.json()["problem"]
                assert "my-password" not in answer.text
            job = as_job(client, drop)
            assert job.status_code in (400, 422) or job.json()["state"] == "failed", drop
            assert "my-password" not in job.text
            assert time.monotonic() - began < 3, drop
        assert not was_opened()
        assert requests == []
    assert client.get("api/log").status_code == 200  # it is still there


def test_half_a_character_is_refused(client):
    """JSON can have in it what is not valid Unicode."""
    body = r"""{"kind": "edit", "input": "test:3", "drop": "task = '\ud800'"}"""
    answer = client.post("api/jobs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code < 500
    assert client.get("api/log").status_code == 200
