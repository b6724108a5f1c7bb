"""Recording, proofs and answers on each device of this machine, and on a fake one that refuses to mix its tensors with those of the CPU."""

import copy
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import devices
import dualform
from halves import require

SAMPLES, TIME, TOKENS, WIDTH, CLASSES = 12, 4, 7, 8, 3
pytestmark = pytest.mark.filterwarnings("ignore:not recorded, so taken from the snapshot:UserWarning")
LABELS = torch.arange(SAMPLES) % CLASSES
_random = torch.Generator().manual_seed(3)
TEXT = torch.randint(0, TOKENS, (SAMPLES, TIME), generator=_random)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, text):
        hidden = self.tokens(text)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head(self.norm(hidden).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, series):
        return self.head(self.lstm(series)[0][:, -1])


def perceptron():
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, CLASSES))


def convolutions():
    return nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


NETWORKS = {
    "perceptron": (perceptron, torch.randn(SAMPLES, WIDTH, generator=_random)),
    "convolutions": (convolutions, torch.randn(SAMPLES, 2, 4, 4, generator=_random)),
    "attention": (Attention, TEXT),
    "recurrent": (Recurrent, torch.randn(SAMPLES, TIME, WIDTH, generator=_random)),
}


@pytest.fixture(params=NETWORKS)
def network(request):
    make, inputs = NETWORKS[request.param]
    torch.manual_seed(0)
    return make(), inputs


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(path, model, inputs, optimizer=sgd, autocast=None, **settings):
    """Train on the device where the model and the inputs are; labels and numbers of samples stay on the CPU."""
    order = torch.Generator().manual_seed(1)
    made = optimizer(model)
    with dualform.record(model, made, path, **settings) as recorder:
        for _ in range(6):
            ids = torch.randint(0, SAMPLES, (5,), generator=order)
            recorder.batch(sample_id=ids, label=LABELS[ids])
            made.zero_grad()
            with torch.autocast(inputs.device.type, autocast, enabled=autocast is not None):
                output = model(inputs[ids.to(inputs.device)])
            F.cross_entropy(output.float(), LABELS[ids].to(inputs.device)).backward()
            made.step()
    return dualform.open(path, model)


def assert_proved(dual):
    certificate = dual.verify()
    assert certificate.passed, str(certificate)
    assert certificate.rows["assumed"].is_null().all(), str(certificate)


def assert_close(found, expected):
    """Equal up to the rounding of training in float32."""
    size = float(expected.detach().abs().max())
    torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=2e-3, atol=2e-3 * size)


def test_answers_are_those_of_training_with_64_bits_on_the_cpu(tmp_path, device, network):
    model, inputs = network
    wide_model = copy.deepcopy(model).double()
    wide = inputs.double() if inputs.is_floating_point() else inputs
    expected = train(tmp_path / "expected", wide_model, wide, dtype="float64")
    dual = train(tmp_path / "run", model.to(device), inputs.to(device))
    assert_proved(dual)
    assert dual.rows.equals(expected.rows)

    asked = inputs[:2].to(device)
    attention, attention_expected = dual.attend(asked), expected.attend(wide[:2])
    assert list(attention) == list(attention_expected)
    for layer in attention:
        assert_close(attention[layer].sums("label").totals, attention_expected[layer].sums("label").totals)
    for question in ("contributions", "influence"):
        found = getattr(dual, question)(asked, target=1).sums("sample_id").totals
        assert_close(found, getattr(expected, question)(wide[:2], target=1).sums("sample_id").totals)
    edited = dual.masked(drop="label = 1")(asked)
    assert edited.device.type == device.type
    assert_close(edited, expected.masked(drop="label = 1")(wide[:2]))


def test_inputs_on_the_cpu_are_moved_to_the_model(path, device, network):
    model, inputs = network
    dual = train(path, model.to(device), inputs.to(device), adamw)
    here, there = inputs[:2], inputs[:2].to(device)
    for question in (dual.contributions, dual.influence):
        found = question(here).top(3, by="sample_id")
        assert found.equals(question((there,)).top(3, by="sample_id"))
    layer = dual.layers[-1]
    assert dual.attend(here)[layer].top(3).equals(dual.attend(there)[layer].top(3))


def test_mixed_precision(path, device, network):
    require(torch.bfloat16)
    model, inputs = network
    options = {"dtype": "bfloat16", "totals": ["label"], "curvature": True}
    dual = train(path, model.to(device), inputs.to(device), adamw, torch.bfloat16, **options)
    assert_proved(dual)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, text):
        return self.head(self.lstm(self.tokens(text))[0])


@pytest.mark.parametrize("method", ["influence", "contribution"])
def test_sources_of_a_completion(path, device, method):
    torch.manual_seed(0)
    model = Language().to(device)
    optimizer = adamw(model)
    text = TEXT.to(device)
    with dualform.record(model, optimizer, path) as recorder:
        for _ in range(30):
            for ids in torch.arange(SAMPLES).split(4):
                recorder.batch(sample_id=ids)
                optimizer.zero_grad()
                batch = text[ids.to(device)]
                F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
                optimizer.step()
    dual = dualform.open(path, model)
    assert_proved(dual)
    prompt, completion = TEXT[5].split([3, 1])
    found = dual.sources(prompt, completion, method=method, k=3)
    assert found.documents == SAMPLES
    if method == "influence":
        assert found.frame["sample_id"][0] == 5


@pytest.mark.skipif(devices.LIBRARY in os.environ, reason="this is the fake device's own process")
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
def test_on_a_fake_device(tmp_path):
    """With 64 bits, as CUDA, and without, as MPS."""
    if not torch.__version__.startswith(devices.WRITTEN_FOR):
        pytest.skip(f"the fake device is written for PyTorch {devices.WRITTEN_FOR}")
    library = tmp_path / "device.so"
    devices.compile_fake_device(library, "c++")
    _run_on_fake_device(library, has_float64="1", chosen="device")
    _run_on_fake_device(library, has_float64="0", chosen="64_bits")


def _run_on_fake_device(library, *, has_float64, chosen):
    environment = {**os.environ, devices.LIBRARY: str(library), devices.FLOAT64: has_float64}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", chosen]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
