import pytest
import runs
from clients import Client

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


@pytest.fixture(scope="session")
def client(app):
    return Client(app)
