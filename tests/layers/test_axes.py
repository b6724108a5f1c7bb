import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.errors import AxisError
from dualform.layers.axes import Layout, flattened_from, layout, tensors_in


def numbered(*lead):
    """A tensor (*lead, 1) whose every vector says where it stands."""
    return torch.arange(torch.Size(lead).numel()).reshape(*lead, 1)


def test_a_plain_batch():
    assert layout((6,), 6, layer="x") == Layout((6,), 0)


def test_any_leading_dimensions_the_rows_come_first():
    found = layout((6, 2, 3), 6, layer="x")
    assert (found.rows, found.positions) == (6, 6)
    assert found.slots(numbered(6, 2, 3)).flatten().tolist() == list(range(36))


def test_sequence_first_gets_the_rows_of_the_second_axis():
    found = layout((3, 6), 6, layer="x")
    slots = found.slots(numbered(3, 6)).reshape(6, 3)
    for row in range(6):
        assert slots[row].tolist() == [row, 6 + row, 12 + row]


def test_two_axes_that_fit_ask():
    with pytest.raises(
        AxisError, match=r"'x'.*shape \(6, 6, features\).*6 rows.*0 and 1 both fit.*batch_axis=\{'x': 0\}"
    ):
        layout((6, 6), 6, layer="x")


def test_no_axis_that_fits_asks():
    with pytest.raises(AxisError, match=r"'x'.*\(4, 5, features\).*6 rows.*no axis has that.*batch_axis=\{'x': 0\}"):
        layout((4, 5), 6, layer="x")


def test_one_row_needs_no_choice():
    found = layout((1, 1, 4), 1, layer="x")
    assert (found.rows, found.positions) == (1, 4)


def test_a_single_vector_is_one_row():
    found = layout((), 1, layer="x")
    assert (found.rows, found.positions) == (1, 1)
    assert found.slots(torch.ones(3)).shape == (1, 3)


def test_a_single_vector_for_many_rows_asks():
    with pytest.raises(AxisError, match=r"single vector.*6 rows.*recorder\.batch\(\)"):
        layout((), 6, layer="x")


def test_flattened_rows_by_positions_with_evidence():
    assert layout((12,), 4, layer="x", evidence=(0,)) == Layout((4, 3), 0)


@pytest.mark.parametrize("evidence", [[], [None], [1], [0, 1]])
def test_flattened_without_clear_evidence_asks(evidence):
    with pytest.raises(
        AxisError, match=r"12 vectors, but batch\(\) announced 4 rows.*batch_axis=\{'x': 0\}.*batch_axis=\{'x': 1\}"
    ):
        layout((12,), 4, layer="x", evidence=tuple(evidence))


@pytest.mark.parametrize(("axis", "first_row"), [(0, [0, 1, 2]), (1, [0, 4, 8])])
def test_flattened_as_told(axis, first_row):
    found = layout((12,), 4, layer="x", axis=axis)
    assert found.slots(numbered(12))[:3].flatten().tolist() == first_row
    assert (found.rows, found.positions) == (4, 3)


@pytest.mark.parametrize(("axis", "place"), [(0, 0), (1, 1), (-2, 1), (-3, 0)])
def test_as_told_counts_as_the_user_sees_it(axis, place):
    assert layout((6, 6), 6, layer="x", axis=axis) == Layout((6, 6), place)


def test_as_told_takes_a_flattened_axis_apart():
    found = layout((12, 5), 4, layer="x", axis=0)
    assert (found.rows, found.positions) == (4, 15)


@pytest.mark.parametrize("axis", [2, 3, -1, -4])
def test_as_told_but_there_is_no_such_axis(axis):
    with pytest.raises(AxisError, match=r"names no leading axis.*\(4, 5, features\)"):
        layout((4, 5), 4, layer="x", axis=axis)


def test_as_told_but_the_length_does_not_fit():
    with pytest.raises(AxisError, match=r"'x': 1.*length 5.*no multiple of the 4 rows"):
        layout((4, 5), 4, layer="x", axis=1)


@given(lead=st.lists(st.integers(1, 4), min_size=1, max_size=3), axis=st.integers(0, 2))
def test_every_vector_is_a_slot_of_the_row_it_stands_in(lead, axis):
    axis %= len(lead)
    found = layout(tuple(lead), lead[axis], layer="x", axis=axis)
    slots = found.slots(numbered(*lead)).reshape(found.rows, found.positions)
    for row in range(found.rows):
        assert slots[row].tolist() == numbered(*lead).select(axis, row).flatten().tolist()


def test_an_empty_batch_has_no_slots():
    found = layout((0,), 0, layer="x")
    assert found.slots(torch.zeros(0, 3)).shape == (0, 3)


def test_a_view_shows_what_it_was_flattened_from():
    batch_first, sequence_first = torch.zeros(4, 3, 5), torch.zeros(3, 4, 5)
    assert flattened_from(batch_first.reshape(12, 5), 4) == 0
    assert flattened_from(sequence_first.reshape(12, 5), 4) == 1


def test_no_view_no_evidence():
    assert flattened_from(torch.zeros(12, 5), 4) is None
    assert flattened_from(torch.zeros(4, 4, 5).reshape(16, 5), 4) is None  # two axes fit
    assert flattened_from(torch.zeros(4, 3, 5).transpose(0, 1).reshape(12, 5), 4) is None  # copied


def test_a_transposed_view_is_no_evidence_for_the_order_it_lost():
    same_memory = torch.zeros(4, 3, 5)[:, :1].transpose(0, 1).reshape(4, 5)
    assert flattened_from(same_memory, 4) is None


def test_tensors_are_found_in_arguments_of_any_shape():
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    assert [id(t) for t in tensors_in(((a, [b]), {"c": c, "d": 3}))] == [id(a), id(b), id(c)]
