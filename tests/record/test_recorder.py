"""Training loops of all kinds, each trained for real, recorded, and proved."""

import copy
import gc
import weakref

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations

import dualform
from dualform.errors import BatchError, RecordingError, UnexplainedError
from dualform.store.writer import Writer
from training import (
    FEATURES,
    SAMPLES,
    assert_exact,
    assert_same_weights,
    checkpoint,
    network,
    samples,
    sgd,
    train,
)

INPUTS, LABELS = samples()


def record(model, path, optimizer=None, **settings):
    optimizer = sgd(model) if optimizer is None else optimizer
    return dualform.record(model, optimizer, path, **{"dtype": "float64", **settings})


def slot_frame(dual, layer):
    """Every slot with its address and columns, in the order of the slots."""
    query = torch.zeros(1, dual.layer(layer).keys.shape[1], dtype=torch.float64)
    found = dualform.open(dual.store.folder).attend({layer: query})[layer].top(10**6)
    return found.sort("slot")


# What a step can look like


@pytest.mark.parametrize("microbatches", [2, 3])
@pytest.mark.parametrize("averaged", ["in the loss", "in the gradient"])
def test_gradient_accumulation(tmp_path, microbatches, averaged):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for step in range(4):
            optimizer.zero_grad()
            for part in range(microbatches):
                ids = torch.arange(3) + 3 * (part + step % 2)
                recorder.batch(sample_id=ids)
                loss = F.cross_entropy(model(INPUTS[ids]), LABELS[ids])
                (loss / microbatches if averaged == "in the loss" else loss).backward()
            if averaged == "in the gradient":
                for parameter in model.parameters():
                    parameter.grad /= microbatches
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert_exact(dual)
    slots = slot_frame(dual, "2")
    assert slots["backward"].to_list() == sorted(list(range(microbatches)) * 3) * 4
    assert torch.equal(dual.layer("0").keys, INPUTS[slots["sample_id"].to_list()])


def test_clipping_by_norm(tmp_path):
    norms = []
    run = train(tmp_path / "run", after_backward=lambda m: norms.append(clip_grad_norm_(m.parameters(), 0.05)))
    assert min(norms) > 0.05
    assert_exact(run.dual)
    assert_same_weights(run.dual.at(3).model(), run.checkpoints[3])


