"""Loops people really write: each trains for real, in float64 and in float32, and must verify to rounding."""

import contextlib
import copy
import itertools

import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.errors import BatchError, RecordingError, UnexplainedError
from dualform.record import passes
from training import assert_same_weights

GAPS = {torch.float64: 1e-12, torch.float32: 2e-5}


@pytest.fixture(autouse=True, params=[torch.float64, torch.float32], ids=str)
def precision(request):
    """Of everything that is made here. In float32 ordinary passes and updates go by the compiled loops."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def network(*widths, dtype=None):
    torch.manual_seed(0)
    layers = []
    for d_in, d_out in itertools.pairwise(widths):
        layers += [nn.Linear(d_in, d_out, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def sgd(*modules, lr=0.1, momentum=0.9, **settings):
    parameters = [p for module in modules for p in module.parameters()]
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, **settings)


def batches(count, rows=6, width=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        x = torch.randn(rows, width, generator=generator)
        yield (
            torch.arange(rows) + number * rows,
            x,
            torch.randn(rows, 2, generator=generator),
        )


def assert_exact(path, model=None, gap=None):
    certificate = dualform.open(path, model).verify()
    assert certificate.passed, str(certificate)
    assert certificate.frame["gap"].max() <= max(gap or 0, GAPS[torch.get_default_dtype()]), str(certificate)
    return certificate


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


def test_gan_the_generators_loss_runs_through_the_discriminator(path):
    generator, critic = network(3, 8, 4), network(4, 8, 1)
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    of_generator, of_critic = sgd(generator), sgd(critic)
    with dualform.record(model, [of_critic, of_generator], path) as recorder:
        for ids, real, _ in batches(8):
            recorder.batch(sample_id=ids)
            fake = generator(torch.randn(len(ids), 3))
            of_critic.zero_grad()
            (critic(fake.detach()).mean() - critic(real).mean()).backward()
            of_critic.step()
            of_generator.zero_grad()
            (-critic(generator(torch.randn(len(ids), 3))).mean()).backward()
            of_generator.step()
    assert_exact(path, model)
    dual = dualform.open(path, model)
    assert dual.end_step == 8
    assert dual.store.slots("critic.0") == 8 * 12  # real and fake; not those of the generator's loss
    assert dual.store.slots("generator.0") == 8 * 6


def test_gradient_penalty_by_autograd_grad_is_refused_by_the_audit(path):
    """A penalty reaches the weight through its own derivative: its slots are not the layer's. It must not pass."""
    model = network(4, 8, 1)
    optimizer = sgd(model)
    with (
        pytest.raises(UnexplainedError, match="residual"),
        dualform.record(model, optimizer, path) as recorder,
    ):
        for ids, x, _ in batches(2):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            x.requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (out.mean() + (slope.norm(dim=1) - 1).pow(2).mean()).backward()
            optimizer.step()


@pytest.mark.parametrize(("dtype", "gap"), [(None, None), ("float16", 1e-3)])
def test_autograd_grad_beside_training_does_not_count(path, dtype, gap):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, dtype=dtype) as recorder:
        for ids, x, y in batches(5):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            x.requires_grad_()
            torch.autograd.grad(model(x).sum(), x)  # a saliency map
            F.mse_loss(model(x), y).backward()
            torch.autograd.grad(model(x).sum(), x)
            optimizer.step()
    assert_exact(path, model, gap)
    assert dualform.open(path).store.slots("0") == 30


