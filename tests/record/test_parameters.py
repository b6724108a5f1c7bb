import pytest
import torch
from torch import nn

from dualform.record.parameters import PARTS, RecordedParameter


@pytest.mark.parametrize(("d_in", "d_out"), [(4, 8), (8, 2), (3, 17), (64, 10)])
def test_an_untouched_weight_is_never_taken_for_an_edited_one(d_in, d_out):
    for seed in range(300):
        value = torch.randn(d_out, d_in, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        value[-1] -= value[-1].mean()  # cancels where a column of R has one sign
        parameter = RecordedParameter(0, "w", nn.Parameter(value), seed, vector=False)
        assert not any(parameter.changed() for _ in range(PARTS)), seed


@pytest.mark.parametrize("counted", [True, False])
def test_an_edited_weight_is_seen(counted):
    weight = nn.Parameter(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    parameter = RecordedParameter(0, "w", weight, 0, vector=False)
    with torch.no_grad():
        (weight if counted else weight.data)[3] *= 1.001
    assert sum(parameter.changed() for _ in range(PARTS)) == (PARTS if counted else 1)


@pytest.mark.parametrize("size", [1e200, 1.7e308, float("inf"), float("nan")])
def test_of_a_diverged_weight_only_its_coming_back_is_seen(size):
    """Its sums overflow, or not, as the order of adding has it; load_state_dict of an earlier state is still noticed."""
    signs = torch.rand(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5
    weight = nn.Parameter(signs * size)
    parameter = RecordedParameter(0, "w", weight, 0, vector=False)
    assert not any(parameter.changed() for _ in range(PARTS))
    with torch.no_grad():
        weight.copy_(signs)
    assert parameter.changed()


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e18, 1e25, 1e36])
def test_rounding_is_no_edit_however_large_a_weight_is(size):
    """Squares of what is seen of it may not fit into its type."""
    weight = nn.Parameter(size * torch.randn(1, 5, generator=torch.Generator().manual_seed(0)))
    parameter = RecordedParameter(0, "w", weight, 0, vector=False)
    seen = parameter.seen
    parameter.seen = seen * (1 + 1e-7)
    assert not parameter.changed()
    parameter.seen = seen * (1 + 1e-3)
    assert parameter.changed()


@pytest.mark.parametrize("shape", [(100, 300), (7, 33), (1, 5), (40,), (6, 3, 5, 5), (5, 0)])
def test_an_edit_that_pytorch_does_not_count_is_seen_once_its_part_is_compared(shape):
    """A vector is compared as a whole each time, a weight in turns."""
    value = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    parameter = RecordedParameter(0, "p", value, 5, vector=len(shape) == 1)
    assert not any(parameter.changed() for _ in range(2 * PARTS))
    value.data.view(-1)[-1:] += 10.0
    times = sum(parameter.changed() for _ in range(parameter.turns))
    assert times == (1 if value.numel() else 0)


def test_a_weight_that_is_not_a_number_was_not_edited():
    weight = nn.Parameter(torch.full((10, 3), torch.nan))
    parameter = RecordedParameter(0, "w", weight, 5, vector=False)
    assert not any(parameter.changed() for _ in range(PARTS))
