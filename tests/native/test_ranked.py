import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.native import ranked
from dualform.native.kernels import kernels
from dualform.native.ranked import highest, joined, reaching
from reference import ranking

compiled = pytest.mark.skipif(kernels() is None, reason="the loops in C are not compiled")
SCORES = st.lists(st.sampled_from([-torch.inf, -2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 3.0, torch.inf]), max_size=60)


@compiled
@given(scores=SCORES, groups=st.integers(1, 4), k=st.integers(1, 70))
def test_the_highest_of_each_group(scores, groups, k):
    codes = (torch.arange(len(scores)) * 7 % 5 % groups).int()
    found = highest(torch.tensor([scores], dtype=torch.float32), codes if groups > 1 else None, groups, k)
    assert found.ordered().shape == (groups, k)
    last = found.ordered()[:, -1].tolist()
    assert found.least.equal(torch.tensor([-torch.inf if place < 0 else scores[place] for place in last]))
    assert found.ascending(len(scores)).equal(found.ordered()[found.ordered() >= 0].sort().values)
    for group, (places, count) in enumerate(zip(found.ordered(), found.counts, strict=True)):
        mine = torch.nonzero(codes == group)[:, 0]
        expected = ranking.top([scores[place] for place in mine], k)
        assert places[:count].tolist() == mine[expected].tolist()
        assert places[count:].tolist() == [-1] * (k - count)


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
        for group, (places, count) in enumerate(zip(found.ordered(), found.counts, strict=True)):
            mine = torch.nonzero(codes == group)[:, 0]
            assert places[:count].equal(mine[some[0, mine].sort(descending=True, stable=True).indices[:k]])


@compiled
@pytest.mark.parametrize("count", [3_000, 15_000, 60_000])
def test_many_of_many_groups(threads, count):
    """Fewer than are wanted; groups that are cut in turns, from one part or from several."""
    generator = torch.Generator().manual_seed(3)
    scores, codes = torch.randn(1, count, generator=generator), torch.randint(10, (count,), generator=generator).int()
    found = highest(scores, codes, 10, 400)
    for group, (places, many) in enumerate(zip(found.ordered(), found.counts, strict=True)):
        mine = torch.nonzero(codes == group)[:, 0]
        expected = mine[scores[0, mine].sort(descending=True, stable=True).indices[:400]]
        assert places[:many].equal(expected)
        assert found.least[group] == (scores[0, expected[-1]] if len(mine) >= 400 else -torch.inf)


@compiled
@pytest.mark.parametrize("groups", [1, 7, 16, 17])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 63, 64, 65, 4095, 4097, 100_003])
def test_bounds_that_reach_and_some_are_left_out(threads, count, groups):
    bound = torch.randn(1, count, generator=torch.Generator().manual_seed(1))
    codes, least = (torch.arange(count) % groups).int(), torch.linspace(-1, 1, groups)[None]
    passed = ~(bound[0] < least[0, codes])
    assert reaching(bound, codes, least).equal(torch.nonzero(passed)[:, 0])
    assert reaching(bound, None, least[:, :1]).equal(torch.nonzero(~(bound[0] < -1))[:, 0])
    for without in (torch.nonzero(passed)[::2, 0], torch.arange(0, count, 3), torch.arange(count), torch.arange(0)):
        expected = passed.clone()
        expected[without] = False
        assert reaching(bound, codes, least, without).equal(torch.nonzero(expected)[:, 0])


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("chosen", [[], [0], [0, 1, 2, 3, 4], [1, 3], [2, 3, 4], [4]])
def test_two_lists_as_one(queries, chosen, monkeypatch):
    places, scores = torch.tensor([2, 3, 5, 8, 9]), torch.randn(queries, 5)
    one = torch.zeros(5, dtype=torch.bool)
    one[chosen] = True
    for _ in range(2):  # in C, if there is one query, and without
        found, its = joined((places[one], scores[:, one]), (places[~one], scores[:, ~one]))
        assert found.equal(places)
        assert its.equal(scores)
        odd = torch.stack([places, places], 1)[:, 0], scores
        for some in (odd, (places.int(), scores)):  # not as the loop has them
            found, its = joined(some, (places[:0], scores[:, :0]))
            assert found.equal(some[0])
            assert its.equal(scores)
        monkeypatch.setattr(ranked, "kernels", lambda: None)


@compiled
def test_what_is_no_number_comes_first_as_when_sorted():
    scores = torch.tensor([[1.0, torch.inf, -torch.nan, 0.0, torch.nan]])
    assert (
        highest(scores, None, 1, 3).ordered()[0].tolist()
        == scores.sort(descending=True, stable=True).indices[0, :3].tolist()
    )
    many = scores.repeat(1, 20)
    assert highest(many, None, 1, 50).ordered()[0].equal(many.sort(descending=True, stable=True).indices[0, :50])
    assert highest(scores, None, 1, 2).least.isnan().all()
    assert highest(scores, None, 1, 3).least.tolist() == [torch.inf]


@compiled
def test_bounds_that_reach():
    bound = torch.tensor([[1.0, 2.0, -torch.inf, torch.nan, 0.0, -1.0]])
    least, codes = torch.tensor([[1.5, -torch.inf]]), torch.tensor([0, 0, 1, 0, 1, 0], dtype=torch.int32)
    assert reaching(bound, codes, least).tolist() == [1, 2, 3, 4]
    assert reaching(bound, None, least[:, :1]).tolist() == [1, 3]
    apart = least.repeat_interleave(3, 1)[:, ::3]  # what is needed is often a column of a table
    assert reaching(bound, codes, apart).tolist() == [1, 2, 3, 4]
    many, which, found = bound.repeat(1, 20), codes.repeat(20), torch.arange(120).reshape(20, 6)
    assert reaching(many, which, least).equal(found[:, 1:5].reshape(-1))  # several at once
    assert reaching(many, None, least[:, :1]).equal(found[:, [1, 3]].reshape(-1))
    assert reaching(many, which, least.fill_(torch.nan)).equal(torch.arange(120))


def test_what_is_found_in_another_way(monkeypatch):
    scores, codes = torch.ones(1, 6), torch.arange(6).int() % 2
    for other in (scores.double(), scores.expand(2, 6), torch.ones(1, 12)[:, ::2]):
        assert highest(other, None, 1, 2) is None
        assert reaching(other, None, scores[:, :1]) is None
    assert highest(scores, None, 1, ranked.HELD + 1) is None
    assert highest(scores, torch.arange(12).int()[::2], 12, 2) is None
    assert highest(scores, codes.long(), 2, 2) is None
    assert reaching(scores, None, scores[:, :1].double()) is None
    monkeypatch.setattr(ranked, "kernels", lambda: None)
    assert highest(scores, codes, 2, 2) is None
    assert reaching(scores, codes, scores[:, :2]) is None


@compiled
def test_a_sample_that_misleads(threads):
    """The scores that are looked at first, 16 of every 256, are far above the others."""
    scores = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(3))
    scores[:, torch.arange(100_000) % 256 < 16] += 20
    found = highest(scores, None, 1, 8000)
    assert found.ordered()[0].equal(scores[0].sort(descending=True, stable=True).indices[:8000])
