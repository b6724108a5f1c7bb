"""Clients of the explorer: of the application itself, and of a server."""

import asyncio
import time

import httpx


class Client:
    """Asks an application, one question at a time."""

    def __init__(self, app, **headers):
        self._app, self._headers = app, headers

    def __call__(self, method, address, **options):
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


def bearer(server):
    """The header of a client that knows the token."""
    return {"authorization": f"Bearer {server.token}"}


def asked(server, path, **params):
    """Ask a server, with its token."""
    return httpx.get(f"{server.address}{path}", params=params, headers=bearer(server), timeout=60)


def finished(client, **work):
    """Begin a job, and wait."""
    job = client("POST", "/api/jobs", json=work).json()
    for _ in range(400):
        job = client.get(f"/api/jobs/{job['id']}")
        if job["state"] not in ("waiting", "running"):
            return job
        time.sleep(0.05)
    raise AssertionError(f"the job does not end: {job}")
