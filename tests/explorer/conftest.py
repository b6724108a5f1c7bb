import time

import httpx
import pytest
import runs

from dualform.explorer.app import application
from dualform.explorer.runs import find
from dualform.explorer.session import Session


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A recorded demo; nobody may change it."""
    return runs.digits(tmp_path_factory.mktemp("explorer") / "demo")


@pytest.fixture(scope="session")
def session(folder):
    return Session(find(folder))


@pytest.fixture(scope="session")
def app(session):
    return application(session)


class Client:
    """Asks an application, one question at a time."""

    def __init__(self, app, **headers):
        self._app, self._headers = app, headers

    def __call__(self, method, address, **options):
        import asyncio

        async def ask():
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", headers=self._headers
            ) as client:
                return await client.request(method, address, **options)

        return asyncio.run(ask())

    def get(self, address, **params):
        found = self("GET", address, params=params)
        assert found.status_code == 200, found.text
        return found.json()

    def refused(self, address, **params):
        """Status and words of an answer that is none."""
        found = self("GET", address, params=params)
        assert found.status_code >= 400
        return found.status_code, found.json()["problem"]


@pytest.fixture(scope="session")
def client(app):
    return Client(app)


def finished(client, **work):
    """Begin a job, and wait."""
    job = client("POST", "/api/jobs", json=work).json()
    for _ in range(400):
        job = client.get(f"/api/jobs/{job['id']}")
        if job["state"] not in ("waiting", "running"):
            return job
        time.sleep(0.05)
    raise AssertionError(f"the job does not end: {job}")