def test_accumulation_with_clipping_of_the_sum(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for _ in range(4):
            optimizer.zero_grad()
            for ids in (torch.arange(4), torch.arange(4, 9)):
                recorder.batch(sample_id=ids)
                F.cross_entropy(model(INPUTS[ids]), LABELS[ids]).backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    assert_exact(dualform.open(tmp_path / "run", model))


def test_gradients_scaled_and_scaled_back(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            (1024 * F.cross_entropy(model(INPUTS), LABELS)).backward()
            for parameter in model.parameters():
                parameter.grad /= 1024
            optimizer.step()
    assert_exact(dualform.open(tmp_path / "run", model))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_backward_pass_that_was_thrown_away(tmp_path, set_to_none):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for _ in range(3):
            for ids in (torch.arange(4), torch.arange(4, 9)):
                recorder.batch(sample_id=ids)
                optimizer.zero_grad(set_to_none=set_to_none)
                F.cross_entropy(model(INPUTS[ids]), LABELS[ids]).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert_exact(dual)
    assert dual.rows["sample_id"].unique().to_list() == [4, 5, 6, 7, 8]


def test_a_gradient_by_autograd_grad_does_not_count(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            inputs = INPUTS.clone().requires_grad_()
            torch.autograd.grad(model(inputs).sum(), inputs)
            F.cross_entropy(model(INPUTS), LABELS).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert_exact(dual)
    assert dual.layer("0").slots == 3 * SAMPLES


@pytest.mark.parametrize("named", [False, True])
def test_a_step_with_a_closure(tmp_path, named):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:

        def closure():
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(INPUTS), LABELS)
            loss.backward()
            return loss

        losses = [optimizer.step(closure=closure) if named else optimizer.step(closure) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert_exact(dualform.open(tmp_path / "run", model))


def test_rows_of_another_number_in_each_step(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for rows in (5, 1, SAMPLES, 0, 3):
            recorder.batch(sample_id=torch.arange(rows))
            optimizer.zero_grad()
            F.cross_entropy(model(INPUTS[:rows]), LABELS[:rows], reduction="sum").backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert_exact(dual)
    assert dual.rows["step"].value_counts().sort("step")["count"].to_list() == [5, 1, 12, 3]
    assert dual.info()["steps"] == 5


def test_two_networks_with_their_own_optimizers_trained_in_turn(tmp_path):
    """As in adversarial training: the second's loss goes through the first, whose gradients are thrown away."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"judge": nn.Linear(FEATURES, 1), "maker": nn.Linear(3, FEATURES)}).double()
    judging = torch.optim.SGD(model["judge"].parameters(), lr=0.1, momentum=0.9)
    making = torch.optim.SGD(model["maker"].parameters(), lr=0.1, momentum=0.5)
    with record(model, tmp_path / "run", [judging, making]) as recorder:
        for _ in range(4):
            noise = torch.randn(SAMPLES, 3).double()
            recorder.batch(sample_id=range(SAMPLES))
            judging.zero_grad()
            F.softplus(model["judge"](model["maker"](noise).detach())).mean().backward()
            judging.step()
            recorder.batch(sample_id=range(SAMPLES))
            making.zero_grad()
            F.softplus(-model["judge"](model["maker"](noise))).mean().backward()
            making.step()
    dual = dualform.open(tmp_path / "run", model)
    assert_exact(dual)
    assert dual.layer("judge").slots == dual.layer("maker").slots == 4 * SAMPLES


# What a layer can go through


class Reused(nn.Module):
    """One linear map, used as often as asked."""

    def __init__(self, times):
        super().__init__()
        self.times = times
        self.map = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, 4)

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.map(x))
        return self.head(x)


def test_a_module_used_several_times_in_a_step(tmp_path):
    torch.manual_seed(0)
    run = train(tmp_path / "run", model=Reused(3).double(), steps=3)
    assert_exact(run.dual)
    slots = slot_frame(run.dual, "map")
    assert slots["call"].to_list() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2] * 3
    # the first call sees the data, so call numbers are in the order of the forward pass
    ids = slots.filter(pl.col("call") == 0)["sample_id"].to_list()
    first = run.dual.layer("map").keys[slots.filter(pl.col("call") == 0)["slot"].to_list()]
    assert torch.equal(first, INPUTS[ids])


def test_a_frozen_layer_keeps_still_and_may_be_thawed(tmp_path):
    model = network()
    model[0].requires_grad_(False)
    run = train(tmp_path / "run", model=model, after_step=lambda step: model[0].requires_grad_(step >= 2), steps=6)
    assert_exact(run.dual)
    slots = slot_frame(run.dual, "0")
    assert slots["step"].unique().sort().to_list() == [3, 4, 5]
    assert torch.equal(run.checkpoints[3]["0.weight"], run.checkpoints[0]["0.weight"])
    assert_same_weights(run.dual.at(5).model(), run.checkpoints[5])


def test_frozen_in_the_middle(tmp_path):
    model = network()
    run = train(tmp_path / "run", model=model, after_step=lambda step: model[2].requires_grad_(step < 2), steps=6)
    assert_exact(run.dual)
    assert_same_weights(run.dual.at(5).model(), run.checkpoints[5])


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_only_one_parameter_of_a_layer_is_trained(tmp_path, frozen):
    model = network()
    getattr(model[2], frozen).requires_grad_(False)
    run = train(tmp_path / "run", model=model)
    assert_exact(run.dual)
    assert_same_weights(run.dual.at(4).model(), run.checkpoints[4])


class Sometimes(nn.Module):
    """Takes a detour through a layer of its own in some steps."""

    def __init__(self):
        super().__init__()
        self.stem, self.detour, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = torch.tanh(self.stem(x))
        return self.head(self.detour(x) if self.calls % 3 == 0 else x)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_layer_skipped_in_some_steps(tmp_path, set_to_none):
    """A gradient that is None stops the momentum of a layer; a zero gradient does not."""
    torch.manual_seed(0)
    model = Sometimes().double()
    optimizer = sgd(model)
    checkpoints = [checkpoint(model)]
    with record(model, tmp_path / "run", optimizer) as recorder:
        for _ in range(8):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad(set_to_none=set_to_none)
            F.cross_entropy(model(INPUTS), LABELS).backward()
            optimizer.step()
            checkpoints.append(checkpoint(model))
    dual = dualform.open(tmp_path / "run", model)
    assert_exact(dual)
    assert_same_weights(dual.at(7).model(), checkpoints[7])
    assert slot_frame(dual, "detour")["step"].unique().to_list() == [2, 5]
    assert torch.equal(checkpoints[4]["detour.weight"], checkpoints[3]["detour.weight"]) is set_to_none


@pytest.mark.parametrize("no_grad", [True, False])
@pytest.mark.parametrize("rows", [3, 5, SAMPLES])
def test_evaluation_in_the_middle_of_training(tmp_path, no_grad, rows):
    model = network()

    def evaluate(_):
        model.eval()
        with torch.set_grad_enabled(not no_grad):
            F.cross_entropy(model(INPUTS[:rows]), LABELS[:rows])
        model.train()

    run = train(tmp_path / "run", model=model, after_step=evaluate)
    assert_exact(run.dual)
    assert run.dual.layer("0").slots == 6 * 5


@pytest.mark.parametrize("no_grad", [True, False])
def test_evaluation_between_batch_and_forward(tmp_path, no_grad):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(5))
            with torch.set_grad_enabled(not no_grad):
                model(INPUTS[5:])
            optimizer.zero_grad()
            F.cross_entropy(model(INPUTS[:5]), LABELS[:5]).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert_exact(dual)
    assert torch.equal(dual.layer("0").keys, INPUTS[:5].repeat(3, 1))


def test_a_copy_of_the_model_made_and_run_in_the_middle(tmp_path):
    model = network()
    copies = []

    def keep_a_copy(_):
        copies.append(copy.deepcopy(model))
        copies[-1](INPUTS)

    run = train(tmp_path / "run", model=model, after_step=keep_a_copy, steps=3)
    assert_exact(run.dual)
    for number, copied in enumerate(copies):
        assert_same_weights(copied, run.checkpoints[number + 1])


@pytest.mark.parametrize("bias", [True, False])
def test_with_and_without_a_bias(tmp_path, bias):
    run = train(tmp_path / "run", model=network(bias=bias))
    assert_exact(run.dual)
    assert ("0.bias" in run.dual.info()["layers"][0]["parameters"]) is bias


def test_an_activation_in_place(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(inplace=True), nn.Linear(7, 4)).double()
    assert_exact(train(tmp_path / "run", model=model).dual)


def test_the_users_buffers_may_be_used_again(tmp_path):
    model = network()
    optimizer = sgd(model)
    inputs, ids = torch.empty(4, FEATURES, dtype=torch.float64), torch.empty(4, dtype=torch.int64)
    expected = []
    with record(model, tmp_path / "run", optimizer) as recorder:
        for step in range(3):
            ids.copy_(torch.arange(4) + step)
            inputs.copy_(INPUTS[ids])
            expected.append(INPUTS[ids])
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), LABELS[ids]).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert torch.equal(dual.layer("0").keys, torch.cat(expected))
    assert dual.rows["sample_id"].to_list() == [0, 1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 5]


def test_a_gradient_of_exactly_zero(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for factor in (1.0, 0.0, 1.0):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            (factor * F.cross_entropy(model(INPUTS), LABELS)).backward()
            optimizer.step()
    assert_exact(dualform.open(tmp_path / "run", model))


def test_a_bias_that_moves_on_rounding_noise_alone(tmp_path):
    """Before batch normalisation a bias has no true gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 4))
    run = train(tmp_path / "run", model=model, precision=torch.float32, dtype="float32", rows=8, steps=10)
    assert run.dual.verify().passed, str(run.dual.verify())


# What is left out


def test_the_layers_left_out_are_named_once_and_kept_in_the_store(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "good": nn.Linear(FEATURES, 4),
            "parametrised": parametrizations.weight_norm(nn.Linear(4, 4)),
            "forgotten": nn.Linear(4, 4),
            "scaled": nn.PReLU(4),
        }
    ).double()
    trained = [p for name, p in model.named_parameters() if not name.startswith("forgotten")]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    with pytest.warns(UserWarning, match="not recorded") as warned:
        recorder = record(model, tmp_path / "run", optimizer)
    with recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            x = INPUTS
            for layer in model.values():
                x = layer(x)
            F.cross_entropy(x, LABELS).backward()
            optimizer.step()
    assert len(warned) == 1
    for name in ("parametrised", "forgotten", "scaled.weight"):
        assert str(warned[0].message).count(f"'{name}':") == 1
    dual = dualform.open(tmp_path / "run", model)
    assert dual.layers == ["good"]
    left_out = dual.info()["left_out"]
    assert "parametrised" in left_out["parametrised"]
    assert "in no optimizer" in left_out["forgotten"]
    assert "no rule covers" in left_out["scaled.weight"]
    assert_exact(dual)
    with pytest.raises(
        dualform.errors.UnknownLayerError, match=r"'parametrised' was not recorded: its weight is param"
    ):
        dual.layer("parametrised")


def test_a_layer_that_is_never_called_is_named_and_left_out(tmp_path):
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.spare = network(), nn.Linear(3, 3).double()

        def forward(self, x):
            return self.body(x)

    with pytest.warns(UserWarning, match=r"'?spare'?.*never (called|used)"):
        run = train(tmp_path / "run", model=Skipping(), steps=2)
    assert "spare" in run.dual.info()["left_out"]
    assert run.dual.layers == ["body.0", "body.2"]
    assert_exact(run.dual)


def test_layers_chosen_by_glob(tmp_path):
    run = train(tmp_path / "run", layers="2")
    assert run.dual.layers == ["2"]
    assert_exact(run.dual)


# Training is the same


def noisy_training(path):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, 7), nn.Dropout(0.3), nn.ReLU(), nn.Linear(7, 4))
    optimizer = sgd(model)
    recorder = None if path is None else dualform.record(model, optimizer, path)
    for _ in range(6):
        ids = torch.randint(0, SAMPLES, (5,))
        if recorder is not None:
            recorder.batch(sample_id=ids)
        optimizer.zero_grad()
        F.cross_entropy(model(INPUTS[ids].float()), LABELS[ids]).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if recorder is not None:
            recorder.log(x=1.0)
    if recorder is not None:
        recorder.close()
    gradients = [p.grad for p in model.parameters()]
    buffers = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    return model.state_dict(), gradients + buffers, torch.random.get_rng_state(), np.random.get_state()[1]


