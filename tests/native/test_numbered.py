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
        found, expected = (one.number(rows, seeds, following, in_place=in_place) for one in (table, names))
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
        numbers, places = table.number(rows[low : low + 999], None, low)
        assert numbers.tolist() == list(range(low, min(low + 999, len(rows))))
        assert len(places) == len(numbers)
    numbers, places = table.number(rows[::-1], None, len(rows))
    assert numbers.tolist() == list(range(len(rows) - 1, -1, -1))
    assert not len(places)


def test_rows_that_do_not_lie_side_by_side():
    rows = np.arange(60, dtype=np.float32).reshape(6, 10)
    table = Table()
    assert table.number(rows[::2], None, 0)[0].tolist() == [0, 1, 2]
    assert table.number(np.ascontiguousarray(rows[::2]), None, 3)[0].tolist() == [0, 1, 2]
    assert table.number(np.empty((0, 10), np.float32), None, 3)[0].tolist() == []