def test_backward_twice_through_one_graph(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for ids, x, y in batches(5):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
    assert_exact(path, model)
    dual = dualform.open(path, model)
    assert dual.store.slots("0") == 60
    assert dual.attend(torch.zeros(1, 4))["0"].top(60)["backward"].n_unique() == 2


def test_microbatches_with_their_own_weights_and_averaging(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        stream = batches(12)
        for _ in range(4):
            optimizer.zero_grad()
            for weight in (0.5, 2.0, 0.1):
                ids, x, y = next(stream)
                recorder.batch(sample_id=ids)
                (weight * F.mse_loss(model(x), y)).backward()
            for p in model.parameters():
                p.grad /= 3
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    assert_exact(path, model)


def test_many_microbatches_for_few_outputs(path):
    """More backward passes than the audit has equations: the chain of factors needs none."""
    model = network(4, 1)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        stream = batches(120)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(40):
                ids, x, y = next(stream)
                recorder.batch(sample_id=ids)
                F.mse_loss(model(x), y[:, :1]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    assert_exact(path, model)


def test_gradients_kept_aside_and_put_together_again(path):
    """As in methods against conflicting gradients: no chain explains this, free factors do."""
    model = network(4, 16, 8)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for ids, x, _ in batches(4):
            aside = []
            for task in range(2):
                recorder.batch(sample_id=ids, task=task)
                optimizer.zero_grad()
                model(x)[:, task].pow(2).mean().backward()
                aside.append([p.grad.clone() for p in model.parameters()])
            for p, one, other in zip(model.parameters(), *aside, strict=True):
                p.grad = 0.7 * one - 0.2 * other
            optimizer.step()
    assert_exact(path, model, gap=1e-10)


@pytest.mark.parametrize("kind", ["linear", "lstm"])
def test_an_optimizer_for_each_parameter_that_steps_during_the_backward_pass(path, kind):
    model = network(4, 8, 2) if kind == "linear" else nn.LSTM(4, 2, batch_first=True)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    with dualform.record(model, list(optimizers.values()), path) as recorder:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for ids, x, y in batches(6):
            recorder.batch(sample_id=ids)
            found = model(x) if kind == "linear" else model(x.unsqueeze(1))[0][:, 0]
            F.mse_loss(found, y).backward()
    assert_exact(path, model)
    assert dualform.open(path).end_step == 6


@pytest.mark.parametrize("held", [0, 200, 1 << 20])
def test_however_much_is_held_until_a_backward_pass_ends(tmp_path, monkeypatch, held):
    monkeypatch.setattr(passes, "ARRIVED", held)
    model = network(4, 8, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for ids, x, y in batches(5):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert_exact(tmp_path / "run", model)
    inputs = torch.cat([x for _, x, _ in batches(5)])
    assert torch.equal(dualform.open(tmp_path / "run").layer("0").keys, inputs)


def test_a_backward_pass_that_fails_leaves_nothing_behind(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for number, (ids, x, y) in enumerate(batches(6)):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            hidden = model[0](x)
            if number % 2:
                hidden.register_hook(lambda error: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                F.mse_loss(model[1:](hidden), y).backward()
                optimizer.step()
    assert_exact(path, model)
    assert dualform.open(path).end_step == 3


def test_step_with_a_closure(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for ids, x, y in batches(5):
            recorder.batch(sample_id=ids)

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() >= 0
    assert_exact(path, model)


def test_loss_scaling_with_skipped_steps(path):
    model = network(4, 8, 2, dtype=torch.float32)
    optimizer = sgd(model, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    with dualform.record(model, optimizer, path) as recorder:
        for number, (ids, x, y) in enumerate(batches(8)):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.float()), y.float())
            scaler.scale(loss * (float("inf") if number == 3 else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    certificate = dualform.open(path, model).verify()
    assert certificate.passed, str(certificate)
    assert dualform.open(path).end_step == 7
    assert dualform.open(path).store.slots("0") == 42


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(path, reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = network(4, 8), network(8, 8, 8), network(8, 2)

        def forward(self, x):
            hidden = torch.tanh(self.first(x))
            return self.last(torch.tanh(checkpoint(self.middle, hidden, use_reentrant=reentrant)))

    model = Model()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for ids, x, y in batches(5):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert_exact(path, model)
    assert dualform.open(path).store.slots("middle.0") == 30


def test_reentrant_checkpointing_with_two_batches_in_flight_asks(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with pytest.raises(BatchError, match="checkpoint"), dualform.record(model, optimizer, path) as recorder:
        losses = []
        for ids, x, y in batches(2):
            recorder.batch(sample_id=ids)
            x.requires_grad_()
            losses.append(F.mse_loss(checkpoint(model, x, use_reentrant=True), y))
        sum(losses).backward()
        optimizer.step()


def test_two_batches_in_one_backward_pass_keep_their_rows(path):
    model = network(4, 2)
    optimizer = sgd(model)
    inputs = {}
    with dualform.record(model, optimizer, path) as recorder:
        losses = []
        for ids, x, y in batches(2):
            recorder.batch(sample_id=ids)
            inputs.update(zip(ids.tolist(), x, strict=True))
            losses.append(F.mse_loss(model(x), y))
        sum(losses).backward()
        optimizer.step()
    dual = assert_exact(path) and dualform.open(path, model)
    rows = dual.rows["sample_id"].to_list()
    for chunk in dual.store.chunks("0"):
        for key, row in zip(chunk.keys(torch.get_default_dtype()).vectors(), chunk.rows(), strict=True):
            assert torch.equal(key, inputs[rows[row]])


def test_reused_input_buffers(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    buffer = torch.empty(6, 4)
    ids_buffer = torch.empty(6, dtype=torch.long)
    with dualform.record(model, optimizer, path) as recorder:
        for ids, x, y in batches(5):
            buffer.copy_(x)
            ids_buffer.copy_(ids)
            recorder.batch(sample_id=ids_buffer)
            optimizer.zero_grad()
            F.mse_loss(model(buffer), y).backward()
            buffer.zero_()
            ids_buffer.zero_()
            optimizer.step()
    assert_exact(path, model)
    assert dualform.open(path).rows["sample_id"].to_list() == list(range(30))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("moment", ["forward", "backward", "step"])
def test_an_exception_in_the_middle_loses_nothing_that_was_done(path, error, moment):
    model = network(4, 8, 2)
    optimizer = sgd(model)

    def fail(*_):
        raise error

    with pytest.raises(error), dualform.record(model, optimizer, path) as recorder:
        for number, (ids, x, y) in enumerate(batches(5)):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            if number == 3 and moment == "forward":
                fail()
            out = model(x)
            if number == 3 and moment == "backward":
                out.register_hook(fail)
            F.mse_loss(out, y).backward()
            if number == 3 and moment == "step":
                optimizer.register_step_pre_hook(fail)  # after the recorder's, before the update
            optimizer.step()
    assert_exact(path, model)
    assert dualform.open(path).end_step == 3
    assert error.__name__ in dualform.open(path).info()["ended"]


def test_add_param_group_during_training(path):
    model = network(4, 8, 2)
    optimizer = sgd(model[2])
    with pytest.warns(UserWarning, match=r"'0': its weight is in no optimizer"):
        recorder = dualform.record(model, optimizer, path)
    with recorder:
        for number, (ids, x, y) in enumerate(batches(8)):
            if number == 4:
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
            recorder.batch(sample_id=ids)
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert_exact(path, model)
    dual = dualform.open(path, model)
    assert dual.store.slots("0") == 24
    assert dual.store.slots("2") == 48
    assert dual.info()["left_out"] == {}
    assert dual.attend(torch.zeros(1, 4))["0"].top(1)["step"].item() >= 4


@pytest.mark.parametrize("to_none", [True, False])
def test_no_gradient_and_zero_gradient_differ(path, to_none):
    """A parameter without gradient is skipped; one with a zero gradient moves on by momentum and decay."""
    one, other = network(4, 2), network(4, 2)
    model = nn.ModuleDict({"one": one, "other": other})
    optimizer = sgd(model, weight_decay=0.1)
    with dualform.record(model, optimizer, path) as recorder:
        for number, (ids, x, y) in enumerate(batches(9)):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad(set_to_none=to_none)
            F.mse_loss((one if number % 3 == 0 else other)(x), y).backward()
            optimizer.step()
    assert_exact(path, model)


def test_weights_moved_by_hand_are_an_error_that_names_them(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with pytest.raises(UnexplainedError, match=r"layer '0', step 2: '0.weight' was changed"):
        with dualform.record(model, optimizer, path) as recorder:
            for number, (ids, x, y) in enumerate(batches(4)):
                recorder.batch(sample_id=ids)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                if number == 2:
                    model[0].weight.data.mul_(0.99)
                optimizer.step()


def test_optimizer_state_loaded_between_backward_pass_and_step(path):
    """New groups, with the same parameters: nothing has happened to the gradients."""
    model = network(4, 8, 2)
    optimizer = sgd(model, momentum=0)
    with dualform.record(model, optimizer, path) as recorder:
        for number, (ids, x, y) in enumerate(batches(6)):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if number == 3:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
    assert_exact(path, model)


@pytest.mark.parametrize("first", [True, False])
def test_a_penalty_with_a_backward_pass_of_its_own(path, first):
    """It reaches parameters past their modules, whose slots do not explain it; the others are what they were."""
    model = network(4, 8, 2)
    optimizer = sgd(model)

    def penalize():
        model[0].weight.square().sum().mul(0.01).backward()

    with dualform.record(model, optimizer, path, on_unexplained="mark") as recorder:
        for ids, x, y in batches(6):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            if first:
                penalize()
            F.mse_loss(model(x), y).backward()
            if not first:
                penalize()
            optimizer.step()
    dual = dualform.open(path, model)
    assert set(dual.store.manifest.inexact) == {"0"}
    gaps = dict(dual.verify().frame.select("parameter", "gap").iter_rows())
    assert max(gaps["2.weight"], gaps["2.bias"]) <= GAPS[torch.get_default_dtype()]


def test_parameters_that_a_pass_touches_with_zeros(path):
    """0 · p keeps distributed training from complaining of parameters that a loss leaves out."""
    model, head = network(4, 8, 2), nn.Linear(2, 2)
    optimizer = sgd(model, head)
    both = nn.ModuleList([model, head])
    with dualform.record(both, optimizer, path) as recorder:
        for ids, x, y in batches(6):
            optimizer.zero_grad()
            for with_head in (True, False):
                recorder.batch(sample_id=ids)
                out = model(x)
                loss = F.mse_loss(head(out) if with_head else out, y)
                (loss + 0.0 * sum(p.sum() for p in head.parameters())).backward()
            optimizer.step()
    assert_exact(path, both)


def test_a_parameter_of_two_optimizers_is_refused(path):
    model = network(4, 8, 2)
    with pytest.raises(RecordingError, match=r"'2.weight' is in two of the recorded optimizers"):
        dualform.record(model, [sgd(model), sgd(model[2:])], path)
    one, two = sgd(model[:2]), sgd(model[2:])
    with pytest.raises(RecordingError, match=r"'0.weight' is in two of the recorded optimizers"):
        with dualform.record(model, [one, two], path) as recorder:
            for number, (ids, x, y) in enumerate(batches(4)):
                if number == 2:
                    two.add_param_group({"params": model[0].parameters()})
                recorder.batch(sample_id=ids)
                model.zero_grad()
                F.mse_loss(model(x), y).backward()
                one.step()
                two.step()
    assert dualform.open(path).end_step == 2  # nothing is lost


def test_a_layer_that_is_taken_out_of_the_optimizer_while_another_rests(path):
    """As many layers are trained as are updated, but others."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    optimizer = sgd(layers, momentum=0)
    with dualform.record(layers, optimizer, path) as recorder:
        for number, (ids, x, _) in enumerate(batches(6)):
            recorder.batch(sample_id=ids)
            if number == 3:  # the last one rests with an old gradient, and the first is no longer updated
                optimizer.param_groups[0]["params"] = [*layers[1:].parameters()]
            out = layers[1](layers[0](x))
            if number < 3:
                optimizer.zero_grad()
                out = layers[2](out)
            else:
                layers[:2].zero_grad()
                for p in layers[2].parameters():
                    p.grad.zero_()
            out.square().mean().backward()
            optimizer.step()
    assert_exact(path, layers)


FOREACH = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd, maximize": lambda parameters: torch.optim.SGD(
        parameters, lr=1e-3, maximize=True, weight_decay=0.1, foreach=True
    ),
    "adam": lambda parameters: torch.optim.Adam(parameters, weight_decay=0.1, foreach=True),
    "adam, maximize": lambda parameters: torch.optim.Adam(parameters, weight_decay=0.1, maximize=True, foreach=True),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, weight_decay=0.1, foreach=True),
    "radam": lambda parameters: torch.optim.RAdam(parameters, weight_decay=0.1, foreach=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, weight_decay=0.1, foreach=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, weight_decay=0.1, momentum=0.9, foreach=True),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, weight_decay=0.1, foreach=True),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, weight_decay=0.1, foreach=True),
}


@pytest.mark.parametrize("kind", FOREACH)
def test_an_optimizer_that_writes_to_its_gradients_is_no_other_hook(path, kind):
    model = network(4, 8, 2, dtype=torch.float32)
    optimizer = FOREACH[kind](model.parameters())
    with dualform.record(model, optimizer, path) as recorder:
        for ids, x, y in batches(5):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x.float()), y.float()).backward()
            optimizer.step()
    assert dualform.open(path, model).verify().passed


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_hook_that_changes_gradients_after_the_recorder_has_seen_them(path, kind):
    """The update is not the one that was audited: told at the next step."""
    model = network(4, 8, 2, dtype=torch.float32)
    optimizer = kind(model.parameters(), lr=0.1)

    def halve(*_):
        model[2].weight.grad.mul_(0.5)

    with pytest.raises(UnexplainedError, match=r"step 3: '2.weight' had its gradient changed .* runs after"):
        with dualform.record(model, optimizer, path) as recorder:
            for number, (ids, x, y) in enumerate(batches(5)):
                if number == 2:
                    optimizer.register_step_pre_hook(halve)
                recorder.batch(sample_id=ids)
                optimizer.zero_grad()
                F.mse_loss(model(x.float()), y.float()).backward()
                optimizer.step()


@pytest.mark.parametrize("rows", [1, 3, 10, 17])
@pytest.mark.parametrize("at", range(1, 9))
def test_an_edit_of_a_whole_weight_through_data_never_passes(path, rows, at):
    """Whichever part of the weight has its turn."""
    model = network(4, rows)
    optimizer = sgd(model)
    with pytest.raises(UnexplainedError, match=rf"step {at}: '0.weight' was changed"):
        with dualform.record(model, optimizer, path) as recorder:
            for number, (ids, x, _) in enumerate(batches(10)):
                recorder.batch(sample_id=ids)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if number == at:
                    model[0].weight.data.mul_(0.99)
                optimizer.step()


def test_weights_swapped_and_put_back_are_no_error(path):
    """An average of weights, swapped in for evaluation."""
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for ids, x, y in batches(4):
            saved = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict({name: value * 0.5 for name, value in saved.items()})
            with torch.no_grad():
                model(x)
            model.load_state_dict(saved)
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert_exact(path, model)


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_load_state_dict_in_the_middle(path, what):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with (
        pytest.raises(UnexplainedError, match="load_state_dict"),
        dualform.record(model, optimizer, path) as recorder,
    ):
        for number, (ids, x, y) in enumerate(batches(4)):
            if number == 0:
                first = {k: v.clone() for k, v in model.state_dict().items()}
            if number == 2:
                saved = copy.deepcopy(optimizer.state_dict())
            if number == 3:
                model.load_state_dict(first) if what == "model" else optimizer.load_state_dict(saved)
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()


def test_mark_lets_the_training_go_on_and_shows_everywhere(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, on_unexplained="mark") as recorder:
        for number, (ids, x, y) in enumerate(batches(6)):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if number >= 3:  # the first time is what counts
                nn.utils.clip_grad_value_(model[0].parameters(), 1e-3)
            optimizer.step()
    dual = dualform.open(path, model)
    assert dual.end_step == 6
    assert dual.info()["inexact"]["0"]["step"] == 3
    certificate = dual.verify()
    assert not certificate.passed
    verdicts = dict(certificate.frame.select("parameter", "verdict").iter_rows())
    assert verdicts["0.weight"] == "inexact"
    assert verdicts["2.weight"] == "pass"
    with pytest.warns(dualform.errors.InexactWarning, match=r"'0'.*step 3"):
        dual.attend(torch.zeros(1, 4))
    assert dual.at(3).verify().frame["verdict"].to_list().count("inexact") == 0


def test_an_edit_of_a_single_row_through_data_is_found_by_verify_at_the_latest(path):
    """Of a weight an eighth of the rows is compared before each step."""
    model = network(4, 16, 2, dtype=torch.float32)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, on_unexplained="mark") as recorder:
        for number, (ids, x, y) in enumerate(batches(30)):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x.float()), y.float()).backward()
            if number == 10:
                model[0].weight.data[-1, 0] += 1.0
            optimizer.step()
    dual = dualform.open(path, model)
    assert "0" in dual.info()["inexact"] or not dual.verify().passed


def test_an_edit_of_a_bias_through_data_never_passes(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with pytest.raises(UnexplainedError, match=r"step 3: '2.bias' was changed"):
        with dualform.record(model, optimizer, path) as recorder:
            for number, (ids, x, y) in enumerate(batches(5)):
                recorder.batch(sample_id=ids)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                if number == 3:
                    model[2].bias.data[1] += 0.1
                optimizer.step()


def test_the_likely_causes_are_named(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with pytest.raises(UnexplainedError, match=r"clipped by value.*not zeroed.*mark"):
        with dualform.record(model, optimizer, path) as recorder:
            for ids, x, y in batches(3):  # never zeroed
                recorder.batch(sample_id=ids)
                F.mse_loss(model(x), y).backward()
                optimizer.step()


def test_several_recorders_in_one_process(tmp_path):
    models = [network(4, 8, 2), network(4, 6, 2)]
    optimizers = [sgd(model) for model in models]
    recorders = [
        dualform.record(model, optimizer, tmp_path / str(number))
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
    ]
    for ids, x, y in batches(4):
        for model, optimizer, recorder in zip(models, optimizers, recorders, strict=True):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    for number, recorder in enumerate(recorders):
        recorder.close()
        assert_exact(tmp_path / str(number), models[number])


def test_two_recorders_of_one_model(tmp_path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with (
        dualform.record(model, optimizer, tmp_path / "a", layers="0") as one,
        dualform.record(model, optimizer, tmp_path / "b", keep="keys") as other,
    ):
        for ids, x, y in batches(4):
            one.batch(sample_id=ids)
            other.batch(sample_id=ids)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert_exact(tmp_path / "a", model)
    assert dualform.open(tmp_path / "b").store.slots("2") == 24


def train(model, optimizer, recorder, stream):
    for ids, x, y in stream:
        recorder.batch(sample_id=ids)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def test_two_phases_with_different_optimizers(path):
    model = network(4, 8, 2)
    stream = list(batches(8))
    first = sgd(model, momentum=0.9)
    with dualform.record(model, first, path) as recorder:
        train(model, first, recorder, stream[:4])
    second = sgd(model, lr=0.02, momentum=0.5, nesterov=True, weight_decay=0.01)
    with pytest.warns(UserWarning, match="begins afresh, as the optimizer of a second phase does"):
        recorder = dualform.record(model, second, path, resume=True)
    with recorder:
        assert recorder.step == 4
        train(model, second, recorder, stream[4:])
    certificate = assert_exact(path, model)
    assert certificate.step == 8


@pytest.mark.parametrize("at", [0, 2, 3, 6])
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_resume_from_a_checkpoint(path, at, dtype):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    stream = list(batches(8))
    kept = {}
    with dualform.record(model, optimizer, path, chunk_bytes=3000, dtype=dtype) as recorder:
        for number, (ids, x, y) in enumerate(stream[:6]):
            kept[number] = {"model": {k: v.clone() for k, v in model.state_dict().items()}}
            kept[number]["optimizer"] = torch.utils._pytree.tree_map(
                lambda v: v.clone() if isinstance(v, torch.Tensor) else v, optimizer.state_dict()
            )
            train(model, optimizer, recorder, [(ids, x, y)])
    straight = network(4, 8, 2)
    of_straight = sgd(straight)
    with dualform.record(straight, of_straight, path.with_name("straight"), dtype=dtype) as recorder:
        train(straight, of_straight, recorder, stream)
    if at < 6:
        model.load_state_dict(kept[at]["model"])
        optimizer = sgd(model)
        optimizer.load_state_dict(kept[at]["optimizer"])
    with dualform.record(model, optimizer, path, resume=at, chunk_bytes=3000, dtype=dtype) as recorder:
        train(model, optimizer, recorder, stream[at:])
    assert dualform.open(path, model).verify().passed
    one, other = dualform.open(path, model), dualform.open(path.with_name("straight"), straight)
    assert one.end_step == other.end_step == 8
    assert one.rows.equals(other.rows)
    query = torch.randn(3, 4)
    for layer in ("0", "2"):
        mine, theirs = one.attend(query)[layer].top(48), other.attend(query)[layer].top(48)
        assert mine.drop("weight").equals(theirs.drop("weight"))
    assert one.store.key_count("0") == other.store.key_count("0")


@pytest.mark.parametrize("keep", ["slots", "totals"])
def test_resume_with_nothing_left_to_train_loses_no_layer(path, keep):
    """A script that is run again after its last step."""
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, keep=keep, totals=["sample_id"]) as recorder:
        train(model, optimizer, recorder, batches(4))
    expected = dualform.open(path, model).masked(drop=pl.col("sample_id") < 3)
    with dualform.record(model, optimizer, path, keep=keep, totals=["sample_id"], resume=True):
        pass
    dual = dualform.open(path, model)
    assert dual.layers == ["0", "2"]
    assert dual.info()["left_out"] == {}
    assert_same_weights(dual.masked(drop=pl.col("sample_id") < 3), expected.state_dict())


def test_resume_refuses_other_weights(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        train(model, optimizer, recorder, batches(4))
    with pytest.raises(RecordingError, match=r"'0.weight' is not what the recording .* after step 2"):
        dualform.record(model, optimizer, path, resume=2)
    with pytest.raises(RecordingError, match="sealed up to step 4"):
        dualform.record(model, optimizer, path, resume=5)
    other = network(4, 6, 2)
    with pytest.raises(RecordingError, match="other layers"):
        dualform.record(other, sgd(other), path, resume=True)
    assert dualform.open(path, model).verify().passed  # nothing was lost


def test_resume_refuses_another_optimizer_state_where_it_is_known(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        train(model, optimizer, recorder, batches(4))
    optimizer.state[model[0].weight]["momentum_buffer"].mul_(2)
    with pytest.raises(RecordingError, match="momentum_buffer"):
        dualform.record(model, optimizer, path, resume=True)


class Branches(nn.Module):
    """Two layers of the same sizes, called in any order, or one of them alone."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, names):
        return sum(getattr(self, name)(x).square().sum() for name in names)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("width", [1, 2, 40])
@pytest.mark.parametrize("names", [("ab", "ba"), ("a", "b"), ("ab", "b"), ("aa", "ab")])
def test_memory_that_comes_back_may_go_to_other_layers(path, dtype, width, names):
    model = Branches(width)
    optimizer = sgd(model, lr=0.001)
    with dualform.record(model, optimizer, path, dtype=dtype, chunk_bytes=1 << 12) as recorder:
        for number in range(160):
            ids, x = torch.arange(5) + 5 * number, torch.randn(5, width)
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            model(x, names[number // 20 % 2]).backward()
            optimizer.step()
            if number % 20 == 19:
                recorder.seal()  # so that the writer is done with everything
    certificate = dualform.open(path, model).verify()
    assert certificate.passed, certificate


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_layer_that_is_called_twice_keeps_its_calls_apart(path, dtype):
    first, twice = nn.Linear(6, 8), nn.Linear(8, 8)
    model = nn.Sequential(first, nn.Tanh(), twice, nn.Tanh(), twice)
    optimizer, keys = sgd(model, lr=0.01), []
    twice.register_forward_hook(lambda module, given, _: keys.append(given[0].detach().clone()))
    with dualform.record(model, optimizer, path, dtype=dtype) as recorder:
        for number in range(16):
            recorder.batch(sample_id=torch.arange(5) + 5 * number)
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().sum().backward()
            optimizer.step()
    found = dualform.open(path, model).layer("2").keys
    torch.testing.assert_close(found, torch.cat(keys).to(found.dtype), rtol=1e-3, atol=1e-3)


def test_batches_without_rows_one_after_the_other(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for number in range(6):
            rows = 0 if number % 4 else 3
            recorder.batch(sample_id=torch.arange(rows))
            optimizer.zero_grad()
            model(torch.randn(rows, 4)).square().sum().backward()
            optimizer.step()
    assert dualform.open(path, model).verify().passed


def test_an_optimizer_of_which_nothing_is_recorded(path):
    model = network(4, 8, 2)
    first, second = sgd(model[0]), sgd(model[2])
    with dualform.record(model, [first, second], path, layers=["0"]) as recorder:
        for ids, x, y in batches(5):
            recorder.batch(sample_id=ids)
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            first.step()
            second.step()
    assert dualform.open(path, model).verify().passed


def test_a_parameter_outside_its_module_beside_a_frozen_one(path):
    """As many parameters are reached as the modules that were called have, but they are others."""
    model = nn.ModuleDict({"seen": nn.Linear(4, 4), "past": nn.Linear(4, 4)})
    model["seen"].bias.requires_grad_(False)
    model["past"].weight.requires_grad_(False)
    optimizer = sgd(model)
    x = torch.randn(5, 4)
    with (
        pytest.raises(UnexplainedError, match="past"),
        dualform.record(model, optimizer, path) as recorder,
    ):
        for number in range(3):
            recorder.batch(sample_id=torch.arange(5) + number)
            optimizer.zero_grad()
            (F.linear(x, model["past"].weight, model["past"].bias) + model["seen"](x)).square().sum().backward()
            optimizer.step()


def test_a_marked_step_keeps_its_factors(path):
    """What was found of the gradients is written down, whatever is looked at between."""
    model, factors = network(4, 8, 2), []
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, on_unexplained="mark") as recorder:
        for number, (ids, x, y) in enumerate(batches(6)):
            if number == 3:
                with torch.no_grad():
                    model[0].weight.mul_(1.5)
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            factors.append(min(1.0, 0.1 / (float(norm) + 1e-6)))
            optimizer.step()
    dual = dualform.open(path, model)
    assert list(dual.store.manifest.inexact) == ["0"]
    updates = dual.store.updates
    for number, factor in enumerate(factors):
        found = updates.filter(pl.col("step") == number)["factors"].explode().to_list()
        assert found == pytest.approx([factor] * 4, rel=1e-5), number
        residuals = updates.filter(pl.col("step") == number)["residual"].to_list()
        assert max(residuals) < 1e-4


def _other_dictionary(optimizer, parameter):
    optimizer.state[parameter] = {"momentum_buffer": optimizer.state[parameter]["momentum_buffer"].clone()}


def _other_tensor(optimizer, parameter):
    optimizer.state[parameter]["momentum_buffer"] = optimizer.state[parameter]["momentum_buffer"].clone()


def _other_numbers(optimizer, parameter):
    optimizer.state[parameter]["momentum_buffer"].mul_(2)


def _another_state(optimizer, parameter):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("change", [_other_dictionary, _other_tensor, _other_numbers, _another_state])
def test_another_optimizer_state_between_steps_is_told(path, change):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with (
        pytest.raises(UnexplainedError, match="optimizer state replaced since the last step"),
        dualform.record(model, optimizer, path) as recorder,
    ):
        train(model, optimizer, recorder, batches(4))
        change(optimizer, model[2].weight)
        train(model, optimizer, recorder, batches(1))


def test_non_finite_values_are_recorded_and_told(path):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for number, (ids, x, y) in enumerate(batches(5)):
            train(model, optimizer, recorder, [(ids, x * (float("nan") if number == 3 else 1), y)])
    dual = dualform.open(path, model)
    assert dual.end_step == 5
    assert dual.info()["not_finite_from"] == {"0.weight": 3, "0.bias": 3, "2.weight": 3, "2.bias": 3}
    certificate = dual.verify()
    assert not certificate.passed
    assert "not finite from step 3" in certificate.frame["reason"][0]
    assert dual.at(3).end_step == 3


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_batches_and_batches_of_one(path, rows):
    model = network(4, 8, 2)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for number, (ids, x, y) in enumerate(batches(5)):
            some = slice(0, rows if number % 2 else 6)
            recorder.batch(sample_id=ids[some], name=[f"sample {i}" for i in ids[some].tolist()])
            optimizer.zero_grad()
            F.mse_loss(model(x[some]), y[some], reduction="sum").backward()
            optimizer.step()
    assert_exact(path, model)
    assert dualform.open(path).rows.height == 18 + 2 * rows


def test_negative_and_repeated_ids_and_many_strings(path):
    model = network(4, 2)
    optimizer = sgd(model, lr=1e-6)
    count = 25_000
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    with dualform.record(model, optimizer, path) as recorder:
        for number in range(4):
            recorder.batch(sample_id=torch.arange(count) % 7 - 3, name=[f"distinct {number} {i}" for i in range(count)])
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    dual = dualform.open(path, model)
    assert dual.rows["name"].n_unique() == 100_000
    totals = dual.attend(x[:2])["0"].total("sample_id")
    assert totals["sample_id"].unique().sort().to_list() == [-3, -2, -1, 0, 1, 2, 3]
    assert dual.store.key_count("0") == count  # the same inputs four times, stored once


def test_no_batch_call_is_an_error_at_the_step(path):
    model = network(4, 2)
    optimizer = sgd(model)
    with (
        pytest.raises(BatchError, match=r"no recorder.batch\(\) call"),
        dualform.record(model, optimizer, path),
    ):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()


def test_training_again_without_a_new_batch_call_is_an_error(path):
    model = network(4, 2)
    optimizer = sgd(model)
    with (
        pytest.raises(BatchError, match="without a new"),
        dualform.record(model, optimizer, path) as recorder,
    ):
        recorder.batch(sample_id=[1, 2, 3])
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
