from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.errors import AxisError
from dualform.layers.row_proof import coded_rows, moved_rows
from dualform.layers.rows import (
    FIRST,
    FOLLOWS_NOTHING,
    MIXING,
    ORDER,
    PLACES,
    ROWS_INSIDE,
    ROWS_OUTSIDE,
    SAME_AND_OF_ALL_ROWS,
    SHARED,
    Decision,
    Experiment,
    Layout,
    RowAxis,
    decide,
    fingerprints,
    reading_by_length,
    reading_of_batch_axis,
    reading_of_module,
    readings,
)


def numbered(*lead):
    """A tensor (*lead, 1) whose every vector says where it stands."""
    return torch.arange(torch.Size(lead).numel()).reshape(*lead, 1)


# Layouts


def test_rows_of_the_first_axis_stay_in_order():
    found = FIRST.layout((6, 2, 3), 6)
    assert (found.rows, found.positions) == (6, 6)
    assert found.slots(numbered(6, 2, 3)).flatten().tolist() == list(range(36))


def test_rows_of_the_second_axis():
    slots = RowAxis(1).layout((3, 6), 6).slots(numbered(3, 6)).reshape(6, 3)
    for row in range(6):
        assert slots[row].tolist() == [row, 6 + row, 12 + row]


@pytest.mark.parametrize(("holds", "first_row"), [(ROWS_OUTSIDE, [0, 1, 2]), (ROWS_INSIDE, [0, 4, 8])])
def test_a_flattened_axis_is_taken_apart(holds, first_row):
    found = RowAxis(0, holds).layout((12,), 4)
    assert found.slots(numbered(12))[:3].flatten().tolist() == first_row
    assert (found.rows, found.positions) == (4, 3)


def test_shared_vectors_belong_to_no_row():
    found = SHARED.layout((1, 5), 3)
    assert found.is_shared
    assert (found.rows, found.positions) == (1, 5)
    assert found.slots(numbered(1, 5)).flatten().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("where", "lead"), [(FIRST, (5,)), (RowAxis(1), (4,)), (RowAxis(0, ROWS_OUTSIDE), (10,)), (FIRST, ())]
)
def test_a_shape_that_cannot_be_read_this_way(where, lead):
    assert where.layout(lead, 4) is None


@pytest.mark.parametrize("lead", [(), (1,), (5,), (1, 1, 4), (4, 1)])
def test_a_single_row_owns_everything(lead):
    for where in (FIRST, SHARED, RowAxis(1)):
        found = where.layout(lead, 1)
        assert (found.rows, found.positions, found.is_shared) == (1, torch.Size(lead).numel(), False)
        assert found.slots(torch.zeros(*lead, 3)).shape == (torch.Size(lead).numel(), 3)


@pytest.mark.parametrize("lead", [(0,), (0, 7), (7, 0)])
def test_an_empty_batch_has_no_slots(lead):
    assert FIRST.layout(lead, 0).slots(torch.zeros(*lead, 3)).shape == (0, 3)


@given(lead=st.lists(st.integers(1, 4), min_size=1, max_size=3), axis=st.integers(0, 2))
def test_every_vector_is_a_slot_of_the_row_it_stands_in(lead, axis):
    axis %= len(lead)
    found = RowAxis(axis).layout(tuple(lead), lead[axis])
    slots = found.slots(numbered(*lead)).reshape(found.rows, found.positions)
    for row in range(found.rows):
        assert slots[row].tolist() == numbered(*lead).select(axis, row).flatten().tolist()


# What the user says


@pytest.mark.parametrize(
    ("lead", "axis", "expected"),
    [
        ((12,), 0, RowAxis(0, ROWS_OUTSIDE)),
        ((12,), 1, RowAxis(0, ROWS_INSIDE)),
        ((4, 4), 1, RowAxis(1)),
        ((12, 5), 0, RowAxis(0, ROWS_OUTSIDE)),
        ((4,), 0, FIRST),
    ],
)
def test_batch_axis_names_a_reading(lead, axis, expected):
    assert reading_of_batch_axis(lead, 4, axis, "x") == expected


def test_batch_axis_names_an_axis_that_is_not_there():
    with pytest.raises(AxisError, match=r"batch_axis=\{'x': 2\} names no leading axis.*\(4, 5, features\)"):
        reading_of_batch_axis((4, 5), 4, 2, "x")


def test_batch_axis_names_an_axis_of_another_length():
    with pytest.raises(AxisError, match=r"'x': 1.*length 5.*no multiple of the 4 rows"):
        reading_of_batch_axis((4, 5), 4, 1, "x")