def test_training_is_bitwise_the_same_with_and_without_the_recorder(tmp_path):
    weights, others, state, numpy_state = noisy_training(tmp_path / "run")
    expected, expected_others, expected_state, expected_numpy = noisy_training(None)
    for name, value in weights.items():
        assert torch.equal(value, expected[name]), name
    assert all(torch.equal(one, other) for one, other in zip(others, expected_others, strict=True))
    assert torch.equal(state, expected_state)
    assert np.array_equal(numpy_state, expected_numpy)


def test_model_and_optimizer_are_left_as_they_were(tmp_path):
    model = network()
    optimizer = sgd(model)

    def hooks():
        modules = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
        tensors = [dict(p._post_accumulate_grad_hooks or {}) for p in model.parameters()]
        steps = (dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks))
        return modules, tensors, steps

    before = hooks()
    keys = list(model.state_dict())
    train(tmp_path / "run", model=model, optimizer=optimizer, steps=2)
    assert hooks() == before
    assert list(model.state_dict()) == keys


def test_nothing_holds_the_model_after_closing(tmp_path):
    run = train(tmp_path / "run", steps=2)
    model = weakref.ref(run.model)
    del run
    gc.collect()
    assert model() is None


# dtype and keep


def train_in_float32(path, dtype):
    return train(
        path,
        precision=torch.float32,
        dtype=dtype,
        steps=20,
        after_backward=lambda model: clip_grad_norm_(model.parameters(), 0.3),
    ).dual


