"""Which groups match a condition, where some compare rows with each other."""

import polars as pl
import pytest

from dualform.query.conditions import matching_groups

ROWS = pl.DataFrame({"step": [0, 0, 1, 1, 2], "label": [0, 1, 1, 2, 2], "task": ["a", "b", "b", "a", "a"]})
GROUPS = pl.DataFrame({"label": [0, 1, 2]})


def matching(condition, rows=ROWS):
    found = matching_groups(condition, GROUPS, rows, "drop")
    return None if found is None else found.tolist()


@pytest.mark.parametrize("rows", [ROWS, None], ids=["rows", "only totals"])
@pytest.mark.parametrize("condition", [pl.col("label") > 0, "label > 0", pl.col("label").is_in([1, 2])], ids=str)
def test_a_condition_on_one_row(condition, rows):
    assert matching(condition, rows) == [False, True, True]


@pytest.mark.parametrize("condition", [pl.lit(True), "TRUE"], ids=str)
def test_a_constant(condition):
    assert matching(condition) == [True] * 3
    assert matching(condition, None) == [True] * 3


def test_a_mean_over_rows_is_no_mean_over_groups():
    """Of rows it is 1.2, of groups 1."""
    condition = pl.col("label") + 0.1 > pl.col("label").mean()
    assert matching(condition) == [False, False, True]
    assert GROUPS.select(condition).to_series().to_list() == [False, True, True]


def test_counts_of_rows():
    assert matching(pl.len().over("label") > 1) == [False, True, True]


def test_rows_of_one_group_that_differ():
    assert matching(pl.col("label").is_first_distinct()) is None


@pytest.mark.parametrize(
    "condition",
    [
        pl.col("label") >= pl.col("label").mean(),
        pl.col("label").is_first_distinct(),
        pl.col("label").is_unique(),
        pl.len().over("label") > 12,
        pl.col("label").cum_count() < 3,
        pl.col("label") == pl.col("label").shift(1),
    ],
    ids=str,
)
def test_without_rows_a_comparison_of_rows_is_found_by_trial(condition):
    assert matching(condition, None) is None


def test_a_column_with_an_entry_for_each_position_needs_slots():
    rows = pl.DataFrame({"step": [0], "label": [[0, 1, 2]]})
    assert matching(pl.col("label") > 0, rows) is None


def test_slots_that_serve_all_rows_do_not_match_a_comparison_of_rows():
    groups = pl.DataFrame({"label": [0, 1, 2, None]})
    alone = matching_groups(pl.col("label").is_null(), groups, ROWS, "drop")
    assert alone.tolist() == [False, False, False, True]
    compared = matching_groups(pl.col("label").ne_missing(pl.col("label").max()), groups, ROWS, "drop")
    assert compared.tolist() == [True, True, False, False]
