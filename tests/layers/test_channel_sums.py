"""The sums of a normalisation by channels, beside plain products in float64."""

import pytest
import torch

from dualform.layers.channel_sums import channel_sums

SHAPES = [(3, 4, 5), (2, 3, 1), (1, 1, 1), (4, 16, 300), (0, 3, 5), (3, 4, 0)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_are_those_of_plain_products(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    errors = torch.randn(shape, generator=generator, dtype=dtype)
    centred = torch.randn(shape, generator=generator, dtype=dtype)

    products, sums = channel_sums(errors, centred)

    torch.testing.assert_close(products, (errors.double() * centred.double()).sum(2).to(dtype))
    torch.testing.assert_close(sums, errors.double().sum(2).to(dtype))


def test_other_layouts_in_memory():
    errors = torch.randn(3, 5, 4).transpose(1, 2)
    centred = torch.randn(4, 5, 3).permute(2, 0, 1)

    products, sums = channel_sums(errors, centred)

    torch.testing.assert_close(products, (errors * centred).sum(2))
    torch.testing.assert_close(sums, errors.sum(2))