# A float16 number is off by up to 2⁻¹¹ = 4.9e-4; larger trainings average that away
@pytest.mark.parametrize(("dtype", "bar"), [("float64", 1e-5), ("float32", 1e-5), ("float16", 2**-11)])
def test_the_bar_of_each_dtype_for_a_float32_training(tmp_path, dtype, bar):
    certificate = train_in_float32(tmp_path / "run", dtype).verify()
    assert certificate.passed, str(certificate)
    above = certificate.frame.filter((pl.col("gap") > bar) & (pl.col("distance") > 4 * pl.col("floor")))
    assert above.is_empty(), str(certificate)


def test_float16_keeps_every_slot_within_a_thousandth(tmp_path):
    half = train_in_float32(tmp_path / "half", "float16")
    single = train_in_float32(tmp_path / "single", "float32")
    for layer in ("0", "2"):
        errors, expected = (
            torch.cat([chunk.errors(torch.float64) for chunk in dual.store.chunks(layer)]) for dual in (half, single)
        )
        assert len(expected) == 20 * 5
        assert ((errors - expected).norm(dim=1) / expected.norm(dim=1)).max() <= 1e-3
        keys, expected = half.layer(layer).keys, single.layer(layer).keys
        assert ((keys - expected).norm(dim=1) / expected.norm(dim=1)).max() <= 1e-3


