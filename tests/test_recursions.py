import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.record.optimizers import OPTIMIZERS
from dualform.recursions import RECURSIONS, sgd
from reference import sgd as reference


@st.composite
def settings(draw):
    momentum = draw(st.sampled_from([0.0, 0.5, 0.9, 0.99]))
    nesterov = momentum > 0 and draw(st.booleans())
    return {
        "lr": draw(st.floats(0, 1)),
        "momentum": momentum,
        "dampening": 0.0 if nesterov else draw(st.floats(0, 1)),
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.5])),
        "nesterov": nesterov,
        "maximize": draw(st.booleans()),
    }


def replayed(each, *, buffer):
    """What the recursion makes of these settings; `fresh` as the recorder would write it down."""
    columns = {name: np.array([float(one[name]) for one in each]) for name in each[0]}
    fresh, empty = [], buffer is None
    for one in each:
        fresh.append(float(empty))
        empty = empty and one["momentum"] == 0
    return sgd({**columns, "fresh": np.array(fresh)}, len(each))


@given(
    each=st.lists(settings(), min_size=1, max_size=8),
    buffer=st.one_of(st.none(), st.floats(-2, 2)),
    seed=st.integers(0, 99),
)
def test_initial_part_plus_coefficients_equal_the_plain_loop(each, buffer, seed):
    random = np.random.default_rng(seed)
    theta, gradients = random.standard_normal(), random.standard_normal(len(each))
    expected, _ = reference.run(theta, gradients, each, buffer)
    found = replayed(each, buffer=buffer)
    total = found.a * theta - found.c @ gradients
    if buffer is not None:
        total += found.b["momentum_buffer"] * buffer
    size = abs(found.a * theta) + np.abs(found.c * gradients).sum() + abs(float(expected))
    assert total == pytest.approx(float(expected), abs=1e-13 * size)


def test_a_buffer_that_is_empty_at_first_leaves_no_trace():
    each = [{"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "nesterov": False, "maximize": False}]
    assert replayed(each * 3, buffer=None).b["momentum_buffer"] == 0.0


def test_plain_gradient_descent_is_its_learning_rates():
    plain = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
    found = replayed([{"lr": 0.1, **plain}, {"lr": 0.2, **plain}, {"lr": 0.3, **plain, "maximize": True}], buffer=None)
    assert found.a == 1.0
    assert found.c.tolist() == [0.1, 0.2, -0.3]


def test_momentum_is_a_geometric_sum():
    each = [{"lr": 1.0, "momentum": 0.5, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}]
    assert replayed(each * 3, buffer=None).c.tolist() == [1.75, 1.5, 1.0]


def test_decay_shrinks_what_came_before():
    each = [{"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.5, "nesterov": False, "maximize": False}]
    found = replayed(each * 2, buffer=None)
    assert found.a == 0.75**2
    assert found.c.tolist() == [0.375, 0.5]


@pytest.mark.parametrize("foreach", [False, True])
@given(each=st.lists(settings(), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_the_plain_loop_is_pytorch(foreach, each, seed):
    random = np.random.default_rng(seed)
    theta, gradients = random.standard_normal(3), random.standard_normal((len(each), 3))
    parameter = torch.nn.Parameter(torch.tensor(theta))
    optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=foreach)
    for gradient, one in zip(gradients, each, strict=True):
        optimizer.param_groups[0].update(one)
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    expected, _ = reference.run(theta, gradients, each)
    np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_what_can_be_recorded_can_be_replayed():
    assert {replay.kind for replay in OPTIMIZERS.values()} == set(RECURSIONS)
