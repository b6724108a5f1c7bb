import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score

from dualform.evaluate.ranks import auc, ranks, spearman

few = st.lists(st.integers(0, 5), min_size=3, max_size=12)


@given(few)
def test_equal_entries_share_their_rank(values):
    assert ranks(torch.tensor(values)).tolist() == (stats.rankdata(values) - 1).tolist()


@given(few, st.randoms(use_true_random=False))
def test_spearman_is_scipys(values, random):
    others = [random.randint(0, 5) for _ in values]
    mine = float(spearman(torch.tensor(values).double(), torch.tensor(others).double()))
    if len(set(values)) == 1 or len(set(others)) == 1:
        assert mine == 0
    else:
        assert mine == pytest.approx(stats.spearmanr(values, others).statistic, abs=1e-12)


@given(few, st.randoms(use_true_random=False))
def test_auc_is_sklearns(values, random):
    positive = [random.random() < 0.5 for _ in values]
    mine = auc(torch.tensor(values), torch.tensor(positive))
    if len(set(positive)) == 1:
        assert math.isnan(mine)
    else:
        assert mine == pytest.approx(roc_auc_score(positive, values))