def test_float16_keeps_tiny_error_signals(tmp_path):
    """A loss scaled down to 1e-9 has error signals far below float16's range."""
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e8)
    inputs, labels = samples(torch.float32)
    with dualform.record(model, optimizer, tmp_path / "run", dtype="float16") as recorder:
        for _ in range(5):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            (1e-9 * F.cross_entropy(model(inputs), labels)).backward()
            optimizer.step()
    certificate = dualform.open(tmp_path / "run", model).verify()
    assert certificate.passed
    assert certificate.frame["gap"].max() <= 3e-4
    assert certificate.frame["movement"].min() > 1e-3


def test_keys_alone_answer_attention_and_say_what_they_cannot(tmp_path):
    slots, keys = train(tmp_path / "slots").dual, train(tmp_path / "keys", keep="keys").dual
    assert torch.equal(slots.layer("2").keys, keys.layer("2").keys)
    assert keys.attend(INPUTS)["2"].top(3).equals(slots.attend(INPUTS)["2"].top(3))
    assert keys.info()["keep"] == "keys"
    assert keys.info()["bytes"] < slots.info()["bytes"]
    for question in (
        keys.verify,
        lambda: keys.contributions(INPUTS),
        lambda: keys.masked(only=pl.col("label") == 1),
        lambda: keys.at(3).model(),
        lambda: keys.layer("2").values,
    ):
        with pytest.raises(dualform.errors.NotRecordedError, match=r'keys only.*keep="slots"'):
            question()


@pytest.mark.parametrize(("setting", "value"), [("dtype", "float8"), ("keep", "everything")])
def test_a_setting_that_is_none_of_those_allowed(tmp_path, setting, value):
    with pytest.raises(RecordingError, match=rf"{setting}='{value}': expected one of.*(float16|slots).*(float64|keys)"):
        record(network(), tmp_path / "run", **{setting: value})


# The queue


@pytest.mark.parametrize("queue_bytes", [1, 5_000])
def test_a_tiny_queue_makes_training_wait_and_loses_nothing(tmp_path, queue_bytes):
    small = train(tmp_path / "small", queue_bytes=queue_bytes, chunk_bytes=1 << 20, steps=12)
    large = train(tmp_path / "large", steps=12)
    assert_exact(small.dual)
    assert torch.equal(small.dual.layer("2").keys, large.dual.layer("2").keys)
    assert small.dual.rows.equals(large.dual.rows)


def test_no_more_than_the_queue_is_held(tmp_path, monkeypatch):
    held = []
    original = Writer.put

    def put(writer, *args):
        original(writer, *args)
        held.append(writer.held_bytes)

    monkeypatch.setattr(Writer, "put", put)
    train(tmp_path / "run", queue_bytes=20_000, steps=40)
    assert len(held) == 40
    assert max(held) <= 20_000


# Rows, columns, log


def test_columns_reach_their_slots(tmp_path, trained):
    slots = slot_frame(trained.dual, "0")
    ids = torch.cat(trained.ids)
    assert slots["sample_id"].to_list() == ids.tolist()
    assert slots["label"].to_list() == LABELS[ids].tolist()
    assert slots["task"].to_list() == ["early"] * 15 + ["late"] * 15
    assert slots["step"].to_list() == sorted(list(range(6)) * 5)
    assert torch.equal(trained.dual.layer("0").keys, INPUTS[ids])


def test_log_is_kept_beside_its_step(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for step in range(3):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(INPUTS), LABELS)
            loss.backward()
            recorder.log(before=step, loss=loss.item())  # of the coming step
            optimizer.step()
            if step != 1:
                recorder.log(after=10 * step)
    log = dualform.open(tmp_path / "run", model).log
    assert log["step"].to_list() == [0, 1, 2]
    assert log["before"].to_list() == [0.0, 1.0, 2.0]
    assert log["after"].to_list() == [0.0, None, 20.0]
    assert log["loss"].is_sorted(descending=True)


