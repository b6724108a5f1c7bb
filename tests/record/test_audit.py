import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.record.audit import (
    COARSE_SLACK,
    Share,
    Verdict,
    explain,
    explain_by_others,
    likely_factors,
    share_factors,
    shared_factors,
)

ROUNDOFF = 2.0**-53
random = np.random.default_rng(0)


def passes(count, size=20):
    return [random.standard_normal(size) for _ in range(count)]


def share(before, added):
    return Share(before, added, float(np.abs(added).sum()))


def test_a_single_pass_left_as_it_is():
    (g,) = passes(1)
    verdict = explain([share(None, g)], g, ROUNDOFF)
    assert verdict.explained
    assert verdict.factors == [1.0]
    assert verdict.residual == 0.0


@given(st.floats(1e-6, 1e6))
def test_clipping_is_one_number(factor):
    (g,) = passes(1)
    verdict = explain([share(None, g)], factor * g, ROUNDOFF)
    assert verdict.explained
    assert verdict.determined
    assert verdict.factors == pytest.approx([factor], rel=1e-14)


def test_accumulation():
    a, b, c = passes(3)
    verdict = explain([share(None, a), share(a, b), share(a + b, c)], 0.5 * (a + b + c), ROUNDOFF)
    assert verdict.explained
    assert verdict.factors == pytest.approx([0.5, 0.5, 0.5])


def test_scaled_in_between():
    a, b = passes(2)
    verdict = explain([share(None, a), share(0.25 * a, b)], 0.25 * a + b, ROUNDOFF)
    assert verdict.explained
    assert verdict.factors == pytest.approx([0.25, 1.0])


@pytest.mark.parametrize("zeroed", [None, np.zeros(20)])
def test_zeroed_in_between_drops_the_slots_before(zeroed):
    a, b = passes(2)
    verdict = explain([share(None, a), share(zeroed, b)], b, ROUNDOFF)
    assert verdict.explained
    assert verdict.factors == [0.0, 1.0]


def test_a_pass_whose_gradient_is_zero_is_not_taken_for_thrown_away():
    a, _ = passes(2)
    nothing = np.zeros(20)
    verdict = explain([share(None, nothing), share(nothing, a)], a, ROUNDOFF)
    assert verdict.explained
    assert verdict.factors == [1.0, 1.0]


def test_gradients_kept_aside_and_put_together_again():
    a, b = passes(2)
    verdict = explain([share(None, a), share(None, b)], 0.3 * a + 0.7 * b, ROUNDOFF)
    assert verdict.explained
    assert verdict.factors == pytest.approx([0.3, 0.7])


def test_noise_is_not_explained():
    (g,) = passes(1)
    verdict = explain([share(None, g)], g + 1e-6 * random.standard_normal(20), ROUNDOFF)
    assert not verdict.explained
    assert 1e-7 < verdict.residual < 1e-5


def test_a_gradient_from_nowhere_is_not_explained():
    verdict = explain([], np.ones(20), ROUNDOFF)
    assert not verdict.explained
    assert verdict.residual == 1.0


def test_nothing_to_explain():
    verdict = explain([], np.zeros(20), ROUNDOFF)
    assert verdict.explained
    assert verdict.factors == []


def test_rounding_is_explained():
    a, b = passes(2)
    seen = (a + b).astype(np.float32).astype(np.float64)
    assert explain([share(None, a), share(a, b)], seen, 2.0**-24).explained


def test_rounding_noise_has_no_factor_of_its_own():
    terms = np.full(20, 1e-17)
    verdict = explain([Share(None, terms, 1.0)], 3 * terms, ROUNDOFF)
    assert verdict.explained
    assert not verdict.determined


def test_what_is_not_finite_proves_nothing_and_stops_nothing():
    (g,) = passes(1)
    verdict = explain([share(None, g)], np.full(20, np.nan), ROUNDOFF)
    assert verdict.explained
    assert not verdict.determined
    assert np.isnan(verdict.residual)


def test_noise_before_a_pass_is_not_taken_for_scaling():
    """Passes whose sum is hardly more than its rounding: what was in .grad before differs from it by as much."""
    a, b = passes(2)
    scale = float(np.abs(a).sum()) / (64 * ROUNDOFF) / 20
    before = a + 0.5 * random.standard_normal(20)
    shares = [Share(None, a, scale), Share(before, b, scale)]
    assert explain(shares, before + b, ROUNDOFF, last_factor=1.0).factors == [1.0, 1.0]


