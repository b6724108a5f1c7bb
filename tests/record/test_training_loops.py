"""Loops people really write: each trains for real, in float64 and in float32, and must verify to rounding."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.errors import BatchError, RecordingError, UnexplainedError
from dualform.record import passes
from plain_loops import assert_exact, batches, network, sgd

pytestmark = pytest.mark.usefixtures("precision")


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
