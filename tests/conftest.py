import itertools
import os
import signal

import pytest
import torch
from hypothesis import settings

from dualform.record import begin
from training import train

# Two threads that wait for each other take ages where other things run too, and the networks are small
torch.set_num_threads(1)

# A shell starts background jobs with Ctrl-C ignored, and many tests send it
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time: a red build is then about the change it tests
settings.register_profile("dualform", deadline=None, derandomize=True, max_examples=20)
settings.load_profile("dualform")
# Other examples each time, and more of them: `make fuzz`
settings.register_profile("random", deadline=None, derandomize=False, max_examples=300, print_blob=True)


def pytest_collection_modifyitems(items):
    if not os.environ.get("DUALFORM_DATA"):
        for item in items:
            if item.get_closest_marker("data"):
                item.add_marker(pytest.mark.skip(reason="DUALFORM_DATA names no folder with the datasets"))


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk():
    """Flushing would take most of the time of the suite, and no test pulls the plug."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


SEEDS = itertools.count(1)


@pytest.fixture(scope="session", autouse=True)
def audit_seeds():
    """The audit's random matrices are secret, and now and then one hardly shows what a test looks for: here they follow from a count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(begin, "private_seed", lambda: next(SEEDS))
        yield


@pytest.fixture(autouse=True)
def the_same_audit_each_time():
    """Whatever tests ran before."""
    global SEEDS
    SEEDS = itertools.count(1)


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    """PyTorch has one thread, or several."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A recorded training in float64, for questions; nobody may change it."""
    return train(tmp_path_factory.mktemp("trained") / "run", chunk_bytes=2000)


@pytest.fixture(scope="session")
def with_snapshots(tmp_path_factory):
    """A longer one in small chunks, so that snapshots were taken on the way."""
    return train(tmp_path_factory.mktemp("snapshots") / "run", steps=24, chunk_bytes=500)


@pytest.fixture
def dual(trained):
    return trained.dual
