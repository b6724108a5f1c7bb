import functools
import tempfile
from pathlib import Path

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import dualform
from dualform.errors import NotRecordedError, OptimizerError
from dualform.record.optimizers import OPTIMIZERS, _without_hooks, optimizer_list, replay_for, warn_not_replayed
from training import assert_exact, assert_same_weights, network, samples, sgd, train


@st.composite
def sgd_settings(draw):
    momentum = draw(st.sampled_from([0.0, 0.5, 0.9]))
    nesterov = momentum > 0 and draw(st.booleans())
    tensor_lr = draw(st.booleans())
    lr = draw(st.floats(0.02, 0.2))
    return {
        "lr": torch.tensor(lr, dtype=torch.float64) if tensor_lr else lr,
        "momentum": momentum,
        "dampening": 0.0 if nesterov else draw(st.sampled_from([0.0, 0.3])),
        "nesterov": nesterov,
        "weight_decay": draw(st.sampled_from([0.0, 0.05])),
        "maximize": draw(st.booleans()),
        **draw(st.sampled_from([{"foreach": False}, {"foreach": True}, {"fused": True}])),
    }


def one(model, first, second):
    return torch.optim.SGD(model.parameters(), **first)


def biases_apart(model, first, second):
    """Weights and biases as groups of one optimizer, each with its own settings."""
    of_group = {name: value for name, value in second.items() if name not in ("foreach", "fused")}
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    return torch.optim.SGD([{"params": weights}, {"params": biases, **of_group}], **first)


def one_for_each_layer(model, first, second):
    return [torch.optim.SGD(model[0].parameters(), **first), torch.optim.SGD(model[2].parameters(), **second)]


def one_for_weights_one_for_biases(model, first, second):
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    return [torch.optim.SGD(weights, **first), torch.optim.SGD(biases, **second)]


def change_lr(optimizers, step, schedule):
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if schedule == "halved in place" and isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(0.5)
            elif schedule != "constant":
                group["lr"] = group["lr"] * (0.5 if step % 2 else 1.5)


@settings(max_examples=40)
@given(
    first=sgd_settings(),
    second=sgd_settings(),
    arrangement=st.sampled_from([one, biases_apart, one_for_each_layer, one_for_weights_one_for_biases]),
    schedule=st.sampled_from(["constant", "changing", "halved in place"]),
    steps_before=st.integers(0, 2),
)
def test_sgd_is_replayed_exactly_whatever_its_settings(first, second, arrangement, schedule, steps_before):
    model, (inputs, labels) = network(), samples()
    made = arrangement(model, first, second)
    several = made if isinstance(made, list) else [made]
    for _ in range(steps_before):  # so that momentum buffers are not empty when recording begins
        F.cross_entropy(model(inputs), labels).backward()
        for optimizer in several:
            optimizer.step()
            optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        run = train(
            Path(folder) / "run",
            model=model,
            optimizer=made,
            steps=5,
            after_step=lambda step: change_lr(several, step, schedule),
        )
        dual = run.dual
        assert_exact(dual)
        for step, expected in enumerate(run.checkpoints):
            assert_same_weights(dual.at(step).model(), expected)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=8),  # changes momentum too
        lambda o: torch.optim.lr_scheduler.LinearLR(o),
    ],
)
def test_schedulers_of_pytorch(tmp_path, schedule):
    model = network()
    optimizer = sgd(model)
    scheduler = schedule(optimizer)
    run = train(tmp_path / "run", model=model, optimizer=optimizer, after_step=lambda _: scheduler.step())
    assert_exact(run.dual)
    assert_same_weights(run.dual.at(4).model(), run.checkpoints[4])


