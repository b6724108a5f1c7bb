"""Segments: epochs found by counting, spread over the run, or as told."""

from itertools import pairwise

import pytest

from dualform.errors import QuestionError
from dualform.query.influence.segments import Segment, segments
from training import train


def pairs(found):
    return [(s.begin, s.end) for s in found]


def test_epochs_are_counted_by_samples(dual):
    """6 steps × 5 rows of 12 samples: about 3 epochs."""
    distinct = dual.rows["sample_id"].n_unique()
    expected = round(30 / distinct)
    found = segments(dual.store, 6)
    assert len(found) == expected
    assert (found[0].begin, found[-1].end) == (0, 6)
    assert all(a.end == b.begin and a.end_row == b.first_row for a, b in pairwise(found))
    assert found[-1].end_row == 30
    assert pairs(segments(dual.store, 6, sample="label")) == [
        (n, n + 1) for n in range(6)
    ]  # 4 labels: 8 epochs in 6 steps


def test_many_epochs_are_thinned_out_but_the_first_and_the_last_stay(dual):
    assert pairs(segments(dual.store, 6, 3, sample="label")) == [(0, 1), (2, 3), (5, 6)]
    assert pairs(segments(dual.store, 6, 1, sample="label")) == [(3, 4)]


def test_without_samples_the_run_is_cut_evenly(tmp_path):
    run = train(tmp_path / "run", steps=4)
    store = run.dual.store
    assert segments(store, 4, [(1, 3)]) == [Segment(1, 3, 5, 15, 2)]


def test_queries_are_asked_in_the_middle_or_at_a_snapshot_near_it(with_snapshots):
    store = with_snapshots.dual.store
    inside = [step for step in store.snapshot_steps() if 0 < step < 24]
    assert inside
    [found] = segments(store, 24, [(0, 24)])
    assert found.moment == min(inside, key=lambda step: abs(step - 12))
    free = next(step for step in range(1, 24) if step not in store.snapshot_steps())
    [found] = segments(store, 24, [(free, free + 1)])
    assert found.moment == free


@pytest.mark.parametrize("given", [[], [(2, 1)], [(0, 2), (1, 3)], [(0, 7)], [(3, 3)]])
def test_segments_that_make_no_sense(dual, given):
    with pytest.raises(QuestionError, match=r"expected \(begin, end\) pairs of steps from 0 to 6"):
        segments(dual.store, 6, given)


def test_other_bad_questions(dual):
    with pytest.raises(QuestionError, match="expected at least 1"):
        segments(dual.store, 6, 0)
    with pytest.raises(QuestionError, match=r"there is no such column per row\. Columns: sample_id, label, task"):
        segments(dual.store, 6, sample="id")
    with pytest.raises(QuestionError, match="nothing has an influence yet"):
        segments(dual.store, 0)
