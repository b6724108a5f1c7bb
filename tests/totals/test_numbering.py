"""Numbering groups: small whole numbers by a table, everything else by a dictionary, alike."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualform.totals import groups
from dualform.totals.groups import Numbering

SCHEMA = {"n": pl.Int64()}


def plainly(batches):
    numbers = {}
    found = [[numbers.setdefault(entry, len(numbers)) for entry in batch] for batch in batches]
    return found, list(numbers)


entries = st.one_of(st.integers(0, 9), st.integers(-3, 12), st.sampled_from([groups.SMALL - 1, groups.SMALL, 2**40]))


@given(st.lists(st.lists(entries, max_size=8), max_size=6))
def test_the_order_of_appearance(batches):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "SMALL", 11)  # else the table of a large number would take its time
        numbering = Numbering(["n"])
        found = [numbering.number({"n": np.array(b, dtype=np.int64)}, (len(b),)).tolist() for b in batches]
        assert (found, numbering.table(SCHEMA)["n"].to_list()) == plainly(batches)
        assert len(numbering) == len(plainly(batches)[1])
        again = Numbering(["n"], numbering.table(SCHEMA))
        assert again.number({"n": numbering.table(SCHEMA)["n"].to_numpy()}, (len(again),)).tolist() == list(
            range(len(again))
        )


def test_shapes():
    numbering = Numbering(["n"])
    assert numbering.number({"n": np.array([[5, 6], [6, 5]])}, (2, 2)).tolist() == [[0, 1], [1, 0]]
    assert numbering.number({"n": np.array([6, 7])}, (2, 3)).tolist() == [[1] * 3, [2] * 3]
    assert numbering.number({"n": 5}, (2,)).tolist() == [0, 0]  # a scalar: from here on by dictionary
    assert numbering.number({"n": np.array([7, 9])}, (2,)).tolist() == [2, 3]
    assert numbering.table(SCHEMA)["n"].to_list() == [5, 6, 7, 9]


def test_what_is_no_number_is_one_group():
    schema, entries = {"n": pl.Float64()}, np.array([1.0, np.nan, np.nan])
    numbering = Numbering(["n"])
    assert numbering.number({"n": entries}, (3,)).tolist() == [0, 1, 1]
    assert numbering.number({"n": entries[::-1]}, (3,)).tolist() == [1, 1, 0]
    assert numbering.table(schema)["n"].equals(pl.Series("n", [1.0, np.nan]))
    assert Numbering(["n"], numbering.table(schema)).number({"n": entries}, (3,)).tolist() == [0, 1, 1]


WITHOUT_ROW = {
    "small numbers": ([3, 5], pl.Int64()),
    "negative numbers": ([-1, 5], pl.Int64()),
    "words": (["a", "b"], pl.String()),
    "fractions": ([0.5, float("nan")], pl.Float64()),
}


@pytest.mark.parametrize("kind", WITHOUT_ROW)
def test_slots_without_a_row_are_a_group_of_their_own(kind):
    (one, other), dtype = WITHOUT_ROW[kind]
    numbering = Numbering(["x"])

    def number(value):
        values = value if isinstance(value, list) else np.array([value])
        return int(numbering.number({"x": [value] if isinstance(value, str) else values}, (1,))[0])

    assert number(one) == 0
    assert numbering.number_without_row() == 1
    assert number(other) == 2
    assert numbering.number_without_row() == 1
    assert number(one) == 0
    assert len(numbering) == 3
    table = numbering.table({"x": dtype})
    assert table["x"].to_list()[:2] == [one, None]
    # Going on with totals that were kept
    again = Numbering(["x"], table)
    assert again.number_without_row() == 1
    assert len(again) == 3
    assert again.table({"x": dtype}).equals(table)


def test_several_columns_without_a_row():
    numbering = Numbering(["x", "y"])
    assert numbering.number_without_row() == 0
    assert numbering.number({"x": np.array([1]), "y": ["a"]}, (1,)).tolist() == [1]
    table = numbering.table({"x": pl.Int64(), "y": pl.String()})
    assert table.rows() == [(None, None), (1, "a")]
    again = Numbering(["x", "y"], table)
    assert again.number({"x": np.array([1]), "y": ["a"]}, (1,)).tolist() == [1]
    assert again.number_without_row() == 0