def test_similar_passes_do_not_explain_another_gradient_by_huge_factors():
    (a,) = passes(1, size=8)
    b, c = a + 1e-6 * random.standard_normal((2, 8))
    shares = [share(None, a), share(a, b), share(a + b, c)]
    seen = a + b + c
    assert explain(shares, seen, 2.0**-24).explained
    seen[0] *= 1.01
    assert not explain(shares, seen, 2.0**-24).explained


def test_a_poorly_known_factor_gives_way_to_a_well_known_one():
    factors = np.array([0.25, 0.2501, 0.26, 0.5, 0.2501])
    signals = np.array([1e6, 1e2, 1e2, 1e2, 1e5])
    # The third and fourth contradict the first beyond their uncertainty; the last one knows its own nearly as well
    assert shared_factors(factors, signals).tolist() == [0.25, 0.25, 0.26, 0.5, 0.2501]


def coarse_share(added):
    unit = torch.finfo(torch.bfloat16).eps / 2
    size = float(np.linalg.norm(added))
    return Share(None, added, size, coarse=COARSE_SLACK * unit * size)


def test_the_rounding_of_a_single_number_is_no_factor():
    """One entry is nearly the whole gradient, so that a factor takes up its rounding to 16 bits, and nothing remains."""
    added = np.array([24.0, 1e-3, 1e-3, 1e-3])
    assert explain([coarse_share(added)], 0.9976 * added, 2.0**-24).factors == [1.0]
    many = np.full(1000, 1.0)
    [factor] = explain([coarse_share(many)], 0.9976 * many, 2.0**-24).factors
    assert factor == pytest.approx(0.9976)


def test_what_a_factor_may_have_taken_up_is_part_of_the_residual():
    """Clipped to half its size: rounding to 16 bits is in the factor, and may be as much as a roundoff of the one number that tells it."""
    added = np.array([24.0, 1e-3, 1e-3, 1e-3])
    verdict = explain([coarse_share(added)], 0.4988 * added, 2.0**-24)
    assert verdict.residual == pytest.approx(2.0**-8 / math.sqrt(3), rel=0.01)
    many = np.full(10_000, 1.0)
    verdict = explain([coarse_share(many)], 0.4988 * many, 2.0**-24)
    assert verdict.residual == pytest.approx(2.0**-8 / math.sqrt(3) / 100, rel=0.01)


def test_of_likely_factors_one_that_explains_next_to_nothing_is_not_taken():
    """The bound on rounding is above the whole gradient, so that any factor would explain it."""
    (added,) = passes(1)
    share = Share(None, added, 1.0, coarse=10 * float(np.linalg.norm(added)))
    assert explain_by_others([share], 0.003 * added, ROUNDOFF, [1.0, 0.00301]).factors == [0.00301]
    another_rounding = 0.7 * random.standard_normal(20)
    assert explain_by_others([share], another_rounding, ROUNDOFF, [1.0, 0.001]).factors == [1.0]
    assert not explain_by_others([share], 1e3 * added, ROUNDOFF, [1.0, 0.5]).explained


def test_factors_that_16_bits_do_not_tell_apart_are_one():
    verdicts = [Verdict([factor], 0.0, explained=True, signal=30.0) for factor in (1.002, 0.998, 0.5, 0.501)]
    assert likely_factors(verdicts) == [1.002, 0.5]


def test_shared_factors_of_several_passes():
    sure = Verdict([0.5], 0.0, explained=True, signal=1e6)
    unsure = Verdict([0.2502, 0.5004], 0.0, explained=True, signal=1e2)
    share_factors([sure, unsure])
    assert unsure.factors == pytest.approx([0.25, 0.5], rel=1e-12)


def test_likely_factors_are_those_of_other_gradients_and_one():
    verdicts = [
        Verdict([0.5], 0.0, explained=True, signal=10.0),
        Verdict([0.25], 0.0, explained=True, signal=1e3),
        Verdict([7.0], 0.0, explained=False, signal=1e6),
        Verdict([8.0], 0.0, explained=True, signal=1e-3),
    ]
    assert likely_factors(verdicts) == [0.25, 0.5, 1.0]
