import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.record.optimizers import NAMED, OPTIMIZERS, replay_for
from dualform.recursions import KINDS, outer, walk_back
from lion import LerpingLion, Lion
from reference import sgd as reference

try:
    from transformers.optimization import Adafactor as FairseqAdafactor
except ImportError:
    FairseqAdafactor = None
OF_OTHER_LIBRARIES = [kind for kind in (Lion, LerpingLion, FairseqAdafactor) if kind is not None]


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
    return walk_back("sgd", {**columns, "fresh": np.array(fresh)}, len(each))


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
        total += found.b * buffer
    size = abs(found.a * theta) + np.abs(found.c * gradients).sum() + abs(float(expected))
    assert total == pytest.approx(float(expected), abs=1e-13 * size)


def test_a_buffer_that_is_empty_at_first_leaves_no_trace():
    each = [{"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "nesterov": False, "maximize": False}]
    assert replayed(each * 3, buffer=None).b == 0.0


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
    assert {replay.kind for replay in (*OPTIMIZERS.values(), *NAMED.values())} == set(KINDS)


def elementwise_settings(draw, kind):
    """Settings of a group of one kind, in which everything that can be switched is."""
    common = {
        "lr": draw(st.floats(1e-4, 0.5)),
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.3])),
        "maximize": draw(st.booleans()),
        "eps": draw(st.sampled_from([1e-8, 1e-4, 0.1])),
        **draw(st.sampled_from([{"foreach": False}, {"foreach": True}])),
    }
    betas = {"betas": (draw(st.sampled_from([0.0, 0.5, 0.9])), draw(st.sampled_from([0.5, 0.99, 0.999])))}
    more = {
        torch.optim.SGD: {"momentum": 0.9},
        torch.optim.Adam: {**betas, "amsgrad": draw(st.booleans())},
        torch.optim.AdamW: {**betas, "amsgrad": draw(st.booleans())},
        torch.optim.NAdam: {**betas, "momentum_decay": draw(st.sampled_from([0.0, 4e-3, 0.5])),
                            "decoupled_weight_decay": draw(st.booleans())},
        torch.optim.RAdam: {**betas, "decoupled_weight_decay": draw(st.booleans())},
        torch.optim.Adagrad: {"lr_decay": draw(st.sampled_from([0.0, 0.1])),
                              "initial_accumulator_value": draw(st.sampled_from([0.0, 0.5]))},
        torch.optim.RMSprop: {"alpha": draw(st.sampled_from([0.5, 0.99])), "centered": draw(st.booleans()),
                              "momentum": draw(st.sampled_from([0.0, 0.9]))},
        torch.optim.Adadelta: {"rho": draw(st.sampled_from([0.5, 0.9]))},
        torch.optim.Adamax: betas,
        torch.optim.Adafactor: {"eps": (draw(st.sampled_from([None, 1e-8, 0.1])), 1e-3), "d": draw(st.sampled_from([1.0, 3.0])),
                                "beta2_decay": draw(st.sampled_from([-0.8, -0.3]))},
    }[kind]  # fmt: skip
    settings = {**common, **more}
    if kind is torch.optim.SGD:
        settings.pop("eps")
    if kind in (torch.optim.Adam, torch.optim.AdamW) and draw(st.booleans()):
        settings.update(foreach=False, fused=True)
    return settings


def settings_elsewhere(draw, kind):
    """Settings of a group of an optimizer of another library."""
    common = {"lr": draw(st.floats(1e-4, 0.5)), "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.3]))}
    if kind in (Lion, LerpingLion):
        beta2 = draw(st.sampled_from([0.0, 0.5, 0.99]))
        return {**common, "betas": (draw(st.sampled_from([0.0, 0.5, 0.9])), beta2)}
    more = {
        "eps": (draw(st.sampled_from([1e-30, 1e-3])), 1e-3),
        "clip_threshold": draw(st.sampled_from([0.5, 1.0])),
        "decay_rate": draw(st.sampled_from([-0.8, -0.3])),
        "beta1": draw(st.sampled_from([None, 0.0, 0.9])),
        "scale_parameter": draw(st.booleans()),
    }
    relative = draw(st.booleans())
    warmup = relative and draw(st.booleans())
    if relative:
        common["lr"] = None
    return {**common, **more, "relative_step": relative, "warmup_init": warmup}


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 2), (4,)], ids=str)
@pytest.mark.parametrize("kind", [*OPTIMIZERS, *OF_OTHER_LIBRARIES], ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_optimizer_is_what_its_recursion_says(kind, shape, data):
    """The library's own update, run for real, against initial part − Σ C_s ⊙ gradient_s and against the walk forwards."""
    settings = (
        settings_elsewhere(data.draw, kind) if kind in OF_OTHER_LIBRARIES else elementwise_settings(data.draw, kind)
    )
    updates = data.draw(st.integers(1, 8))
    early, seed = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    parameter = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator))
    optimizer = kind([parameter], **settings)
    replay, how = replay_for(optimizer), KINDS[replay_for(optimizer).kind]

    def state(name, shape=shape):
        value = optimizer.state.get(parameter, {}).get(name) if name else None
        return parameter.new_zeros(shape) if value is None else value.detach().clone()

    for _ in range(early):  # recording begins in the middle of training
        parameter.grad = torch.randn(shape, dtype=torch.float64, generator=generator)
        optimizer.step()
    weight, average = parameter.detach().clone(), state(how.average)
    first = (weight.clone(), average.clone())
    shared = {name: state(name, like) for name, like in how.shared_shapes(shape).items()}
    steps, gradients = [], []
    for step in range(updates):
        if settings["lr"] is not None:
            optimizer.param_groups[0]["lr"] = settings["lr"] / (1 + step)
        gradient = torch.randn(shape, dtype=torch.float64, generator=generator)
        if data.draw(st.booleans()):
            gradient[0] = 0  # which may be all that these elements ever get
        parameter.grad = gradient.clone()
        [numbers] = replay.read(optimizer.param_groups[0], [optimizer.state.get(parameter, {})], [parameter])
        sign, decay, _ = outer(numbers)
        steps.append(how.linear(numbers, shared, sign * gradient + decay * weight))
        gradients.append(gradient)
        steps[-1].apply(weight, average, gradient)
        optimizer.step()
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-11, atol=1e-11)
    for name, value in shared.items():
        torch.testing.assert_close(value, state(name, value.shape), rtol=1e-11, atol=1e-13)
    p, q, total = torch.ones_like(weight), torch.zeros_like(weight), torch.zeros_like(weight)
    for one, gradient in zip(reversed(steps), reversed(gradients), strict=True):
        c, p, q = one.back(p, q)
        assert torch.as_tensor(c).isfinite().all()
        total -= c * gradient
    torch.testing.assert_close(p * first[0] + q * first[1] + total, parameter.detach(), rtol=1e-10, atol=1e-10)
