import pytest
import torch
from scipy import stats

from dualform.evaluate.lds import Truth


def truth(repeats=2, noise=0.0, subsets=40, samples=30, examples=6, seed=0):
    """Outcomes that really are sums of weights of the kept samples, and noise; the weights come with it."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(examples, samples, generator=generator, dtype=torch.float64)
    kept = torch.rand(subsets, samples, generator=generator) < 0.5
    clean = kept.double() @ weights.T
    outcomes = clean + noise * torch.randn(repeats, subsets, examples, generator=generator, dtype=torch.float64)
    return weights, Truth(kept, outcomes)


def test_it_is_the_mean_over_examples_of_spearmans_correlation_over_subsets():
    weights, known = truth(noise=3)
    scores = weights + torch.randn(weights.shape, generator=torch.Generator().manual_seed(5))
    expected = []
    for example, row in enumerate(scores):
        foretold = [float(row[kept].sum()) for kept in known.kept]
        outcome = [float(known.outcomes[:, subset, example].mean()) for subset in range(len(known.kept))]
        expected.append(stats.spearmanr(foretold, outcome).statistic)
    found = known.lds(scores)
    assert found.by_example.tolist() == pytest.approx(expected, abs=1e-12)
    assert found.interval.value == pytest.approx(sum(expected) / len(expected), abs=1e-12)
    assert found.interval.low < found.interval.value < found.interval.high


def test_the_true_weights_reach_1_and_their_opposite_reaches_minus_1():
    weights, known = truth()
    assert known.lds(weights).interval.value == pytest.approx(1)
    assert known.lds(-weights).interval.value == pytest.approx(-1)
    assert known.lds(torch.ones_like(weights)).interval.value < 0.5
    assert known.ceiling() == pytest.approx(1)


@pytest.mark.parametrize("noise", [2.0, 5.0])
def test_the_ceiling_is_what_the_truth_itself_scores(noise):
    weights, known = truth(repeats=3, noise=noise, subsets=300, samples=60, examples=40)
    assert known.lds(weights).interval.value == pytest.approx(known.ceiling(), abs=0.02)


def test_without_repetitions_the_ceiling_is_unknown():
    assert truth(repeats=1)[1].ceiling() is None


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    inside = 0
    for seed in range(60):
        weights, known = truth(repeats=1, noise=5, subsets=50, examples=20, seed=seed)
        found = known.lds(weights).interval
        inside += found.low <= 0.452 <= found.high  # the mean over many draws of this world
    assert inside >= 50


def test_a_ratio_of_views_has_an_interval_of_its_own():
    weights, known = truth(noise=2)
    good, bad = known.lds(weights), known.lds(weights + 2 * torch.randn_like(weights))
    assert good.ratio(good).low == good.ratio(good).high == 1
    assert bad.ratio(good).value < bad.ratio(good).high < 1