@pytest.mark.parametrize(("told", "holds"), [(0, ROWS_OUTSIDE), (1, ROWS_INSIDE)])
def test_batch_axis_of_a_module_that_names_its_batch(told, holds):
    assert reading_of_module((7, 8), 4, 1, told) == RowAxis(1, holds)
    assert reading_of_module((7, 4), 4, 1, told) == RowAxis(1)


@pytest.mark.parametrize(
    ("lead", "axis", "expected"),
    [((4, 7), None, FIRST), ((7, 4), None, None), ((8,), None, None), ((7, 4), 1, RowAxis(1)), ((7, 8), 1, None)],
)
def test_by_length_only_the_first_axis_or_the_one_that_the_module_names(lead, axis, expected):
    assert reading_by_length(lead, 4, axis) == expected


# Experiments

PERMUTATION, REPLACEMENT, _ = moved_rows(4)


def values_of(lead):
    return np.random.default_rng(0).standard_normal(lead)


def moved(values, where, rows):
    """An input that follows its rows in this way, after they moved."""
    split = where.layout(values.shape, len(rows))
    if split.axis is None:
        return values
    return values.reshape(split.split).take(rows, axis=split.axis).reshape(values.shape)


def decided(lead, before, permuted, replaced, **settings):
    experiments = Experiment(PERMUTATION, permuted), [Experiment(REPLACEMENT, replaced)]
    return decide(readings(lead, 4), before, *experiments, **settings)


@pytest.mark.parametrize(
    ("lead", "where"),
    [
        ((4, 7), FIRST),
        ((7, 4), RowAxis(1)),
        ((4, 4), FIRST),
        ((4, 4), RowAxis(1)),
        ((12,), RowAxis(0, ROWS_OUTSIDE)),
        ((12,), RowAxis(0, ROWS_INSIDE)),
        ((16,), RowAxis(0, ROWS_OUTSIDE)),
        ((3, 8, 5), RowAxis(1, ROWS_INSIDE)),
        ((1, 7), SHARED),
        ((1, 4), SHARED),
        ((4,), SHARED),
        ((4, 4), SHARED),
    ],
)
def test_experiments_show_where_the_rows_are(lead, where):
    before = values_of(lead)
    found = decided(lead, before, moved(before, where, PERMUTATION), moved(before, where, REPLACEMENT))
    assert found == Decision(where)


def experiments_with_noise(rows, order, coded):
    """A variational autoencoder: random numbers are not permuted with the rows. order: the one that the model puts its rows into."""
    before, noise = np.random.default_rng(0).standard_normal((2, rows, 5))
    permutation, replacement, _ = moved_rows(rows)
    replacements = [replacement, *(coded_rows(rows) if coded else [])]
    permuted = Experiment(permutation, before[permutation][order] + noise)
    replaced = [Experiment(moved, before[moved][order] + noise) for moved in replacements]
    return decide(readings((rows, 5), rows), before[order] + noise, permuted, replaced)


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 9])
def test_noise_that_stays_in_place_needs_a_pattern_for_each_row(rows):
    order = np.arange(rows)
    assert experiments_with_noise(rows, order, coded=False).hidden_by == PLACES
    assert experiments_with_noise(rows, order, coded=True) == Decision(FIRST)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_noise_does_not_hide_another_order(rows):
    for order in permutations(range(rows)):
        found = experiments_with_noise(rows, list(order), coded=True)
        assert found.is_proved == (order == tuple(range(rows))), order


def test_noise_and_rows_that_depend_on_each_other_hide_everything():
    before, noise = np.random.default_rng(0).standard_normal((2, 4, 5))

    def mixed(order):
        return before[order] + noise - (before[order] + noise).mean(0)

    permuted = Experiment(PERMUTATION, mixed(PERMUTATION))
    replaced = [Experiment(order, mixed(order)) for order in (REPLACEMENT, *coded_rows(4))]
    assert decide(readings((4, 5), 4), mixed(np.arange(4)), permuted, replaced).hidden_by == MIXING


def test_a_row_in_all_places_does_not_look_like_rows_that_depend_on_each_other():
    """Replacing that row changes everything, replacing others changes nothing."""
    before = values_of((2, 5))
    permutation, replacement, _ = moved_rows(2)
    permuted = Experiment(permutation, before[permutation][[0, 0]])
    replaced = [Experiment(order, before[order][[0, 0]]) for order in (replacement, *coded_rows(2))]
    found = decide(readings((2, 5), 2), before[[0, 0]], permuted, replaced)
    assert (found.where, found.hidden_by) == (None, "")


