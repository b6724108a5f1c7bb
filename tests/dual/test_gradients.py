import pytest
import torch

from dualform.dual.gradients import Sum
from dualform.layers.keys import Vectors
from dualform.layers.layer import Layer, Use
from dualform.layers.written import sum_written

LAYER = Layer("layer", "linear", 4, 6, ())
USES = {
    "weight": (Use("p", "weight"), (6, 4), None),
    "some rows": (Use("p", "weight"), (2, 4), torch.tensor([1, 5])),
    "rows that follow each other": (Use("p", "weight"), (2, 4), slice(3, 5)),
    "a part of the parameter": (Use("p", "weight", rows=(2, 8)), (9, 4), None),
    "some columns": (Use("p", "weight", keys=(1, 3), errors=(0, 2, 4, 6)), (4, 2), None),
    "table": (Use("p", "table"), (4, 6), None),
    "groups": (Use("p", "weight", groups=2), (6, 2), None),
    "bias": (Use("p", "bias"), (6,), None),
}


@pytest.mark.parametrize(("use", "shape", "columns"), USES.values(), ids=USES)
def test_a_sum_is_that_of_what_the_slots_write(use, shape, columns):
    """In memory that held another sum before; and nothing, if nothing is added."""
    torch.manual_seed(0)
    total = Sum(shape, torch.float64, columns)
    assert torch.equal(total.taken(), torch.zeros(shape, dtype=torch.float64))
    for calls in (1, 3, 2):
        expected = torch.zeros(shape, dtype=torch.float64)
        for factor in torch.rand(calls).tolist():
            keys, errors = Vectors(torch.randn(5, 4).double()), torch.randn(5, 6).double()
            total.add(LAYER, use, keys, errors, factor)
            own = expected[use.rows[0] : use.rows[1]] if use.rows else expected
            own += factor * sum_written(use, keys, errors, columns)
        assert total.added == calls
        torch.testing.assert_close(total.taken(), expected, rtol=1e-13, atol=1e-13)
        assert total.added == 0
