"""Commands and the explorer over a run of two ranks answer as over the same training on one."""

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

import dualform
from dualform.cli import app
from dualform.explorer.app import application
from dualform.explorer.session import Session
from dualform.explorer.subject import subject
from parallel_training import Case, network, on_one_rank, on_two_ranks, samples

CASE = Case(sizes=(3,), steps=5, optimizer="adamw")


@pytest.fixture(scope="module")
def folders(ranks, tmp_path_factory):
    """The run of two ranks, and that of one."""
    folder = tmp_path_factory.mktemp("asked")
    ranks.run(on_two_ranks, CASE, folder / "two")
    on_one_rank(CASE, folder / "one")
    return folder / "two", folder / "one"


def command(*words):
    found = CliRunner().invoke(app, [str(word) for word in words])
    assert found.exit_code == 0, found.output
    return found.output


def test_commands(folders):
    two, _ = folders
    assert "2, each with a shard of its own" in command("info", two)
    assert "All 6 parameters equal their dual" in command("verify", two)
    assert "3 groups" in command("totals", two, "--by", "label")
    assert dualform.open(two).info()["totals"][0]["groups"] == 3


def explorer(folder):
    data = samples(CASE)
    session = Session(subject(dualform.open(folder, network(CASE)), data, data))
    return TestClient(application(session), base_url="http://localhost")


def ask(client, address, **params):
    answer = client.get(address, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def close(found, expected, where=""):
    """Two answers say the same, to rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            close(found[name], expected[name], f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, pair in enumerate(zip(found, expected, strict=True)):
            close(*pair, f"{where}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), where
    else:
        assert found == expected, where


def test_the_explorer(folders):
    two, one = map(explorer, folders)
    close(ask(two, "/api/prediction", input="test:3"), ask(one, "/api/prediction", input="test:3"))
    found, expected = (ask(asked, "/api/run") for asked in (two, one))
    assert {name: found[name] for name in ("steps", "rows")} == {name: expected[name] for name in ("steps", "rows")}
