import numpy as np
import polars as pl
import pytest
from polars.testing import assert_series_equal

from dualform.store import tables
from dualform.store.format import Column
from dualform.store.records import Rows, Step, Update

COLUMNS = (Column("sample_id", "Int64", "row"), Column("part", "String", "row"), Column("token", "Int64", "position"))


def step(number, ids, part, token):
    return Step(number, rows=[Rows(0, len(ids), {"sample_id": ids, "part": part, "token": token})])


def test_columns_joined_at_once_are_columns_joined_piece_by_piece():
    ids = np.arange(6)
    steps = [step(0, ids[:2], ["a", "b"], 5 * np.ones((2, 3), int)), step(3, ids[2:], "c", np.zeros((4, 3), int))]
    table = tables.rows_table(steps, COLUMNS)
    assert table["step"].to_list() == [0, 0, 3, 3, 3, 3]
    assert table["sample_id"].to_list() == list(range(6))
    assert table["part"].to_list() == ["a", "b", "c", "c", "c", "c"]
    assert table["token"].to_list() == [[5, 5, 5]] * 2 + [[0, 0, 0]] * 4
    scalar = [*steps, Step(4, rows=[Rows(6, 2, {"sample_id": 7, "part": "c"})])]
    assert tables.rows_table(scalar, COLUMNS[:2])["sample_id"].to_list() == [*range(6), 7, 7]


def test_no_rows():
    table = tables.rows_table([Step(0)], COLUMNS)
    assert table.height == 0
    assert dict(table.schema) == tables.row_types(COLUMNS)


@pytest.mark.parametrize(
    "factors", [[[0.5]], [[0.5], [1.0]], [[1.0, 0.0], [2.0, 3.0]], [[], []], [[1.0], [], [1.0, 2.0]], []]
)
def test_factors_are_lists_however_long(factors):
    steps = [
        Step(n, updates=[Update("sgd", [0], [{"lr": 0.1}], [f], [0.0], [1.0], [None])]) for n, f in enumerate(factors)
    ]
    wanted = pl.Series("factors", factors, dtype=pl.List(pl.Float64))
    assert_series_equal(tables.updates_table(steps)["factors"], wanted)
