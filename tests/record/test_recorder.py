"""What is recorded: layers, types, queues; and that training stays the same."""

import gc
import weakref

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, parametrizations

import dualform
from dualform.errors import RecordingError
from dualform.store.writer import Writer
from recorded_samples import INPUTS, LABELS, record
from training import FEATURES, SAMPLES, assert_exact, network, samples, sgd, train

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
