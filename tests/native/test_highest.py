import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.native import highest as module
from dualform.native.highest import highest
from dualform.native.kernels import kernels
from reference import ranking

compiled = pytest.mark.skipif(kernels() is None, reason="the loops in C are not compiled")
SCORES = st.lists(st.sampled_from([-torch.inf, -2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 3.0, torch.inf]), max_size=60)


@compiled
@given(scores=SCORES, groups=st.integers(1, 4), k=st.integers(1, 70))
def test_the_highest_of_each_group(scores, groups, k):
    codes = (torch.arange(len(scores)) * 7 % 5 % groups).int()
    found = highest(torch.tensor([scores], dtype=torch.float32), codes if groups > 1 else None, groups, k)
    assert len(found) == groups
    for group, [places] in enumerate(found):
        mine = torch.nonzero(codes == group)[:, 0]
        expected = ranking.top([scores[place] for place in mine], k)
        assert places.tolist() == mine[expected].tolist()


@compiled
@pytest.mark.parametrize("k", [1, 40, 30_000])
def test_many_scores_and_few_are_wanted(threads, k):
    generator = torch.Generator().manual_seed(0)
    scores, codes = (
        torch.randn(1, 100_000, generator=generator),
        torch.randint(2, (100_000,), generator=generator).int(),
    )
    codes[:90_000][codes[:90_000] == 1] = 0  # one of them is found by the last thread alone
    for some in (scores, scores.sort().values, scores.round(decimals=1)):
        found = highest(some, codes, 2, k)
        for group, [places] in enumerate(found):
            mine = torch.nonzero(codes == group)[:, 0]
            assert places.equal(mine[some[0, mine].sort(descending=True, stable=True).indices[:k]])


@compiled
@pytest.mark.parametrize("count", [3_000, 15_000, 60_000])
def test_many_of_many_groups(threads, count):
    """Fewer than are wanted; groups that are cut in turns, from one part or from several."""
    generator = torch.Generator().manual_seed(3)
    scores, codes = torch.randn(1, count, generator=generator), torch.randint(10, (count,), generator=generator).int()
    found = highest(scores, codes, 10, 400)
    for group, [places] in enumerate(found):
        mine = torch.nonzero(codes == group)[:, 0]
        assert places.equal(mine[scores[0, mine].sort(descending=True, stable=True).indices[:400]])


@compiled
def test_what_is_no_number_comes_first_as_when_sorted():
    scores = torch.tensor([[1.0, torch.inf, -torch.nan, 0.0, torch.nan]])
    for some, k in ((scores, 3), (scores.repeat(1, 20), 50)):
        [found] = highest(some, None, 1, k)
        assert found.equal(some.sort(descending=True, stable=True).indices[:, :k])


def test_what_the_loop_does_not_take(monkeypatch):
    scores, codes = torch.ones(1, 6), torch.arange(6).int() % 2
    for other in (scores.double(), scores.expand(2, 6), torch.ones(1, 12)[:, ::2]):
        assert highest(other, None, 1, 2) is None
    assert highest(scores, None, 1, module.MOST_HELD + 1) is None
    assert highest(scores, torch.arange(12).int()[::2], 12, 2) is None
    assert highest(scores, codes.long(), 2, 2) is None
    monkeypatch.setattr(module, "kernels", lambda: None)
    assert highest(scores, codes, 2, 2) is None


@compiled
def test_a_sample_that_misleads(threads):
    """The scores that are looked at first, 16 of every 256, are far above the others."""
    scores = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(3))
    scores[:, torch.arange(100_000) % 256 < 16] += 20
    found = highest(scores, None, 1, 8000)
    assert found[0].equal(scores.sort(descending=True, stable=True).indices[:, :8000])