def test_momentum_switched_on_and_off_in_the_middle(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = train(
        tmp_path / "run",
        model=model,
        optimizer=optimizer,
        steps=9,
        after_step=lambda step: optimizer.param_groups[0].update(momentum=(0.9, 0.9, 0.0)[step % 3]),
    )
    assert_exact(run.dual)
    assert_same_weights(run.dual.at(7).model(), run.checkpoints[7])


def test_a_parameter_group_replaced_in_the_middle(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def replace(step):
        optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.1 / (step + 1)}

    run = train(tmp_path / "run", model=model, optimizer=optimizer, after_step=replace)
    assert_exact(run.dual)
    assert_same_weights(run.dual.at(4).model(), run.checkpoints[4])


def test_a_parameter_taken_out_of_its_group_in_the_middle(tmp_path):
    model = network()
    other = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def swap(step):  # as many as before, in the same list; its gradient goes on being computed
        if step == 2:
            optimizer.param_groups[0]["params"][0] = other

    run = train(tmp_path / "run", model=model, optimizer=optimizer, after_step=swap)
    assert_exact(run.dual)
    updates = run.dual.store.updates.filter(pl.col("parameter") == 0)
    assert updates["step"].to_list() == [0, 1, 2]


def test_a_parameter_group_added_in_the_middle(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": [model[2].weight], "lr": 0.05})

    def add_bias(step):
        if step == 2:
            optimizer.add_param_group({"params": [model[2].bias], "lr": 0.2, "momentum": 0.5})

    run = train(
        tmp_path / "run",
        model=model,
        optimizer=optimizer,
        after_backward=lambda _: None,
        after_step=add_bias,
    )
    assert_exact(run.dual)
    assert_same_weights(run.dual.at(4).model(), run.checkpoints[4])


def test_settings_are_copied_before_the_step_returns():
    lr = torch.tensor(0.25)
    group = {"lr": lr, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
    replay = OPTIMIZERS[torch.optim.SGD]
    [settings] = replay.read(group, [{}], [torch.zeros(1)])
    lr.zero_()
    assert settings["lr"] == 0.25
    assert settings["fresh"] == 1.0


def test_a_subclass_that_leaves_the_update_alone_is_replayed(tmp_path):
    class Named(torch.optim.SGD):
        def describe(self):
            return "mine"

    run = train(tmp_path / "run", optimizer=lambda m: Named(m.parameters(), lr=0.1, momentum=0.5))
    assert_exact(run.dual)


def test_a_subclass_is_replayed_though_its_class_was_never_used_itself(monkeypatch):
    """PyTorch wraps step() for its hooks at the first instance: of the subclass then, which looks like a step() of its own."""
    monkeypatch.setattr(torch.optim.SGD, "step", _without_hooks(torch.optim.SGD.step))

    class Named(torch.optim.SGD):
        pass

    optimizer = Named(network().parameters(), lr=0.1)
    assert "step" in vars(Named)
    assert replay_for(optimizer) is OPTIMIZERS[torch.optim.SGD]


def _calls_it_twice(step):
    @functools.wraps(step)
    def twice(self, closure=None):
        step(self)
        return step(self)

    return twice


@pytest.mark.parametrize("step", [lambda self, closure=None: None, _calls_it_twice(torch.optim.SGD.step)])
def test_a_subclass_with_an_update_of_its_own_is_refused(step):
    class Noisy(torch.optim.SGD):
        pass

    Noisy.step = step
    assert replay_for(Noisy(network().parameters(), lr=0.1)) is None


class SignDescent(torch.optim.Optimizer):
    """A user's own optimizer: it moves each weight by lr, whatever the size of its gradient."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


class OtherLion(SignDescent):
    """Nothing but the name is that of a known optimizer."""


OtherLion.__name__ = "Lion"

NOT_REPLAYED = {
    "SignDescent": lambda m: SignDescent(m.parameters()),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "Lion": lambda m: OtherLion(m.parameters()),
}


def train_not_replayed(path, name):
    with pytest.warns(UserWarning, match=rf"{name} cannot be replayed \(.*attention and influence can be asked"):
        return train(path, optimizer=NOT_REPLAYED[name])


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_an_optimizer_that_cannot_be_replayed_keeps_the_slots_that_sgd_would(tmp_path, name):
    dual = train_not_replayed(tmp_path / "run", name).dual
    by_sgd = train(tmp_path / "sgd", optimizer=sgd).dual
    # The first step begins with the same weights
    for layer in ("0", "2"):
        assert torch.equal(dual.layer(layer).keys[:5], by_sgd.layer(layer).keys[:5])


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_without_coefficients_verify_checks_the_gradients_and_says_so(tmp_path, name):
    verified = train_not_replayed(tmp_path / "run", name).dual.verify()
    assert verified.passed
    assert set(verified.frame["verdict"]) == {"gradients"}
    assert verified.frame["gap"].is_nan().all()
    assert f"the updates of {name} cannot be replayed" in str(verified)


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_without_coefficients_attention_and_influence_are_answered(tmp_path, name):
    dual = train_not_replayed(tmp_path / "run", name).dual
    x, y = samples()
    assert dual.attend(x[:2])["2"].top(3).height == 6
    top = dual.influence(x[:2], target=y[:2]).top(3, by="sample_id")
    assert top["influence"].is_finite().all()


def test_without_coefficients_what_needs_them_says_so(tmp_path):
    dual = train_not_replayed(tmp_path / "run", "SignDescent").dual
    x, _ = samples()
    for ask in (
        lambda: dual.contributions(x[:1], target=0)["2"].top(3),
        lambda: dual.masked(drop=pl.col("sample_id") == 1),
        lambda: dual.layer("2").values,
    ):
        with pytest.raises(NotRecordedError, match=r"trained by SignDescent.*no coefficients"):
            ask()


def test_totals_of_deltas_need_an_optimizer_that_can_be_replayed(tmp_path):
    model = network()
    with pytest.raises(OptimizerError, match=r"totals= of deltas needs coefficients, and Rprop.*can: SGD"):
        dualform.record(model, torch.optim.Rprop(model.parameters()), tmp_path / "run", totals=["sample_id"])
    assert not (tmp_path / "run").exists()


def test_totals_of_deltas_cannot_be_built_without_coefficients(tmp_path):
    train_not_replayed(tmp_path / "run", "SignDescent")
    with pytest.raises(NotRecordedError, match=r"trained by SignDescent.*Ask kind=\"keys\""):
        dualform.build_totals(tmp_path / "run", "sample_id")
    dualform.build_totals(tmp_path / "run", "sample_id", kind="keys")


def test_a_recording_without_coefficients_is_resumed_between_snapshots(tmp_path):
    run = train_not_replayed(tmp_path / "run", "SignDescent")
    model = network()
    model.load_state_dict(run.checkpoints[4])
    inputs, labels = samples()
    optimizer = SignDescent(model.parameters())
    with pytest.warns(UserWarning, match="SignDescent"):
        recorder = dualform.record(model, optimizer, tmp_path / "run", dtype="float64", resume=4)
    with recorder:
        recorder.batch(sample_id=range(5), label=labels[:5], task="late")
        F.cross_entropy(model(inputs[:5]), labels[:5]).backward()
        optimizer.step()
    assert dualform.open(tmp_path / "run", model).verify().passed


def test_an_optimizer_that_cannot_be_replayed_may_move_the_weights_between_steps(tmp_path):
    model = network()
    optimizer = SignDescent(model.parameters())
    x, y = samples()
    with pytest.warns(UserWarning, match="SignDescent"):
        recorder = dualform.record(model, optimizer, tmp_path / "run")
    with recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(len(x)))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model[0].weight.mul_(0.9)  # as schedule-free optimizers do between training and evaluation
    assert dualform.open(tmp_path / "run", model).verify().passed


def test_lbfgs_is_refused(tmp_path):
    model = network()
    with pytest.raises(OptimizerError, match="LBFGS computes several gradients within one step"):
        dualform.record(model, torch.optim.LBFGS(model.parameters()), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_optimizer_in_a_list_that_cannot_be_replayed_is_named(tmp_path):
    model = network()
    several = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Rprop(model[2].parameters())]
    with pytest.warns(UserWarning, match="Rprop cannot be replayed"):
        dualform.record(model, several, tmp_path / "run").close()


class Wrapper:
    """An optimizer in another object, as Accelerate and Lightning make them."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_wrappers_of_optimizers_are_taken_off():
    inner = sgd(network())
    assert optimizer_list(Wrapper(Wrapper(inner))) == [inner]
    assert optimizer_list([inner, Wrapper(inner)]) == [inner, inner]


def test_keys_can_be_kept_under_any_optimizer(tmp_path):
    run = train(tmp_path / "run", optimizer=lambda m: torch.optim.Rprop(m.parameters()), keep="keys")
    assert dualform.open(run.path).layer("0").keys.shape == (30, 5)


@pytest.mark.parametrize("given", ["sgd", [3], None, 3])
@pytest.mark.parametrize("keep", ["slots", "keys"])
def test_what_is_no_optimizer_is_refused(tmp_path, given, keep):
    with pytest.raises(OptimizerError, match=r"expected a torch\.optim\.Optimizer"):
        dualform.record(network(), given, tmp_path / "run", keep=keep)


def test_an_optimizer_that_can_be_replayed_gives_no_warning():
    assert warn_not_replayed([sgd(network())]) is None
