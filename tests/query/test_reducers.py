from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dualform.query.ranking import rank_keys
from dualform.query.reducers import TopK
from reference import ranking


@given(
    scores=hnp.arrays(
        np.float64,
        st.tuples(st.integers(0, 4), st.integers(0, 30)),
        elements=st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 7.0]),  # many ties
    ),
    k=st.integers(1, 12),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    order=st.sampled_from(["highest", "lowest", "absolute"]),
)
def test_the_best_of_a_stream_are_those_of_a_full_sort(scores, k, cuts, order):
    count = scores.shape[1]
    edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
    best = TopK(len(scores), k, order, torch.float64)
    merged = best.empty()
    for low, high in pairwise(edges):
        piece = torch.from_numpy(scores[:, low:high])
        best.insert(torch.arange(low, high), piece)
        part = best.empty()
        part.insert(torch.arange(low, high), piece)
        merged.merge(part)
    for row in range(len(scores)):
        expected = ranking.top(rank_keys(torch.from_numpy(scores[row]), order).tolist(), k)
        for found in (best.ranking, merged.ranking):
            assert found.slots[row].tolist() == expected
            assert found.scores[row].tolist() == scores[row, expected].tolist()


def test_infinite_scores_are_scores():
    best = TopK(1, 2, "highest", torch.float64)
    best.insert(torch.arange(4), torch.tensor([[1.0, float("inf"), float("-inf"), float("inf")]]).double())
    assert best.ranking.slots.tolist() == [[1, 3]]
