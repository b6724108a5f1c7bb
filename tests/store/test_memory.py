"""Memory that goes round between recorder and writer."""

import pytest
import torch

from dualform.store.encoding import encode
from dualform.store.memory import PAGE, Pool


def test_a_pool_gives_memory_again_once_all_of_it_is_back():
    pool = Pool(slab_bytes=64)  # two vectors of 8 floats
    one, two, three = (encode(torch.randn(1, 8), "float32", pool, "x") for _ in range(3))
    assert one.slab is two.slab
    assert one.data.data_ptr() + one.data.nbytes == two.data.data_ptr()
    assert three.slab is not one.slab
    pool.give(one)
    assert encode(torch.randn(2, 8), "float32", pool, "y").slab is not one.slab
    pool.give(two)
    assert encode(torch.randn(2, 8), "float32", pool, "z").slab is one.slab


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_memory_of_a_pool_begins_at_a_page(dtype):
    for columns in (1, 7, 800):
        room = Pool().take("a", 128, columns, dtype)
        assert room.slab is not None
        assert room.first == 0
        assert room.data.data_ptr() == room.slab.vectors.data_ptr()
        assert room.data.data_ptr() % PAGE == 0


def test_a_pool_never_gives_away_memory_in_use():
    pool = Pool(slab_bytes=256)
    held, kept = [], []
    generator = torch.Generator().manual_seed(0)
    for number in range(200):
        vectors = torch.randn(number % 5, 8, generator=generator)
        held.append(encode(vectors, "float32", pool, "xy"[number % 2]))
        kept.append(vectors)
        if number % 3 == 2:
            for _ in range(2):
                pool.give(held.pop(0))
                kept.pop(0)
    for one, vectors in zip(held, kept, strict=True):
        assert torch.equal(one.data, vectors)


def test_a_pool_keeps_no_more_than_it_may():
    pool = Pool(most_bytes=0, slab_bytes=32)
    one, _ = encode(torch.randn(1, 8), "float32", pool), encode(torch.randn(1, 8), "float32", pool)
    pool.give(one)
    assert encode(torch.randn(1, 8), "float32", pool).slab is not one.slab


def test_batches_of_any_length_follow_each_other_in_memory():
    pool = Pool()
    lengths = [3, 3, 1, 3, 0, 2, 3, 3, 5, 3, 1, 1]
    given = [torch.full((length, 2), float(n)) for n, length in enumerate(lengths)]
    kept = [encode(one, "float32", pool, "layer") for one in given]
    assert len({id(one.slab) for one in kept}) == 1
    assert all(torch.equal(one.data, expected) for one, expected in zip(kept, given, strict=True))


def test_shared_vectors_are_in_use_until_all_are_given_back():
    pool = Pool(slab_bytes=32)  # one vector of 8 floats
    vectors = encode(torch.randn(1, 8), "float32", pool, "x")
    again = pool.share(vectors)
    assert again.data.data_ptr() == vectors.data.data_ptr()
    encode(torch.randn(1, 8), "float32", pool, "x")  # fills another slab
    pool.give(vectors)
    assert encode(torch.randn(1, 8), "float32", pool, "y").slab is not vectors.slab
    pool.give(again)
    assert encode(torch.randn(1, 8), "float32", pool, "z").slab is vectors.slab