@pytest.mark.parametrize("made", [float, torch.tensor, np.float32, lambda x: torch.tensor(x, requires_grad=True)])
def test_log_takes_a_number_of_any_make(tmp_path, made):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        recorder.batch(sample_id=range(SAMPLES))
        F.cross_entropy(model(INPUTS), LABELS).backward()
        optimizer.step()
        recorder.log(loss=made(0.5))
    assert dualform.open(tmp_path / "run").log["loss"].to_list() == [0.5]


def test_no_batch_call(tmp_path):
    model = network()
    optimizer = sgd(model)
    before = checkpoint(model)
    with record(model, tmp_path / "run", optimizer):
        F.cross_entropy(model(INPUTS), LABELS).backward()
        with pytest.raises(BatchError, match=r"no recorder\.batch\(\) call.*recorder\.batch\(sample_id"):
            optimizer.step()
    assert_same_weights(model, before, atol=0)


def test_columns_without_a_name(tmp_path):
    model = network()
    with dualform.record(model, sgd(model), tmp_path / "run") as recorder:
        with pytest.raises(BatchError, match=r"by name: recorder\.batch\(sample_id=ids"):
            recorder.batch([1, 2, 3])
        assert "nothing is sealed yet" in repr(dualform.open(tmp_path / "run"))
    assert "sealed" not in repr(dualform.open(tmp_path / "run"))


