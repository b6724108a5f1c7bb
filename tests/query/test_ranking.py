from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dualform.query.ranking import Best
from reference import ranking


@given(
    scores=hnp.arrays(
        np.float64,
        st.tuples(st.integers(0, 4), st.integers(0, 30)),
        elements=st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 7.0]),  # many ties
    ),
    k=st.integers(1, 12),
    cuts=st.lists(st.integers(0, 30), max_size=4),
)
def test_the_best_of_a_stream_are_those_of_a_full_sort(scores, k, cuts):
    count = scores.shape[1]
    edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
    best = Best(len(scores), k, torch.float64)
    for low, high in pairwise(edges):
        piece = torch.from_numpy(scores[:, low:high])
        best.add(piece, torch.arange(low, high), -piece)
    for row in range(len(scores)):
        expected = ranking.top(scores[row].tolist(), k)
        assert best.numbers[row].tolist() == expected
        assert best.scores[row].tolist() == scores[row, expected].tolist()
        assert best.values[row].tolist() == (-scores[row, expected]).tolist()


def test_infinite_scores_are_scores():
    best = Best(1, 2, torch.float64)
    best.add(
        torch.tensor([[1.0, float("inf"), float("-inf"), float("inf")]]).double(), torch.arange(4), torch.ones(1, 4)
    )
    assert best.numbers.tolist() == [[1, 3]]
