"""What rounding of gradients to 16 bits does to them."""

import pytest
import torch

from dualform.totals.rounding import coarse_spread

UNIT = torch.finfo(torch.bfloat16).eps / 2


def test_parts_that_cancel_leave_their_rounding():
    parts = [torch.randn(40, 50, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    parts.append(-parts[0] - parts[1])
    rounded = sum(part.bfloat16().float() for part in parts)
    off = rounded - sum(parts)
    spread = coarse_spread([part.square() for part in parts], rest=0.0, unit=UNIT)
    assert 0.5 < float(off.square().mean() / spread.mean()) ** 0.5 < 1.1


def test_more_than_rounding_of_the_parts_is_spread_over_them():
    part = torch.tensor([[3.0, 4.0]])
    spread = coarse_spread([part.square()], rest=1.0, unit=UNIT)
    assert float(spread.sum()) == pytest.approx(1.0)


def test_nothing_was_rounded():
    assert not coarse_spread([], rest=0.0, unit=UNIT).any()
