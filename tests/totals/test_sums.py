from fractions import Fraction

import numpy as np
import pytest

from dualform.totals.sums import sum_by_group


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("longer", [np.float64, np.longdouble])
@pytest.mark.parametrize("count", [1, 3])
def test_values_that_cancel_are_summed_exactly(dtype, longer, count):
    """What is left of them is far below the rounding of a plain sum."""
    random = np.random.default_rng(0)
    sizes = np.array([1, 1e-30, 1e30, 0, 1], dtype)
    values = random.standard_normal((200, 5)).astype(dtype) * sizes
    groups = random.integers(0, count, 200)
    values = np.concatenate([values, -values[::-1]])
    groups = np.concatenate([groups, groups[::-1]])
    values[5] += sizes * 8 * np.finfo(dtype).eps  # next to nothing is left
    found = sum_by_group(values, longer, groups, count)
    assert found.shape == (count, 5)
    for group in range(count):
        exact = [float(sum(map(Fraction, column.tolist()))) for column in values[groups == group].T]
        np.testing.assert_allclose(found[group].astype(np.float64), exact, rtol=1e-9, atol=0)


def test_no_values_have_no_sum():
    assert not sum_by_group(np.zeros((0, 3)), np.longdouble).any()


def test_without_groups_there_is_one():
    values = np.arange(6.0).reshape(3, 2)
    assert sum_by_group(values, np.longdouble).tolist() == [[6.0, 9.0]]
