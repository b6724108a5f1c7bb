import numpy as np
import pytest
import torch

from dualform.record.recorded import silent_slots

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def find(errors):
    return silent_slots(errors, torch.linalg.vector_norm(errors, dim=1))


@TYPES
def test_none_is_zero(dtype):
    assert find(torch.ones(3, 2, dtype=dtype)) is None
    assert find(torch.zeros(0, 2, dtype=dtype)) is None


@TYPES
def test_some_are(dtype):
    errors = torch.tensor([[0.0, 0.0], [0.0, 1.0], [float("nan"), 0.0], [-0.0, 0.0]], dtype=dtype)
    found = find(errors)
    assert found.tolist() == [True, False, False, True]
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.bool_


def test_squares_that_vanish_are_no_zeros():
    tiny = torch.full((2, 3), 1e-40)
    assert not torch.linalg.vector_norm(tiny, dim=1).any()
    assert find(tiny) is None
    tiny[1] = 0
    assert find(tiny).tolist() == [False, True]
