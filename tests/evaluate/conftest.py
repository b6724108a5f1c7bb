import pytest
import tiny
import torch


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    tiny.train(torch.arange(tiny.SAMPLES), 0, folder)
    return folder
