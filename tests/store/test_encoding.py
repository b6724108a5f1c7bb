import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dualform.store.encoding import EncodeRequest, decode, encode, encode_all


def there_and_back(vectors, dtype):
    encoded = encode(vectors, dtype)
    return decode(encoded.data, encoded.exponents, vectors.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stored_as_it_is(dtype):
    vectors = torch.randn(5, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    assert torch.equal(there_and_back(vectors, str(dtype).removeprefix("torch.")), vectors)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_copy_shares_no_memory(dtype):
    vectors = torch.ones(2, 3, dtype=getattr(torch, dtype))
    encoded = encode(vectors, dtype)
    vectors.zero_()
    assert torch.equal(decode(encoded.data, encoded.exponents, torch.float64), torch.ones(2, 3).double())


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-7, 1e-3, 1.0, 1e4, 1e8, 1e20, 1e37])
def test_float16_keeps_eleven_bits_at_any_size(size):
    vectors = size * torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    error = (there_and_back(vectors, "float16").double() - vectors.double()).norm(dim=1)
    assert (error / vectors.double().norm(dim=1)).max() <= 2**-11


def test_float16_keeps_small_elements_beside_large_ones():
    vector = 1.2345 * 2.0 ** -torch.arange(0, 26, 5).float()  # down to 2⁻²⁵ of the first
    found = there_and_back(vector.unsqueeze(0), "float16")[0]
    assert ((found - vector).abs() / vector).max() <= 2**-11


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=6),
        elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
    )
)
def test_float16_no_slot_vanishes_beside_a_larger_one(array):
    vectors = torch.from_numpy(array)
    vectors = vectors.where(vectors.abs() > 2.0**-90, 0)
    norms = vectors.double().norm(dim=1)
    error = (there_and_back(vectors, "float16").double() - vectors.double()).norm(dim=1)
    assert bool((error <= 1e-3 * norms).all()), (error / norms, vectors)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_zeros_and_the_empty_batch(dtype):
    assert torch.equal(there_and_back(torch.zeros(3, 4), dtype), torch.zeros(3, 4))
    assert there_and_back(torch.zeros(0, 4), dtype).shape == (0, 4)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_is_not_finite_stays_so_and_harms_no_other(dtype):
    vectors = torch.tensor([[1.0, float("inf")], [float("nan"), 2.0], [3.0, -4.0]])
    torch.testing.assert_close(there_and_back(vectors, dtype), vectors, equal_nan=True, rtol=1e-3, atol=0)


def test_known_norms_change_nothing():
    vectors = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    plain = encode(vectors, "float16")
    (told,) = encode_all([EncodeRequest(vectors, norms=torch.linalg.vector_norm(vectors, dim=1))], "float16")
    assert torch.equal(plain.data, told.data)
    assert torch.equal(plain.exponents, told.exponents)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_several_at_once_are_stored_as_each_alone(dtype):
    generator = torch.Generator().manual_seed(3)
    shapes = ((3, 5, 1e-4), (0, 4, 1), (2, 0, 1), (4, 7, 50.0))
    given = [torch.randn(n, d, generator=generator) * size for n, d, size in shapes]
    given += [torch.zeros(2, 3), torch.full((1, 2), float("nan")), given[3].double() * 1e200, given[0].bfloat16()]
    assert encode_all([], dtype) == []
    for as_they_are in (False, True):
        together = encode_all([EncodeRequest(one, as_they_are=as_they_are) for one in given], dtype)
        for one, found in zip(given, together, strict=True):
            alone = encode(one, dtype, as_they_are=as_they_are)
            torch.testing.assert_close(found.data, alone.data, rtol=0, atol=0, equal_nan=True)
            assert (alone.exponents is None) == (dtype != "float16")
            if alone.exponents is not None:
                assert torch.equal(found.exponents, alone.exponents)


@pytest.mark.parametrize("size", [1e-6, 0.5, 1.0, 30.0, 3e4, 1e6])
def test_keys_of_common_size_need_no_scale(size):
    generator = torch.Generator().manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(5, 300, generator=generator), dim=1) * size * 1.01
    encoded = encode(keys, "float16", as_they_are=True)
    assert bool((encoded.exponents == 0).all()) == (1 <= size < 2**15)
    back = decode(encoded.data, encoded.exponents, torch.float32)
    assert ((back - keys).abs() <= keys.abs() * 2**-11 + size * 2**-25).all()


def test_a_key_is_stored_alike_in_any_company():
    """Equal keys are found by their bits."""
    key = torch.full((1, 4), 0.75)
    company = torch.cat([key, key * 1e6, key * 1e-6, key * 0])
    alone, beside = (encode(t, "float16", as_they_are=True) for t in (key, company))
    assert torch.equal(alone.data[0], beside.data[0])
    assert alone.exponents[0] == beside.exponents[0]


def test_the_size_counts_the_exponents():
    assert encode(torch.zeros(3, 4), "float16").nbytes == 3 * 4 * 2 + 3 * 2
    assert encode(torch.zeros(3, 4), "float32").nbytes == 3 * 4 * 4


@pytest.mark.parametrize("places", [[], [4], [2, 3, 4], [5, 9, 7], [5, 5, 7], [9, 0]])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_vectors_by_their_places_in_any_order(places, dtype):
    vectors = torch.arange(20, dtype=torch.float32).reshape(10, 2) + 1
    found = encode(vectors, dtype).some(torch.tensor(places, dtype=torch.int64), torch.float32)
    assert torch.equal(found, vectors[places])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("places", [[], [4], [2, 3, 4], [5, 0, 0, 3], list(range(0, 1400, 2))], ids=len)
def test_vectors_that_are_picked_out_are_those_of_decoding_all(dtype, places):
    torch.manual_seed(0)
    stored = encode(torch.randn(1500, 3) * torch.logspace(-12, 3, 1500).unsqueeze(1), dtype)
    every = decode(stored.data, stored.exponents, torch.float64)[places]
    assert torch.equal(stored.some(torch.tensor(places, dtype=torch.int64), torch.float64), every)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system does not list a process's threads")
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_the_writers_thread_brings_up_no_threads_of_its_own(threads):
    """More threads of OpenMP than cores, and all of them sleep at every turn: training took a quarter longer."""
    vectors, counts = encode(torch.randn(4000, 300), "float16"), []

    def work():
        before = len(os.listdir("/proc/self/task"))
        taken = vectors.take(np.arange(0, 4000, 2))
        counts.append(len(os.listdir("/proc/self/task")) - before)
        assert torch.equal(taken.data, vectors.data[::2])
        assert torch.equal(taken.exponents, vectors.exponents[::2])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counts == [0]
