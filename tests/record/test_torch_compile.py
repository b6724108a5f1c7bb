"""Models that are compiled by torch.compile are recorded as in eager mode."""

import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.errors import BatchError, UnexplainedError

INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(shutil.which("gcc") is None, reason="inductor needs a C++ compiler (gcc)")
)
LAYERS = ("embedding", "convolution", "hidden", "head")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # PyTorch about itself
    pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`"),
    pytest.mark.filterwarnings("ignore:Skipping serialization of"),  # PyTorch 2.6
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Network(nn.Module):
    """Uses one module twice, and activations in place."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=0)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.LayerNorm(4)
        self.batch_norm = nn.BatchNorm1d(4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, numbers):
        x = self.embedding(numbers)
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        x = torch.tanh_(self.norm(x)).mean(1)
        x = torch.tanh(self.hidden(self.batch_norm(x)))
        x = torch.relu_(self.hidden(x))
        return self.head(x)


def batches(steps=3, rows=5):
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        ids = torch.arange(rows) + rows * step
        yield (
            ids,
            torch.randint(0, 7, (rows, 6), generator=generator),
            torch.randint(0, 3, (rows,), generator=generator),
        )


def train(make, path, *, before=None, after=None, accumulate=1, autocast=False, **settings):
    """Train and record a model. before, after: compile it, before and after record()."""
    torch.manual_seed(0)
    model = make()
    called = before(model) if before else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(called, optimizer, path, **settings) as recorder:
        if after:
            called = after(model)
        for number, (ids, inputs, labels) in enumerate(batches()):
            recorder.batch(sample_id=ids)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = nn.functional.cross_entropy(called(inputs), labels)
            loss.backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


def attention(path, model):
    """The dual of a recording, and the attention weights of each layer, summed by sample."""
    dual = dualform.open(path, model)
    [(_, inputs, _)] = batches(1)
    answers = dual.attend(inputs)
    totals = [answers[layer].total("sample_id").sort("query", "position", "sample_id") for layer in LAYERS]
    return dual, {layer: total["total"].to_numpy() for layer, total in zip(LAYERS, totals, strict=True)}


def compiled_by(backend, **options):
    return lambda model: torch.compile(model, backend=backend, **options)


def compiled_in_place(model):
    model.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
def test_compiled_training_is_recorded_as_eager_training_is(tmp_path, backend, order):
    eager = train(Network, tmp_path / "eager")
    model = train(Network, tmp_path / "compiled", **{order: compiled_by(backend, fullgraph=True)})
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, msg=lambda text, name=name: f"{name}: {text}")
    _, expected = attention(tmp_path / "eager", eager)
    dual, found = attention(tmp_path / "compiled", model)
    for layer, weights in expected.items():
        np.testing.assert_allclose(found[layer], weights, rtol=1e-4, atol=1e-4, err_msg=layer)
    certificate = dual.verify()
    assert certificate.passed, certificate


def test_names_are_proved_if_record_gets_what_compile_returned(tmp_path):
    model = train(Network, tmp_path / "run", before=compiled_by("eager"))
    rows = dualform.open(tmp_path / "run", model).verify().rows
    assert rows["assumed"].null_count() == len(rows) == 6


def test_names_are_assumed_if_the_model_is_compiled_after_record(tmp_path):
    model = train(Network, tmp_path / "run", after=compiled_by("eager"))
    rows = dualform.open(tmp_path / "run", model).verify().rows
    assert rows["proved"].null_count() == len(rows) == 6
    assert all("compiled as a whole" in why for why in rows["why"])


def test_a_model_that_was_compiled_in_place(tmp_path):
    model = train(Network, tmp_path / "run", before=compiled_in_place)
    assert dualform.open(tmp_path / "run", Network()).verify().passed
    assert model._compiled_call_impl is not None


def test_a_compiled_part_of_a_model(tmp_path):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.compile(
                nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(24, 4)), backend="eager"
            )
            self.head = nn.Linear(4, 3)

        def forward(self, numbers):
            return self.head(self.body(numbers).relu())

    model = train(Whole, tmp_path / "run")
    certificate = dualform.open(tmp_path / "run", model).verify()
    assert certificate.passed
    assert certificate.rows["proved"].null_count() == 0


@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
def test_gradient_accumulation(tmp_path, backend):
    model = train(Network, tmp_path / "run", before=compiled_by(backend), accumulate=3)
    dual = dualform.open(tmp_path / "run", model)
    assert dual.info()["steps"] == 1
    assert dual.verify().passed


@pytest.mark.parametrize("before", [None, compiled_by("aot_eager")])
def test_autocast(tmp_path, before):
    def make():
        return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(24, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))

    model = train(make, tmp_path / "run", before=before, autocast=True)
    assert dualform.open(tmp_path / "run", model).verify().passed


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_a_compiled_model(tmp_path, reentrant):
    class Checkpointed(Network):
        def forward(self, numbers):
            x = self.embedding(numbers).mean(1)
            x = checkpoint(lambda x: torch.tanh(self.hidden(x)), x, use_reentrant=reentrant)
            return self.head(x)

    layers = ["embedding", "hidden", "head"]
    model = train(Checkpointed, tmp_path / "run", before=compiled_by("aot_eager"), layers=layers)
    assert dualform.open(tmp_path / "run", model).verify().passed


@pytest.mark.parametrize("cell", [nn.LSTM, nn.MultiheadAttention])
def test_modules_that_are_computed_once_more_run_outside_the_graph(tmp_path, cell):
    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 4)
            self.inner = nn.LSTM(4, 4) if cell is nn.LSTM else nn.MultiheadAttention(4, 2)
            self.head = nn.Linear(4, 3)

        def forward(self, numbers):
            x = self.embedding(numbers).transpose(0, 1)
            x = self.inner(x)[0] if cell is nn.LSTM else self.inner(x, x, x)[0]
            return self.head(x.mean(0))

    model = train(Computed, tmp_path / "run", before=compiled_by("aot_eager"))
    assert dualform.open(tmp_path / "run", model).verify().passed


def backward(model):
    [(_, inputs, labels)] = batches(1)
    model.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()


def test_a_model_that_has_run_compiled_before_it_is_recorded(tmp_path):
    def compiled_and_run(model):
        compiled = torch.compile(model, backend="eager")
        backward(compiled)
        model.zero_grad()
        return compiled

    model = train(Network, tmp_path / "run", before=compiled_and_run)
    assert dualform.open(tmp_path / "run", model).verify().passed


def test_two_compiled_models_of_one_class_are_recorded_in_turns(tmp_path):
    models = [Network(), Network()]
    compiled = [torch.compile(model, backend="eager") for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    recorders = []
    for number in (0, 1, 0, 1):
        if len(recorders) <= number:
            recorders.append(dualform.record(compiled[number], optimizers[number], tmp_path / str(number)))
        recorders[number].batch(sample_id=range(5))
        backward(compiled[number])
        optimizers[number].step()
    for number, model in enumerate(models):
        recorders[number].close()
        dual = dualform.open(tmp_path / str(number), model)
        assert dual.info()["steps"] == 2
        assert dual.verify().passed


def recorded_beside_another(path):
    """A recorded model whose hooks PyTorch ignores: another one of its class was compiled after record()."""
    model = torch.compile(Network(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = dualform.record(model, optimizer, path)
    backward(torch.compile(Network(), backend="eager"))
    recorder.batch(sample_id=range(5))
    backward(model)
    return optimizer, recorder


def test_hooks_that_the_compiler_ignores_are_an_error_at_the_first_step(tmp_path):
    optimizer, recorder = recorded_beside_another(tmp_path / "run")
    with recorder, pytest.raises(UnexplainedError, match=r"same class.* torch\.compiler\.reset\(\)"):
        optimizer.step()


def test_ignored_hooks_are_named_before_a_second_batch(tmp_path):
    _, recorder = recorded_beside_another(tmp_path / "run")
    with recorder, pytest.raises(BatchError, match=r"torch\.compiler\.reset\(\)"):
        recorder.batch(sample_id=range(5))


def test_the_model_goes_on_after_the_recorder_is_closed(tmp_path):
    """A compiled graph keeps its taps; they record nothing then."""
    torch.manual_seed(0)
    model = torch.compile(nn.Linear(3, 2), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 3)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=range(4))
        model(inputs).sum().backward()
        optimizer.step()
    model.zero_grad()
    model(inputs).sum().backward()
    torch.testing.assert_close(model.weight.grad, inputs.sum(0).expand(2, 3))
    assert recorder.step == 1


def test_a_recording_is_opened_with_a_compiled_model(tmp_path):
    model = train(Network, tmp_path / "run")
    compiled = torch.compile(Network(), backend="eager")
    dual = dualform.open(tmp_path / "run", compiled)
    [(_, inputs, _)] = batches(1)
    expected = dualform.open(tmp_path / "run", model).attend(inputs)["head"].best(3)
    np.testing.assert_array_equal(dual.attend(inputs)["head"].best(3).slots, expected.slots)
