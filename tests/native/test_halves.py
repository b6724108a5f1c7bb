"""The loop that rounds to float16, compared with PyTorch's own rounding."""

import pytest
import torch

from dualform.native.halves import scaled_halves
from dualform.native.kernels import kernels

pytestmark = pytest.mark.skipif(kernels() is None, reason="the loops in C are not compiled")


def halves(vectors: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    out = torch.empty(vectors.shape, dtype=torch.float16)
    assert scaled_halves(vectors, scales, out)
    return out


@pytest.mark.parametrize(
    "width", [1, 8]
)  # fewer than 8 numbers go the portable way, 8 by an instruction where there is one
def test_every_float16_and_what_lies_between_is_rounded_as_pytorch_does(width: int) -> None:
    exact = torch.arange(0, 2**15 - 1024, dtype=torch.int16).view(torch.float16).float()
    halfway = (exact[1:] + exact[:-1]) / 2
    around = [torch.nextafter(halfway, torch.tensor(0.0)), halfway, torch.nextafter(halfway, halfway + 1)]
    special = torch.tensor([65519.0, 65520.0, 1e30, torch.inf, 1e-45])
    numbers = torch.cat([exact, *around, special])
    numbers = torch.cat([numbers, -numbers])
    vectors = numbers.unsqueeze(1).repeat(1, width)
    assert torch.equal(halves(vectors, torch.ones(len(vectors), 1)), vectors.half())


@pytest.mark.parametrize("width", [3, 16])
def test_not_a_number_stays_so(width: int) -> None:
    assert halves(torch.full((2, width), torch.nan), torch.ones(2, 1)).isnan().all()


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (7, 33), (300, 800)])
def test_each_vector_is_scaled_by_its_own_power_of_two(threads: int, shape: tuple[int, int]) -> None:
    vectors = torch.randn(shape)
    scales = torch.exp2(torch.randint(-3, 4, (shape[0], 1)).float())
    assert torch.equal(halves(vectors, scales), (vectors * scales).half())


@pytest.mark.parametrize(
    "vectors", [torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 2).T], ids=["float64", "transposed"]
)
def test_what_the_loop_cannot_walk_over_is_left_to_pytorch(vectors: torch.Tensor) -> None:
    assert not scaled_halves(vectors, torch.ones(2, 1), torch.empty(2, 3, dtype=torch.float16))
