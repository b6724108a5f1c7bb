import math

import pytest
import torch

from dualform.evaluate.bm25 import K1, B, bm25


def test_scores_are_those_of_the_formula():
    passages = [[0, 1, 1, 2], [3, 4, 5, 6], [0, 0, 0, 7]]
    query = [0, 1, 1]
    found = bm25(torch.tensor([query]), torch.tensor(passages))
    for passage, score in zip(passages, found[0].tolist(), strict=True):
        expected = 0.0
        for word in query:
            having = sum(word in other for other in passages)
            count = passage.count(word)
            rarity = math.log(1 + (len(passages) - having + 0.5) / (having + 0.5))
            expected += rarity * count / (count + K1 * (1 - B + B * len(passage) / 4))
        assert score == pytest.approx(expected)
