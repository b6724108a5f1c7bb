"""Adam's update in one compiled pass against the plain way, in float64 and in whole replays."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dualform
from dualform.dual import replay
from dualform.dual.coefficients import updates_of
from dualform.dual.replay import Moment, forward, step_on
from dualform.native.kernels import kernels
from dualform.query.conditions import Condition
from dualform.recursions import KINDS, adam_numbers

compiled = pytest.mark.skipif(kernels() is None, reason="the loops in C are not compiled")
ADAMW = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "decoupled": 1.0,
    "maximize": 0.0,
    "amsgrad": 0.0,
    "count": 3.0,
}


def drawn(shape, seed, spread=0.0):
    """A moment, the gradient and the kept part of it; spread: in powers of ten."""
    make = torch.Generator().manual_seed(seed)

    def matrix():
        return torch.randn(shape, generator=make) * 10 ** (spread * torch.randn(shape, generator=make))

    now = Moment(matrix(), matrix(), {"exp_avg_sq": matrix() ** 2, "max_exp_avg_sq": torch.zeros(shape)})
    return now, matrix(), matrix()


def on(now, settings, full, kept, kind="adam"):
    return replay._adam_in_one_pass(KINDS[kind], settings, now, full, kept)


@compiled
@given(
    shape=st.tuples(st.integers(0, 5), st.integers(1, 40)),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0.0, 1.0, 3.0]),
    lr=st.floats(1e-4, 0.5),
    beta1=st.sampled_from([0.6, 0.9, 0.99]),
    beta2=st.sampled_from([0.5, 0.99, 0.999]),
    eps=st.sampled_from([1e-8, 1e-4, 0.1]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.3]),
    count=st.sampled_from([1, 2, 1000]),
)
def test_one_pass_is_the_plain_update(shape, seed, spread, **some):
    settings = {**ADAMW, **{name: float(value) for name, value in some.items()}}
    now, full, kept = drawn(shape, seed, spread)
    weight, average = now.weight.double(), now.average.double()
    exact = Moment(weight.clone(), average.clone(), {name: t.double() for name, t in now.shared.items()})
    step_on(exact, KINDS["adam"], settings, full.double(), walk=False).apply(exact.weight, exact.average, kept.double())
    assert on(now, settings, full, kept)
    squares, (size, eps) = exact.shared["exp_avg_sq"], adam_numbers(settings)
    terms = average.abs() + kept.double().abs()
    for mine, theirs, bound in (
        (now.shared["exp_avg_sq"], squares, squares),
        (now.average, exact.average, terms),
        (now.weight, exact.weight, weight.abs() + size * terms / (squares.sqrt() + eps)),
    ):
        assert (mine.double() - theirs).abs().le(1e-6 * bound).all()


@compiled
def test_a_weight_is_rounded_as_in_the_plain_way():
    """Twice, by decay and by the step: rounded once, it would be as far from the trained weight as rounding can take it."""
    now, full, kept = drawn((70, 100), 0)
    plain = now.copy()
    step_on(plain, KINDS["adam"], ADAMW, full, walk=False).apply(plain.weight, plain.average, kept)
    assert on(now, ADAMW, full, kept)
    assert (now.weight == plain.weight).double().mean() > 0.99


@compiled
def test_what_one_pass_cannot_do_is_left_to_the_plain_way():
    now, full, kept = drawn((3, 4), 0)
    before = [now.weight.clone(), now.average.clone(), now.shared["exp_avg_sq"].clone()]
    apart = torch.zeros(3, 8)[:, ::2]
    assert not on(now, {**ADAMW, "amsgrad": 1.0}, full, kept)
    assert not on(now, {**ADAMW, "decoupled": 0.0}, full, kept)
    assert not on(now, {**ADAMW, "maximize": 1.0}, full, kept)
    assert not on(now, {**ADAMW, "beta1": 0.5}, full, kept)
    assert not on(now, {**ADAMW, "momentum_decay": 0.0, "mu_product": 0.9}, full, kept, "nadam")
    assert not on(now, ADAMW, full.double(), kept)
    assert not on(now, ADAMW, full, apart)
    assert not on(now, ADAMW, full[:2], kept)
    for one, other in zip([now.weight, now.average, now.shared["exp_avg_sq"]], before, strict=True):
        assert torch.equal(one, other)
    assert on(now, ADAMW, full, kept)


def recorded(path, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with dualform.record(model, optimizer, path, dtype=dtype) as recorder:
        for _ in range(6):
            labels = torch.randint(3, (8,))
            recorder.batch(label=labels)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.rand(8, 5)), labels).backward()
            optimizer.step()
    return model, dualform.open(path, model).store


@compiled
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("where", [None, "label = 1", "true", "false"])
def test_replays_in_one_pass_are_those_in_many(tmp_path, monkeypatch, dtype, where):
    model, store = recorded(tmp_path / "run", dtype)
    keep = None if where is None else Condition(store, where, 6)
    walks = [updates_of(store, name, end=6) for name, _ in model.named_parameters()]
    done = []
    in_one_pass = replay._adam_in_one_pass
    monkeypatch.setattr(replay, "_adam_in_one_pass", lambda *all_: (done.append(in_one_pass(*all_)), done[-1])[1])
    found = [forward(store, one, keep, only_masked=True)[1] for one in walks]
    assert done == [True] * 6 * len(walks)
    monkeypatch.setattr(replay, "kernels", lambda: None)
    for one, mine in zip(walks, found, strict=True):
        plain = forward(store, one, keep, only_masked=True)[1]
        torch.testing.assert_close(mine.weight, plain.weight, rtol=2e-6, atol=2e-7)
        torch.testing.assert_close(mine.average, plain.average, rtol=2e-6, atol=1e-9)
    assert not all(done)
