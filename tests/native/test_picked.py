import pytest
import torch

from dualform.native import picked
from dualform.native.kernels import kernels
from dualform.native.picked import FEW, Picked

compiled = pytest.mark.skipif(kernels() is None, reason="the loops in C are not compiled")


def tables(dtype, width, *, scaled=False):
    """Four tables, one of them empty, that begin anywhere in memory."""
    generator = torch.Generator().manual_seed(width)
    whole = torch.randn(60, width, generator=generator).to(dtype)
    powers = torch.randint(-20, 20, (60,), generator=generator).to(torch.int16) if scaled else None
    cuts = [slice(1, 8), slice(8, 8), slice(9, 40), slice(40, 60)]
    return [(whole[cut], None if powers is None else powers[cut]) for cut in cuts]


def plain(queries, some, numbers):
    vectors = torch.cat([v.double() * (1 if p is None else torch.exp2(p.double())[:, None]) for v, p in some])
    return queries.double() @ vectors[numbers].T


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 800])
@pytest.mark.parametrize("count", [1, FEW])
def test_products_are_those_of_the_vectors(dtype, width, count):
    some = tables(dtype, width, scaled=dtype == torch.float16)
    queries = torch.randn(count, width, generator=torch.Generator().manual_seed(1))
    for numbers in (torch.arange(58), torch.tensor([57, 0, 7, 7, 6, 38, 37, 2]), torch.zeros(0, dtype=torch.int64)):
        expected = plain(queries, some, numbers)
        torch.testing.assert_close(
            Picked(some).dots(queries, numbers).double(), expected, rtol=1e-5, atol=1e-2 * width**0.5
        )
        lengths = plain(queries.abs(), [(v.abs(), p) for v, p in some], numbers)
        assert ((Picked(some).dots(queries, numbers) - expected).abs() <= 1e-6 * lengths).all()


@compiled
def test_many_that_are_picked_out_in_any_order(threads):
    some, queries = tables(torch.float16, 64, scaled=True), torch.randn(2, 64)
    numbers = torch.randint(58, (5000,), generator=torch.Generator().manual_seed(2))
    assert Picked(some).dots(queries, numbers).equal(Picked(some).dots(queries, torch.arange(58))[:, numbers])
    numbers[4321] = 58
    with pytest.raises(IndexError, match="there are 58"):
        Picked(some).dots(queries, numbers)


@compiled
def test_every_float16_is_read_as_what_it_is():
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)[:, None]
    found = Picked([(every, None)]).dots(torch.ones(1, 1), torch.arange(2**16))
    torch.testing.assert_close(found[0], every[:, 0].float(), rtol=0, atol=0, equal_nan=True)


@compiled
@pytest.mark.parametrize("number", [-1, 58])
def test_a_vector_that_is_not_there(number):
    with pytest.raises(IndexError, match="there are 58"):
        Picked(tables(torch.float32, 4)).dots(torch.ones(1, 4), torch.tensor([3, number]))


def test_what_is_done_in_another_way(monkeypatch):
    numbers, some = torch.arange(3), tables(torch.float32, 4)
    assert Picked(some).dots(torch.ones(FEW + 1, 4), numbers) is None
    assert Picked(some).dots(torch.ones(1, 4, dtype=torch.float64), numbers) is None
    assert Picked(tables(torch.float64, 4)).dots(torch.ones(1, 4), numbers) is None
    assert Picked([(some[0][0].T, None)]).dots(torch.ones(1, 7), numbers) is None
    assert Picked([]).dots(torch.ones(1, 4), numbers) is None
    monkeypatch.setattr(picked, "kernels", lambda: None)
    assert Picked(some).dots(torch.ones(1, 4), numbers) is None


@compiled
def test_whatever_type_pytorch_makes_by_itself():
    queries, vectors = torch.randn(2, 17), torch.randn(30, 17)
    torch.set_default_dtype(torch.float64)
    try:
        found = Picked([(vectors, None)]).dots(queries, torch.arange(30))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, queries @ vectors.T, rtol=1e-4, atol=1e-4)
