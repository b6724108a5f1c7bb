"""Best places and agreement beside full sorts and ranks that are written out."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualform_paper.language.rankings import agreement, order, overlooked, passages, rank_of

scores = st.lists(st.integers(-3, 3), min_size=1, max_size=30).map(lambda some: np.array(some, dtype=np.float64))


def ranked(some):
    """All positions, best first."""
    return sorted(range(len(some)), key=lambda place: (-some[place], place))


@given(scores, st.integers(0, 40))
def test_the_best_are_those_of_a_full_sort(some, k):
    assert order(some, k).tolist() == ranked(some)[:k]


@given(scores)
def test_a_rank_is_the_place_in_a_full_sort(some):
    assert [rank_of(some, place) for place in ranked(some)] == list(range(1, len(some) + 1))


@given(scores, st.integers(1, 5), st.integers(1, 4), st.lists(st.integers(0, 0), max_size=1))
def test_passages_are_taken_in_order_where_none_was_taken_near(some, k, apart, without):
    expected = []
    for place in ranked(some):
        if place not in without and all(abs(place - taken) >= apart for taken in expected):
            expected.append(place)
    assert passages(some, k, apart, without) == expected[:k]


@given(scores, st.data(), st.integers(1, 4), st.integers(1, 4))
def test_a_negative_example_is_the_best_far_from_all_that_is_attended(some, data, k, window):
    attention = np.array(data.draw(st.permutations(range(len(some)))), dtype=np.float64)
    attended = ranked(attention)[:k]
    far = [place for place in ranked(some) if all(abs(place - other) >= window for other in attended)]
    assert overlooked(some, attention, k, window) == (far[0] if far else None)
    assert overlooked(some, attention, k, window, without=far[:1]) == (far[1] if len(far) > 1 else None)


def average_ranks(some):
    return [sum(b < a for b in some) + (sum(b == a for b in some) + 1) / 2 for a in some]


def direct(one, other):
    """Spearman's: the correlation of average ranks."""
    x, y = (np.array(average_ranks(some)) - (len(one) + 1) / 2 for some in (one, other))
    return float((x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum()))


@given(st.data(), st.integers(2, 25), st.integers(1, 4))
def test_agreement_is_of_passages(data, count, length):
    one, other = (np.array(data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))) * 1.0 for _ in "ab")
    cut = [[max(s[i : i + length]) for i in range(0, count, length)] for s in (one.tolist(), other.tolist())]
    found = agreement(one, other, length, [1, 3])
    assert found.passages == len(cut[0])
    for k in (1, 3):
        assert found.overlap[k] == len(set(ranked(cut[0])[:k]) & set(ranked(cut[1])[:k])) / k
    if all(len(set(some)) > 1 for some in cut):
        assert found.correlation == pytest.approx(direct(*cut), abs=1e-12)
    else:
        assert math.isnan(found.correlation)


def test_a_ranking_agrees_with_itself_and_not_with_its_opposite():
    some = np.arange(20.0)
    assert agreement(some, some, 2, [2]).correlation == pytest.approx(1)
    opposite = agreement(some, -some, 2, [2])
    assert (opposite.correlation, opposite.overlap) == (pytest.approx(-1), {2: 0.0})