@pytest.mark.parametrize("change", [lambda x: x[[1, 0, *range(2, 256)]], lambda x: x[[1, *range(1, 256)]]])
def test_few_rows_in_the_wrong_place_among_many(change):
    """Two of 256 rows swapped, or one that stands in the place of another."""
    before = values_of((256, 5))
    permutation, replacement, _ = moved_rows(256)
    permuted = Experiment(permutation, change(before[permutation]))
    replaced = Experiment(replacement, change(before[replacement]))
    assert decide(readings((256, 5), 256), change(before), permuted, [replaced]).where is None


def test_few_vectors_that_rounding_has_changed():
    """A mixture of experts may send a token elsewhere in another run."""
    before = values_of((256, 5))
    permutation, replacement, _ = moved_rows(256)
    permuted = before[permutation]
    permuted[7, 3] += 1
    found = decide(
        readings((256, 5), 256),
        before,
        Experiment(permutation, permuted),
        [Experiment(replacement, before[replacement])],
    )
    assert found == Decision(FIRST)


def test_noise_of_16_bits_everywhere():
    before = values_of((64, 5))
    permutation, replacement, _ = moved_rows(64)
    rounding = 3e-2 * np.random.default_rng(1).standard_normal((64, 5))
    permuted = Experiment(permutation, before[permutation] + rounding)
    replaced = Experiment(replacement, before[replacement])
    assert decide(readings((64, 5), 64), before, permuted, [replaced], is_coarse=True) == Decision(FIRST)
    assert decide(readings((64, 5), 64), before, permuted, [replaced]).where is None
    swapped = [1, 0, *range(2, 64)]
    permuted = Experiment(permutation, before[permutation][swapped] + rounding)
    assert decide(readings((64, 5), 64), before[swapped], permuted, [replaced], is_coarse=True).where is None


def test_rounding_that_a_normalisation_has_enlarged():
    """Features whose deviation is a thousandth of their mean or less: as a part of the deviation, float32 rounds a thousand times as much."""
    before = values_of((8,))
    permutation, replacement, _ = moved_rows(8)
    rounding = 1e-4 * np.random.default_rng(1).standard_normal((2, 8))
    permuted = Experiment(permutation, before[permutation] + rounding[0])
    replaced = Experiment(replacement, values_of((8,))[::-1] + rounding[1])
    assert decide(readings((8,), 8), before, permuted, [replaced]) == Decision(FIRST)
    swapped = Experiment(permutation, before[permutation][[1, 0, *range(2, 8)]] + rounding[0])
    assert decide(readings((8,), 8), before, swapped, [replaced]).where is None


def test_mostly_padding_is_read_along_the_only_axis_that_fits_all():
    """Sequence first, with one token that is not padding in each row: other readings fit nearly everywhere."""
    before = np.zeros((200, 4))
    before[0] = [1, 2, 3, 4]
    found = decided((200, 4), before, before[:, PERMUTATION], before[:, REPLACEMENT])
    assert found == Decision(RowAxis(1))


def test_rows_that_depend_on_each_other():
    """A batch normalisation: replacing a row changes all of them."""
    before = values_of((4, 5))
    replaced = before[REPLACEMENT] - before[REPLACEMENT].mean(0)
    found = decided((4, 5), before - before.mean(0), before[PERMUTATION] - before.mean(0), replaced)
    assert found == Decision(FIRST)


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_rows_in_another_order_have_no_names(rows):
    """Whatever that order is, even if it commutes with our permutation."""
    before = values_of((rows, 7))
    permutation, replacement, _ = moved_rows(rows)
    for order in map(list, permutations(range(rows))):
        permuted = Experiment(permutation, before[permutation][order])
        replaced = Experiment(replacement, before[replacement][order])
        found = decide(readings((rows, 7), rows), before[order], permuted, [replaced])
        assert found.where == (FIRST if order == list(range(rows)) else None), order
        coded = [Experiment(moved, before[moved][order]) for moved in coded_rows(rows)]
        found = decide(readings((rows, 7), rows), before[order], permuted, [replaced, *coded])
        assert found.where == (FIRST if order == list(range(rows)) else None), order
        assert found.hidden_by == "", order


def test_sorted_vectors_have_no_names():
    before = values_of((4, 2))
    flat = [np.sort(values.reshape(-1)) for values in (before, before[PERMUTATION], before[REPLACEMENT])]
    assert decided((8,), *flat).where is None


