"""Questions and the memory of a large model: one copy of what was trained at most, none of the frozen base."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform

STEPS, ROWS, WIDTH = 6, 8, 40


class Adapted(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it, named as PEFT names them."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_A = nn.Linear(WIDTH, 2, bias=False)
        self.lora_B = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """A store of several epochs, and the model."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), nn.Tanh(), Adapted())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    x = torch.randn(ROWS, WIDTH)
    path = tmp_path_factory.mktemp("copies") / "run"
    with dualform.record(model, optimizer, path) as recorder:
        for step in range(STEPS):
            rows = torch.arange(ROWS).roll(step)
            recorder.batch(sample_id=rows)
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), rows).backward()
            optimizer.step()
    return path, model, x


@pytest.fixture
def copies(monkeypatch):
    """How often modules at the top were copied deeply, and the names of what was copied with them."""
    found = {"models": 0, "numbers": 0}
    original_copy = copy.deepcopy
    original_parameter = nn.Parameter.__deepcopy__

    def counted(value, memo=None, *others):
        if type(value) is nn.Sequential:
            found["models"] += 1
        return original_copy(value, memo, *others)

    def counted_parameter(self, memo):
        if id(self) not in memo:
            found["numbers"] += self.numel()
        return original_parameter(self, memo)

    monkeypatch.setattr(copy, "deepcopy", counted)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", counted_parameter)
    return found


QUESTIONS = {
    "attend": lambda dual, x: dual.attend(x)["0.lora_A"].total("sample_id"),
    "contributions": lambda dual, x: dual.contributions(x, target=1).total("sample_id"),
    "influence": lambda dual, x: dual.influence(x, target=1).total("sample_id"),
    "influence of the model's answer": lambda dual, x: dual.influence(x).total("sample_id"),
    "a moment": lambda dual, x: dual.at(3).model(),
    "masked": lambda dual, x: dual.masked(drop="sample_id = 2"),
    "verify": lambda dual, x: dual.verify(),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_copies_what_was_trained_once_at_most_and_never_the_base(name, recording, copies):
    path, model, x = recording
    dual = dualform.open(path, model)
    QUESTIONS[name](dual, x[:2])
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert copies["models"] <= 1
    assert copies["numbers"] <= trained


def test_the_influence_of_several_segments_is_asked_of_their_own_weights(recording):
    path, model, x = recording
    dual = dualform.open(path, model)
    both = dual.influence(x[:2], target=1, segments=[(0, 3), (3, 6)]).total("sample_id")
    parts = [dual.influence(x[:2], target=1, segments=[part]).total("sample_id") for part in [(0, 3), (3, 6)]]
    expected = parts[0]["total"] + parts[1]["total"]
    assert both["total"].to_list() == pytest.approx(expected.to_list(), rel=1e-5)


def test_recording_copies_nothing_of_the_base(tmp_path, recording, copies):
    _, model, x = recording
    adapted = copy.deepcopy(model)
    copies.update(models=0, numbers=0)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.01)
    with dualform.record(adapted, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=range(ROWS))
        F.cross_entropy(adapted(x), torch.arange(ROWS)).backward()
        optimizer.step()
    assert copies == {"models": 0, "numbers": 0}
    assert "proved" in str(dualform.open(tmp_path / "run", adapted).verify())
