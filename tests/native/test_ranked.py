import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.native import ranked
from dualform.native.kernels import kernels
from dualform.native.ranked import highest, reaching
from reference import ranking

compiled = pytest.mark.skipif(kernels() is None, reason="the loops in C are not compiled")
SCORES = st.lists(st.sampled_from([-torch.inf, -2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 3.0, torch.inf]), max_size=60)


@compiled
@given(scores=SCORES, groups=st.integers(1, 4), k=st.integers(1, 70))
def test_the_highest_of_each_group(scores, groups, k):
    codes = torch.arange(len(scores)) * 7 % 5 % groups
    found = highest(torch.tensor([scores], dtype=torch.float32), codes if groups > 1 else None, groups, k)
    assert len(found) == groups
    for group, places in enumerate(found):
        mine = torch.nonzero(codes == group)[:, 0]
        expected = ranking.top([scores[place] for place in mine], k)
        assert places.tolist() == mine[expected].tolist()


@compiled
def test_many_scores_and_few_are_wanted():
    generator = torch.Generator().manual_seed(0)
    scores, codes = torch.randn(1, 50_000, generator=generator), torch.randint(3, (50_000,), generator=generator)
    for some in (scores, scores.sort().values, scores.round(decimals=1)):
        for group, places in enumerate(highest(some, codes, 3, 40)):
            mine = torch.nonzero(codes == group)[:, 0]
            assert places.equal(mine[some[0, mine].sort(descending=True, stable=True).indices[:40]])


@compiled
def test_what_is_no_number_comes_first_as_when_sorted():
    scores = torch.tensor([[1.0, torch.inf, -torch.nan, 0.0, torch.nan]])
    assert highest(scores, None, 1, 3)[0].tolist() == scores.sort(descending=True, stable=True).indices[0, :3].tolist()


@compiled
def test_bounds_that_reach():
    bound = torch.tensor([[1.0, 2.0, -torch.inf, torch.nan, 0.0, -1.0]])
    least, codes = torch.tensor([[1.5, -torch.inf]]), torch.tensor([0, 0, 1, 0, 1, 0])
    assert reaching(bound, codes, least).tolist() == [False, True, True, True, True, False]
    assert reaching(bound, None, least[:, :1]).tolist() == [False, True, False, True, False, False]


def test_what_is_found_in_another_way(monkeypatch):
    scores, codes = torch.ones(1, 6), torch.arange(12)[::2] % 2
    for other in (scores.double(), scores.expand(2, 6), torch.ones(1, 12)[:, ::2]):
        assert highest(other, None, 1, 2) is None
        assert reaching(other, None, scores[:, :1]) is None
    assert highest(scores, None, 1, ranked.HELD + 1) is None
    assert highest(scores, torch.arange(12)[::2], 12, 2) is None
    assert reaching(scores, None, scores[:, :1].double()) is None
    monkeypatch.setattr(ranked, "kernels", lambda: None)
    assert highest(scores, codes, 2, 2) is None
    assert reaching(scores, codes, scores[:, :2]) is None