@pytest.mark.parametrize(("lead", "expected"), [((4, 7), FIRST), ((1, 4), SHARED), ((4, 4), FIRST), ((8,), SHARED)])
def test_equal_vectors_prove_nothing(lead, expected):
    """Token types are all 0. The first axis may then be taken by its length, another one never."""
    same = np.ones(lead)
    found = decided(lead, same, same, same)
    assert (found.where, found.is_proved) == (expected, False)
    assert "same for all rows" in found.why


def test_vectors_that_follow_no_axis():
    """A mixture of experts sends vectors of any row to any place."""
    random = np.random.default_rng(0)
    found = decided((8,), *random.standard_normal((3, 8)))
    assert found.where is None
    assert "does not follow the rows" in found.why


def test_small_differences_between_rows_beside_large_ones_between_positions():
    before = 1e-2 * values_of((4, 4)) + 100 * np.arange(4)
    assert decided((4, 4), before, before[PERMUTATION], before[REPLACEMENT]) == Decision(FIRST)


def test_fingerprints_are_shaped_like_the_leading_axes():
    assert fingerprints(torch.randn(2, 3, 7), 2).shape == (2, 3)
    assert fingerprints(torch.randn(2, 3, 7), 1).shape == (2,)
    assert fingerprints(torch.arange(6).reshape(2, 3, 1), 2).tolist() == [[0, 1, 2], [3, 4, 5]]
    one = torch.randn(1, 7)
    assert len(set(fingerprints(one.repeat(4, 1), 1).tolist())) == 1


def test_fingerprints_do_not_depend_on_the_default_type():
    """They use a random vector that is kept: it must not have the type of its first use."""
    features = 1234  # of no other test
    torch.set_default_dtype(torch.float64)
    try:
        first = fingerprints(torch.ones(2, features), 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert fingerprints(torch.ones(2, features), 1).tolist() == first.tolist()


def test_fingerprints_of_equal_vectors_are_equal_even_if_the_product_cancels():
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 150, generator=generator)
    first, second = fingerprints(torch.stack([one, other]), 1)
    cancelling = one - float(0.9999 * first / second) * other
    numbers = fingerprints(cancelling.repeat(7, 1), 1)
    assert np.ptp(numbers) <= 1e-9 * np.abs(numbers).max()


def test_a_layout_has_rows_and_positions():
    assert (Layout((4, 3), 0).rows, Layout((4, 3), 0).positions) == (4, 3)


def test_two_rows_that_depend_on_each_other_beside_a_vector_of_zeros():
    """Behind a batch normalisation and a ReLU: if a row is replaced by the other one, both become zero."""
    before = np.array([0.0, 0.17])
    permuted = Experiment(np.array([1, 0]), np.array([0.17, 0.0]))
    replaced = Experiment(np.array([1, 1]), np.array([0.0, 0.0]))
    assert decide(readings((2,), 2), before, permuted, [replaced]) == Decision(FIRST)


def test_two_rows_that_depend_on_each_other_look_like_two_rows_swapped():
    """Behind a batch normalisation, a ReLU and a bias: one replaced row cannot tell them from rows in another order, two can."""
    before = np.array([0.3, 0.6])
    permutation, replacement, _ = moved_rows(2)
    permuted = Experiment(permutation, before[permutation])
    first = Experiment(replacement, np.array([0.3, 0.3]))
    assert decide(readings((2,), 2), before, permuted, [first]).hidden_by == ORDER

    mixed = [Experiment(order, np.array([0.3, 0.3])) for order in coded_rows(2)]
    assert decide(readings((2,), 2), before, permuted, [first, *mixed]).hidden_by == MIXING

    swapped = [Experiment(order, before[::-1][order][::-1]) for order in coded_rows(2)]
    assert decide(readings((2,), 2), before, permuted, [first, *swapped]) == Decision(None, FOLLOWS_NOTHING)


def test_rows_that_a_normalisation_has_made_equal_are_left_to_evaluation_mode():
    """Two rows with equal normalised values: permuting them changes nothing, replacing one of them changes both."""
    before = np.array([0.5, 0.5])
    permuted = Experiment(np.array([1, 0]), before)
    replaced = Experiment(np.array([1, 1]), np.array([-0.3, -0.3]))
    decision = decide(readings((2,), 2), before, permuted, [replaced])
    assert decision == Decision(None, SAME_AND_OF_ALL_ROWS, hidden_by=MIXING, may_differ=True)
