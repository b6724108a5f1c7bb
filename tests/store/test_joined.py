"""Tensors in pieces are read as their concatenation is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.store.encoding import Encoded, decode, encode
from dualform.store.joined import JoinedTensor

lengths = st.lists(st.integers(0, 4), min_size=1, max_size=6)


def pieces_of(counts):
    whole = torch.arange(3.0 * sum(counts)).reshape(-1, 3) + 1
    return list(torch.split(whole, counts)), whole


@given(counts=lengths, low=st.integers(0, 25), high=st.integers(0, 25))
def test_any_rows(counts, low, high):
    pieces, whole = pieces_of(counts)
    joined = JoinedTensor(pieces)
    assert (len(joined), joined.size(0), joined.shape, joined.nbytes) == (
        len(whole),
        len(whole),
        tuple(whole.shape),
        whole.nbytes,
    )
    part = joined[low:high]
    found = part.whole() if isinstance(part, JoinedTensor) else part
    assert found.equal(whole[low:high] if low <= high else whole[:0])
    assert joined.to(torch.float64).equal(whole.double())
    assert joined.any() == bool(whole.any())


@given(counts=lengths, data=st.data())
def test_rows_by_number(counts, data):
    pieces, whole = pieces_of(counts)
    wanted = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=8) if len(whole) else st.just([]))
    places = torch.tensor(wanted, dtype=torch.int64)
    joined = JoinedTensor(pieces)
    assert joined.index_select(0, places).equal(whole[places])
    assert joined[places].equal(whole[places])
    with pytest.raises(IndexError, match="not there"):
        joined.index_select(0, torch.tensor([len(whole)]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_stored_vectors(dtype):
    vectors = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    stored = encode(vectors, dtype)
    exponents = None if stored.exponents is None else JoinedTensor(torch.split(stored.exponents, [3, 0, 4]))
    joined = Encoded(JoinedTensor(torch.split(stored.data, [3, 0, 4])), exponents)
    expected = decode(stored.data, stored.exponents, torch.float32)
    assert joined.count == 7
    assert decode(joined.data, joined.exponents, torch.float32).equal(expected)
    assert joined.some(torch.tensor([6, 0, 2]), torch.float32).equal(expected[[6, 0, 2]])
    first = joined.first_vectors(5)
    assert decode(first.data, first.exponents, torch.float32).equal(expected[:5])
