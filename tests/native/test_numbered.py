"""Numbers by content: the loop in C against a dictionary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualform.native.kernels import kernels
from dualform.native.numbered import Table
from dualform.store.equal import Names

pytestmark = pytest.mark.skipif(kernels() is None, reason="the loops in C are not compiled")


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 30), st.integers(-2, 2)), max_size=60), min_size=1, max_size=6),
    st.sampled_from([1, 3, 8, 17, 400]),
    st.sampled_from([np.float16, np.float32]),
    st.booleans(),
    st.booleans(),
)
def test_they_agree_with_a_dictionary(batches, width, dtype, seeded, in_place):
    table, names, following = Table(), Names(), 7
    for batch in batches:
        rows = np.array([value for value, _ in batch], dtype).reshape(-1, 1) * np.arange(1, width + 1, dtype=dtype)
        seeds = np.array([seed for _, seed in batch], np.int16) if seeded else None
        found, expected = (one.number(one.names(rows, seeds), following, in_place=in_place) for one in (table, names))
        assert found[0].tolist() == expected[0].tolist()
        assert found[1].tolist() == expected[1].tolist()
        assert len(table) == len(names)
        following += len(batch) if in_place else len(found[1])


def test_very_many_names_are_all_different_and_found_again():
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 2, (50_000, 24)).astype(np.float16)  # few bits differ
    rows[:, :20] = np.arange(50_000)[:, None] >> np.arange(20) & 1
    table = Table()
    for low in range(0, len(rows), 999):
        numbers, places = table.number(table.names(rows[low : low + 999], None), low)
        assert numbers.tolist() == list(range(low, min(low + 999, len(rows))))
        assert len(places) == len(numbers)
    numbers, places = table.number(table.names(rows[::-1], None), len(rows))
    assert numbers.tolist() == list(range(len(rows) - 1, -1, -1))
    assert not len(places)


def test_rows_that_do_not_lie_side_by_side():
    rows = np.arange(60, dtype=np.float32).reshape(6, 10)
    table = Table()
    assert table.number(table.names(rows[::2], None), 0)[0].tolist() == [0, 1, 2]
    assert table.number(table.names(np.ascontiguousarray(rows[::2]), None), 3)[0].tolist() == [0, 1, 2]
    assert table.number(table.names(np.empty((0, 10), np.float32), None), 3)[0].tolist() == []


def test_vectors_that_differ_in_any_bits_have_other_names():
    """A single bit, or two of them at once (signs, say), anywhere: each word has sums of its own, and none of them may cancel."""
    row = np.random.default_rng(0).integers(0, 256, 200, np.uint8)
    bits = np.unpackbits(row)
    singles = np.eye(len(bits), dtype=np.uint8)
    signs = np.zeros((len(row) // 2, len(bits)), np.uint8)
    signs[:, 8:9] = 1
    signs[np.arange(len(signs)), 16 * np.arange(len(signs)) + 8] ^= 1
    others = [np.packbits(bits ^ flips, axis=-1) for flips in (singles, signs[1:])]
    names = Table.names(np.concatenate([row[None], *others]), None)
    assert len(np.unique(names[:, 0])) == len(np.unique(names[:, 1])) == len(names)
    # ... and half of the bits of a name change
    changed = np.unpackbits((names[1:] ^ names[0]).view(np.uint8), axis=1).mean(1)
    assert changed.min() > 0.3
    assert changed.max() < 0.7
    assert abs(changed.mean() - 0.5) < 0.01


def test_a_vector_is_told_from_the_same_with_zeros_behind_it():
    names = [Table.names(np.zeros((1, width), np.uint8), None)[0].tolist() for width in range(1, 200)]
    assert len({tuple(name) for name in names}) == len(names)
