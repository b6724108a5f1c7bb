import numpy as np
import pytest
import torch

from dualform.projection import EQUATIONS, SHORT, Projection, random_columns


@pytest.mark.parametrize(("inputs", "outputs"), [(100, 1), (100, 3), (100, 64), (2, 1)])
def test_enough_equations_whatever_the_shape(inputs, outputs):
    R = random_columns(inputs, outputs, torch.float64, torch.Generator().manual_seed(0))
    assert R.shape[0] == inputs
    assert R.shape[1] * outputs >= min(EQUATIONS, inputs * outputs)


def test_entries_are_signs_where_there_are_many_inputs():
    R = random_columns(SHORT + 1, 4, torch.float64, torch.Generator().manual_seed(0))
    assert set(R.unique().tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("inputs", [2, 3, 8])
def test_rows_that_sum_to_zero_are_seen_by_every_column(inputs):
    """LayerNorm makes such rows; a column of equal signs would not see them."""
    row = torch.zeros(inputs, dtype=torch.float64)
    row[0], row[1] = 1.0, -1.0
    for seed in range(200):
        R = random_columns(inputs, 1, torch.float64, torch.Generator().manual_seed(seed))
        assert (row @ R).abs().min() > 1e-6
        assert R.square().min() >= 0.5
        assert R.square().max() <= 1.5


@pytest.mark.parametrize(("shape", "vector"), [((5, 7), False), ((3, 2, 3, 3), False), ((6,), True), ((2, 3), True)])
def test_the_same_name_and_seed_give_the_same_view(shape, vector):
    value = torch.randn(shape, dtype=torch.float64)
    one, other = (Projection.of("a.weight", shape, torch.float64, 7, vector=vector) for _ in range(2))
    assert np.array_equal(one.project(value), other.project(value))
    assert one.fingerprint(one.project(value)) == other.fingerprint(other.project(value))
    third = Projection.of("b.weight", shape, torch.float64, 7, vector=vector)
    assert third.fingerprint(third.project(value)) != one.fingerprint(one.project(value))


def test_a_view_is_linear_and_about_as_large_as_what_is_seen():
    weight = torch.randn(200, 300, dtype=torch.float64)
    projection = Projection.of("w", (200, 300), torch.float64, 7, vector=False)
    seen = projection.project(weight)
    np.testing.assert_allclose(projection.project(3 * weight), 3 * seen)
    assert np.linalg.norm(seen) / np.sqrt(projection.columns) == pytest.approx(float(weight.norm()), rel=0.2)


def test_the_users_random_numbers_are_not_touched():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    Projection.of("w", (4, 5), torch.float32, 7, vector=False)
    assert torch.rand(1) == expected


@pytest.mark.parametrize("shape", [(7, 33), (6, 3, 5, 5), (500, 400)])
def test_the_layout_in_memory_does_not_matter(shape):
    weight = torch.randn(shape, dtype=torch.float64)
    projection = Projection.of("w", shape, torch.float64, 7, vector=False)
    transposed = weight.transpose(0, 1).contiguous().transpose(0, 1)
    np.testing.assert_allclose(projection.project(transposed), projection.project(weight), rtol=1e-12)


def test_a_weight_without_columns():
    projection = Projection.of("w", (5, 0), torch.float32, 7, vector=False)
    assert projection.project(torch.empty(5, 0)).tolist() == [0.0] * 5


def test_a_sparse_gradient():
    gradient = torch.randn(50, 9, dtype=torch.float64)
    projection = Projection.of("w", (50, 9), torch.float64, 7, vector=False)
    np.testing.assert_allclose(projection.project(gradient.to_sparse()), projection.project(gradient))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_was_seen_of_a_vector_is_a_copy(dtype):
    bias = torch.ones(6, dtype=dtype)
    projected = Projection.of("b", (6,), dtype, 7, vector=True).project(bias)
    bias.zero_()
    assert projected.tolist() == [1.0] * 6
