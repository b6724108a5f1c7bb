import pytest
import torch

import devices


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def precision(request):
    """Of everything that a test makes. In float32 ordinary passes and updates go by the compiled loops."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=devices.names())
def device(request):
    return torch.device(request.param)
