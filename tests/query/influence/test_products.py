"""All ways to an inner product give the same number."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.query.influence import products
from dualform.query.influence.products import OneHotProducts, Products

SMALL = st.integers(1, 3)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@given(
    examples=st.integers(0, 3), own=SMALL, groups=SMALL, width=st.integers(0, 4), outputs=SMALL,
    rows=st.integers(0, 4), positions=SMALL, constant=st.sampled_from([0.0, 1.0, 1.5]), matrix_bytes=st.sampled_from([1, 1 << 20]),
)  # fmt: skip
def test_slots_and_rows_are_sums_over_positions(
    examples, own, groups, width, outputs, rows, positions, constant, matrix_bytes
):
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(examples, own, groups, width + 1, generator=draw, dtype=torch.float64)
    slopes = torch.randn(examples, own, groups, outputs, generator=draw, dtype=torch.float64)
    keys = torch.randn(rows * positions, groups, width, generator=draw, dtype=torch.float64)
    errors = torch.randn(rows * positions, groups, outputs, generator=draw, dtype=torch.float64)
    extended = torch.cat([keys, torch.full((len(keys), groups, 1), constant, dtype=torch.float64)], 2)
    expected = torch.einsum("qpgw,qpgo,ngw,ngo->qn", queries, slopes, extended, errors)
    before, products.MATRIX_BYTES = products.MATRIX_BYTES, matrix_bytes
    try:
        found = Products(queries, slopes, constant)
        close(found.of_slots(slice(0, examples), keys, errors), expected)
        by_row = expected.reshape(examples, rows, positions).sum(2)
        close(found.of_rows(slice(0, examples), keys, errors, positions), by_row)
        close(found.of_rows(slice(examples // 2, examples), keys, errors, positions), by_row[examples // 2 :])
    finally:
        products.MATRIX_BYTES = before


def test_many_queries_of_few_long_rows_go_by_matrices():
    """The third way, which small shapes seldom take."""
    draw = torch.Generator().manual_seed(0)
    queries, slopes = (torch.randn(20, 9, 1, n, generator=draw, dtype=torch.float64) for n in (4, 2))
    keys, errors = (torch.randn(2 * 50, 1, n, generator=draw, dtype=torch.float64) for n in (3, 2))
    found = Products(queries, slopes, 1.0)
    by_slot = found.of_slots(slice(0, 20), keys, errors).reshape(20, 2, 50).sum(2)
    close(found.of_rows(slice(0, 20), keys, errors, 50), by_slot)


@given(examples=st.integers(0, 3), own=SMALL, slots=st.integers(0, 6), low=st.integers(0, 2))
def test_one_hot_keys_are_vectors_in_disguise(examples, own, slots, low):
    draw = torch.Generator().manual_seed(examples)
    numbers = torch.randint(-1, 4, (examples, own), generator=draw)
    keys = torch.randint(-1, 4, (slots,), generator=draw)
    slopes = torch.randn(examples, own, 1, 2, generator=draw, dtype=torch.float64)
    errors = torch.randn(slots, 1, 2, generator=draw, dtype=torch.float64)
    some = slice(min(low, examples), examples)
    same = ((numbers[..., None] == keys) & (keys >= 0)).double()
    expected = torch.einsum("qpn,qpo,no->qn", same, slopes[:, :, 0], errors[:, 0])
    close(OneHotProducts(numbers, slopes).of_slots(some, keys, errors), expected[some])
