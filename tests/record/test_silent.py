import numpy as np
import pytest
import torch

from dualform.record.silent import _silent_slots, silent_slots

WAYS = pytest.mark.parametrize("find", [silent_slots, _silent_slots], ids=["compiled", "plain"])
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@WAYS
@TYPES
def test_none_is_zero(find, dtype):
    assert find(torch.ones(3, 2, dtype=dtype)) is None
    assert find(torch.zeros(0, 2, dtype=dtype)) is None


@WAYS
@TYPES
def test_some_are(find, dtype):
    errors = torch.tensor([[0.0, 0.0], [0.0, 1.0], [float("nan"), 0.0], [-0.0, 0.0]], dtype=dtype)
    found = find(errors)
    assert found.tolist() == [True, False, False, True]
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.bool_


@WAYS
def test_squares_that_vanish_are_no_zeros(find):
    tiny = torch.full((2, 3), 1e-40)
    assert not torch.linalg.vector_norm(tiny, dim=1).any()
    assert find(tiny) is None
    tiny[1] = 0
    assert find(tiny).tolist() == [False, True]


def test_what_a_loop_cannot_walk_over():
    errors = torch.tensor([[1.0, 0.0], [0.0, 0.0]]).T  # its columns follow each other in memory
    assert silent_slots(errors).tolist() == [False, True]
