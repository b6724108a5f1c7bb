import numpy as np
import polars as pl
import pytest
import torch

from dualform.errors import BatchError
from dualform.record.columns import RESERVED, read_batch
from dualform.store.format import Column


def read(expected=None, **columns):
    return read_batch(0, columns, expected)


@pytest.mark.parametrize(
    ("given", "type_"),
    [
        (torch.tensor([3, 1]), "Int64"),
        (torch.tensor([3, 1], dtype=torch.uint8), "Int64"),
        (torch.tensor([0.5, 1.5]), "Float64"),
        (torch.tensor([0.5, 1.5], dtype=torch.bfloat16), "Float64"),
        (torch.tensor([0.5, 1.5], requires_grad=True), "Float64"),
        (torch.tensor([True, False]), "Boolean"),
        (np.array([3, 1], dtype=np.int8), "Int64"),
        (np.array(["a", "b"]), "String"),
        (np.array(["a", "b"], dtype=object), "String"),
        ([3, 1], "Int64"),
        ((0.5, 1.5), "Float64"),
        (["a", "b"], "String"),
        ([True, False], "Boolean"),
        (pl.Series([3, 1]), "Int64"),
        (pl.Series(["a", "b"]), "String"),
    ],
)
def test_tensors_arrays_lists_and_series_of_four_types(given, type_):
    batch = read(column=given)
    assert batch.rows == 2
    assert batch.columns == (Column("column", type_, "row"),)
    plain = given.tolist() if hasattr(given, "tolist") else given.to_list() if hasattr(given, "to_list") else given
    assert list(batch.values["column"]) == list(plain)


@pytest.mark.parametrize(
    ("scalar", "type_"),
    [
        (3, "Int64"),
        (0.5, "Float64"),
        ("a", "String"),
        (True, "Boolean"),
        (torch.tensor(3), "Int64"),
        (np.int64(3), "Int64"),
        (np.float32(0.5), "Float64"),
        (np.float64(0.5), "Float64"),
        (np.str_("a"), "String"),
        (np.bool_(True), "Boolean"),
    ],
)
def test_a_scalar_stands_for_all_rows(scalar, type_):
    batch = read(sample_id=[1, 2, 3], task=scalar)
    assert batch.rows == 3
    assert batch.columns[1] == Column("task", type_, "row")
    assert batch.values["task"] == scalar


@pytest.mark.parametrize("tokens", [torch.arange(6).reshape(2, 3), [["a", "b", "c"], ["d", "e", "f"]]])
def test_a_column_per_position(tokens):
    batch = read(token=tokens)
    assert batch.rows == 2
    assert batch.columns[0].per == "position"
    assert np.shape(batch.values["token"]) == (2, 3)


def test_what_is_read_is_a_copy():
    array, tensor, names = np.array([1, 2]), torch.tensor([1, 2]), ["a", "b"]
    batch = read(array=array, tensor=tensor, names=names)
    array[:], tensor[:], names[0] = 9, 9, "z"
    assert [list(value) for value in batch.values.values()] == [[1, 2], [1, 2], ["a", "b"]]


def test_the_empty_batch():
    assert read(sample_id=torch.zeros(0, dtype=torch.int64)).rows == 0


def test_no_columns():
    with pytest.raises(BatchError, match=r"no columns.*batch\(sample_id=ids\)"):
        read()


def test_only_scalars():
    with pytest.raises(BatchError, match=r"batch\(task, epoch\) got only scalars.*at least one column"):
        read(task="a", epoch=3)


def test_columns_of_different_lengths():
    with pytest.raises(BatchError, match=r"differ in their number of rows: sample_id 2, label 3"):
        read(sample_id=[1, 2], label=[1, 2, 3])


@pytest.mark.parametrize("name", RESERVED)
def test_names_that_are_taken(name):
    with pytest.raises(BatchError, match=rf"'{name}' is taken.*slot_position"):
        read(**{name: [1, 2]})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([[1, 2], [3]], "different lengths"),
        ([1, None], "None in it. Every row needs an entry"),
        ([1, "a", object()], "expected integers, floats, strings or booleans"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), "datetime64.*expected integers, floats"),
        (np.array([1j]), "complex128.*expected integers, floats"),
        (torch.zeros(2, 3, 4), r"shape \(2, 3, 4\); expected \(rows,\) or \(rows, positions\)"),
        ([2**63], "beyond|above"),
        (np.array([2**64 - 1], dtype=np.uint64), "above 2⁶³ − 1; give them as strings"),
        ([b"a", b"b"], "expected integers, floats, strings or booleans"),
    ],
)
def test_what_cannot_be_a_column(given, words):
    with pytest.raises(BatchError, match=f"'column'.*{words}|{words}.*'column'"):
        read(column=given)


def test_an_integer_beyond_64_bits():
    with pytest.raises(BatchError, match=r"'column'.*64 bits; give it as a string"):
        read(sample_id=[1], column=2**70)


def test_the_same_columns_each_time():
    first = read(sample_id=[1, 2], label=[0, 1]).columns
    assert read(first, label=[1], sample_id=[3]).rows == 1
    with pytest.raises(BatchError, match=r"\['label'\], but the first call had \['label', 'sample_id'\]"):
        read(first, label=[0, 1])
    with pytest.raises(BatchError, match=r"'label' was Int64 per row and is now Float64 per row. Keep one type"):
        read(first, sample_id=[1, 2], label=[0.5, 1.0])
    with pytest.raises(BatchError, match=r"'label' was Int64 per row and is now Int64 per position"):
        read(first, sample_id=[1, 2], label=[[0], [1]])


def test_a_scalar_and_an_array_are_the_same_column():
    first = read(sample_id=[1, 2], task="a").columns
    assert read(first, sample_id=[1, 2], task=["a", "b"]).rows == 2


def test_what_is_given_again_is_read_as_the_first_time():
    """… and nothing else is let through: the same errors, whatever came before."""
    ids, label = torch.tensor([3, 1]), torch.tensor([0, 7])
    first = read(sample_id=ids, label=label, task="a")
    again = read(first.columns, sample_id=ids, label=label, task="a")
    assert again.columns == first.columns
    assert again.rows == first.rows
    assert {n: np.asarray(v).tolist() for n, v in again.values.items()} == {
        n: np.asarray(v).tolist() for n, v in first.values.items()
    }
    ids += 1
    assert again.values["sample_id"].tolist() == [3, 1]
    good = {"sample_id": ids, "label": label, "task": "a"}
    assert read(first.columns, **{**good, "label": [4, 5], "task": ["a", "b"]}).values["label"].tolist() == [4, 5]
    for odd in (
        {"label": torch.tensor([1, 2, 3])},
        {"label": label.double()},
        {"label": label[:, None]},
        {"task": ids},
        {"task": 3},
        {"sample_id": "a", "label": "b"},
        {"more": ids},
    ):
        with pytest.raises(BatchError):
            read(first.columns, **{**good, **odd})
    with pytest.raises(BatchError):
        read(first.columns, sample_id=ids, task="a")