def test_no_new_batch_call(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        recorder.batch(sample_id=range(SAMPLES))
        F.cross_entropy(model(INPUTS), LABELS).backward()
        optimizer.step()
        optimizer.zero_grad()
        F.cross_entropy(model(INPUTS), LABELS).backward()
        with pytest.raises(BatchError, match=r"without a new recorder\.batch\(\) call"):
            optimizer.step()


def test_the_wrong_number_of_rows(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        recorder.batch(sample_id=range(SAMPLES - 1))
        F.cross_entropy(model(INPUTS), LABELS).backward()
        with pytest.raises(
            BatchError, match=r"announced 11 rows.*given tensors of shapes \(12, 5\).*one entry for each"
        ):
            optimizer.step()


def test_a_step_that_was_refused_is_not_in_the_store(tmp_path):
    model = network()
    optimizer = sgd(model)
    with record(model, tmp_path / "run", optimizer) as recorder:
        for _ in range(3):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            F.cross_entropy(model(INPUTS), LABELS).backward()
            optimizer.step()
        optimizer.zero_grad()
        F.cross_entropy(model(INPUTS), LABELS).backward()
        with pytest.raises(BatchError):
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert dual.info()["steps"] == 3
    assert dual.layer("0").slots == dual.layer("2").slots == 3 * SAMPLES
    assert_exact(dual)


def test_an_error_in_the_loop_leaves_a_store_up_to_there(tmp_path):
    def fail(step):
        if step == 3:
            raise ZeroDivisionError("mine")

    model = network()
    with pytest.raises(ZeroDivisionError, match="mine"):
        train(tmp_path / "run", model=model, after_step=fail)
    dual = dualform.open(tmp_path / "run", model)
    assert dual.info()["steps"] == 4
    assert "ZeroDivisionError" in dual.info()["ended"]
    assert_exact(dual)


def test_a_closed_recorder_says_so(tmp_path):
    recorder = record(network(), tmp_path / "run")
    recorder.close()
    recorder.close()
    for call in (lambda: recorder.batch(sample_id=[1]), lambda: recorder.log(loss=1.0)):
        with pytest.raises(RecordingError, match=r"is closed. Record into a new folder"):
            call()


def test_training_goes_on_after_closing(tmp_path):
    run = train(tmp_path / "run", steps=2)
    optimizer = sgd(run.model)
    F.cross_entropy(run.model(INPUTS), LABELS).backward()
    optimizer.step()
    assert run.dual.info()["steps"] == 2


def test_a_recording_without_a_step(tmp_path):
    model = network()
    with record(model, tmp_path / "run"):
        pass
    dual = dualform.open(tmp_path / "run", model)
    assert dual.info()["steps"] == 0
    assert dual.verify().passed
    assert_same_weights(dual.at(0).model(), model.state_dict(), atol=0)
    assert dual.attend(INPUTS)["0"].top(3).height == 0


def test_a_model_that_is_no_module(tmp_path):
    with pytest.raises(RecordingError, match=r"'dict'.*expected the nn\.Module"):
        dualform.record({}, sgd(network()), tmp_path / "run")


def test_batch_axis_for_a_layer_that_is_not_recorded(tmp_path):
    with pytest.raises(RecordingError, match=r"batch_axis names 'head'.*Recorded layers: '0', '2'"):
        record(network(), tmp_path / "run", batch_axis={"head": 1})


# What the audit finds


def break_the_step(path, change):
    model = network()
    optimizer = sgd(model)
    with record(model, path, optimizer) as recorder:
        for step in range(3):
            recorder.batch(sample_id=range(SAMPLES))
            optimizer.zero_grad()
            F.cross_entropy(model(INPUTS), LABELS).backward()
            if step == 2:
                change(model)
            optimizer.step()


def clip_values(model):
    clip_grad_value_(model.parameters(), 0.01)


def add_noise(model):
    model[2].weight.grad += 1e-6 * torch.randn(4, 7, dtype=torch.float64)


def use_outside(model):
    F.linear(INPUTS, model[0].weight).sum().backward()


@pytest.mark.parametrize(
    ("change", "name"), [(clip_values, r"[02]\.(weight|bias)"), (add_noise, r"2\.weight"), (use_outside, r"0\.weight")]
)
def test_a_gradient_that_the_slots_do_not_explain(tmp_path, change, name):
    with pytest.raises(UnexplainedError, match=rf"step 2.*'{name}'.*residual.*Likely causes.*clipped by value"):
        break_the_step(tmp_path / "run", change)


def through_data(model):
    model[0].weight.data.mul_(0.5)


def in_place(model):
    with torch.no_grad():
        model[2].bias.clamp_(-1e-9, 1e-9)


def load(model):
    model.load_state_dict(network(seed=5).state_dict())


@pytest.mark.parametrize("change", [through_data, in_place, load])
def test_weights_changed_by_something_else(tmp_path, change):
    with pytest.raises(UnexplainedError, match=r"step 2.*changed.*load_state_dict"):
        break_the_step(tmp_path / "run", change)


def test_weights_changed_after_the_last_step_are_not_taken_for_the_trained_ones(tmp_path):
    model = network()
    recorder = record(model, tmp_path / "run")
    through_data(model)
    with pytest.warns(UserWarning, match=r"changed.*last step"):
        recorder.close()


def test_the_audit_of_each_step_is_kept(tmp_path):
    run = train(tmp_path / "run", after_backward=lambda m: clip_grad_norm_(m.parameters(), 0.05))
    updates = run.dual.store.updates
    assert updates.height == 6 * 4
    assert updates["residual"].max() < 1e-13
    factors = updates["factors"].list.first()
    assert 0 < factors.min() <= factors.max() < 1  # clipped in each step
    by_step = updates.with_columns(factors).group_by("step").agg(pl.col("factors").max() / pl.col("factors").min())
    assert by_step["factors"].max() < 1 + 1e-10  # one factor for all parameters


# Which rows: a wrong name would leave every sum right


class Sequences(nn.Module):
    """Runs linear maps over sequences; `arrange` brings the input into the shape they see."""

    def __init__(self, arrange):
        super().__init__()
        self.arrange = arrange
        self.map = nn.Linear(3, 2)

    def forward(self, x):
        return self.map(self.arrange(x))


def sequences(rows, positions, *, first="rows"):
    """Vectors that say whose they are: (row, position, 1)."""
    row, position = torch.meshgrid(torch.arange(rows), torch.arange(positions), indexing="ij")
    x = torch.stack([row, position, torch.ones_like(row)], dim=-1).double()
    return x if first == "rows" else x.transpose(0, 1).contiguous()


def step_once(path, arrange, inputs, rows, model=None, **settings):
    torch.manual_seed(0)
    model = Sequences(arrange).double() if model is None else model
    optimizer = sgd(model)
    with record(model, path, optimizer, **settings) as recorder:
        recorder.batch(sample_id=torch.arange(rows) + 100)
        model(inputs).square().sum().backward()
        optimizer.step()
    return dualform.open(path, model)


def assert_every_slot_has_its_own_name(dual, positions):
    slots = slot_frame(dual, "map")
    keys = dual.layer("map").keys
    assert keys[:, 0].tolist() == [name - 100 for name in slots["sample_id"].to_list()]
    assert slots["slot_position"].max() == positions - 1
    assert_exact(dual)


def as_it_is(x):
    return x


def flatten(x):
    return x.reshape(-1, 3)


def flatten_and_change(x):
    return x.reshape(-1, 3) * 1.0


def turn_and_flatten(x):
    return x.transpose(0, 1).reshape(-1, 3)


@pytest.mark.parametrize("positions", [3, 4])  # 4: sequences as long as the batch
@pytest.mark.parametrize(
    "arrange",
    [
        as_it_is,
        flatten,
        flatten_and_change,
        turn_and_flatten,
        lambda x: x.transpose(0, 1),
        lambda x: x.unsqueeze(2),
        lambda x: x.transpose(0, 1).unsqueeze(1),
    ],
)
def test_rows_are_found_wherever_the_model_puts_them(tmp_path, arrange, positions):
    dual = step_once(tmp_path / "run", arrange, sequences(4, positions), 4)
    assert_every_slot_has_its_own_name(dual, positions)


@pytest.mark.parametrize("arrange", [as_it_is, flatten, flatten_and_change, lambda x: x.reshape(3, 1, 4, 3)])
def test_an_axis_other_than_the_first_is_not_taken_by_its_length(tmp_path, arrange):
    inputs = sequences(4, 3, first="positions")
    with pytest.raises(BatchError, match=r"announced 4 rows.*shapes \(3, 4, 3\).*record\(…, batch_axis=1\)"):
        step_once(tmp_path / "refused", arrange, inputs, 4)
    dual = step_once(tmp_path / "run", arrange, inputs, 4, batch_axis=1)
    assert_every_slot_has_its_own_name(dual, 3)


@pytest.mark.parametrize(
    ("arrange", "first", "positions", "axis"),
    [
        (as_it_is, "positions", 4, 1),
        (as_it_is, "rows", 4, 0),
        (flatten, "positions", 3, 1),
        (turn_and_flatten, "rows", 3, 1),
        (flatten, "rows", 3, 0),
    ],
)
def test_the_user_says_where_the_rows_are(tmp_path, arrange, first, positions, axis):
    inputs = sequences(4, positions, first=first)
    dual = step_once(tmp_path / "run", arrange, inputs, 4, batch_axis={"map": axis})
    assert_every_slot_has_its_own_name(dual, positions)


class Heads(nn.Module):
    """Flattened heads: (rows, positions, heads × 3) → (rows × positions × heads, 3)."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(3, 2)

    def forward(self, x):
        rows, positions, width = x.shape
        return self.map(x.reshape(rows * positions * (width // 3), 3)).reshape(rows, positions, -1)


def test_axes_are_counted_from_the_front(tmp_path):
    with pytest.raises(dualform.errors.RecordingError, match=r"batch_axis=\{'map': -3\}.*from the front"):
        step_once(tmp_path / "run", as_it_is, sequences(4, 4), 4, batch_axis={"map": -3})


def test_flattened_heads(tmp_path):
    inputs = sequences(4, 5).repeat(1, 1, 2)  # two heads, each with its row's number first
    torch.manual_seed(0)
    dual = step_once(tmp_path / "run", None, inputs, 4, model=Heads().double())
    assert_every_slot_has_its_own_name(dual, 10)


def test_a_column_for_each_position(tmp_path):
    torch.manual_seed(0)
    model = Sequences(as_it_is).double()
    optimizer = sgd(model)
    inputs = sequences(4, 3, first="positions")
    with record(model, tmp_path / "run", optimizer, batch_axis=1) as recorder:
        recorder.batch(sample_id=range(4), token=[[f"{r}/{p}" for p in range(3)] for r in range(4)])
        model(inputs).square().sum().backward()
        optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    slots, keys = slot_frame(dual, "map"), dual.layer("map").keys
    assert slots["token"].to_list() == [f"{int(row)}/{int(position)}" for row, position, _ in keys.tolist()]
    found = dual.attend(inputs, rows=4)["map"].total("token", where=pl.col("token") == "2/1")
    assert found.filter(pl.col("total") != 0)["token"].unique().to_list() == ["2/1"]
