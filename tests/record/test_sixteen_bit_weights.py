"""Parameters in bfloat16 and float16: recorded as they are, with what their rounding lost."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.errors import UnexplainedError
from halves import require

DTYPES = [torch.bfloat16, torch.float16]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norm = nn.LayerNorm(16)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, 11)

    def forward(self, x):
        return self.head(self.hidden(self.norm(self.embed(x))).relu())


def train(path, dtype, optimizer, *, steps=20, accumulate=2, clip=1.0, edit=None):
    torch.manual_seed(0)
    model = Network().to(dtype)
    made = optimizer(model.parameters())
    generator = torch.Generator().manual_seed(1)
    with dualform.record(model, made, path) as recorder:
        for _ in range(steps):
            for _ in range(accumulate):
                x = torch.randint(0, 11, (4, 5), generator=generator)
                recorder.batch(sample_id=range(4))
                loss = F.cross_entropy(model(x).float().flatten(0, 1), x.flatten()) / accumulate
                loss.backward()
            if edit is not None:
                edit(model)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            made.step()
            made.zero_grad()
    return model


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


# Not float16 with AdamW: the squares of gradients underflow, so that Adam divides by eps alone
@pytest.mark.parametrize(
    ("dtype", "optimizer"), [(torch.bfloat16, momentum), (torch.float16, momentum), (torch.bfloat16, adamw)]
)
def test_slots_explain_what_training_did_beyond_rounding(tmp_path, dtype, optimizer):
    require(dtype)
    model = train(tmp_path / "run", dtype, optimizer)
    verified = dualform.open(tmp_path / "run", model).verify()
    frame = verified.frame.filter(verified.frame["parameter"].str.ends_with("weight"))
    assert verified.passed
    assert set(verified.frame["verdict"]) <= {"rounded", "pass"}
    matrices = frame.filter(frame["parameter"] != "norm.weight")  # at 1, small updates are lost
    assert matrices["explained"].min() > 0.9


def test_what_is_lost_is_told_as_a_fraction_with_the_cure(tmp_path):
    require(torch.bfloat16)
    # A step of 1e-4 is below the spacing of bfloat16 numbers near 0.1
    model = train(tmp_path / "run", torch.bfloat16, lambda p: torch.optim.AdamW(p, lr=1e-4))
    dual = dualform.open(tmp_path / "run", model)
    line = dual.verify().frame.filter(dual.verify().frame["parameter"] == "hidden.weight").to_dicts()[0]
    assert line["verdict"] == "rounded"
    assert line["explained"] < 0.95
    assert "rounding to bfloat16 is the rest: keep the weights in float32 and train under autocast" in line["reason"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_of_a_sixteen_bit_weight_that_was_changed_is_refused(tmp_path, dtype):
    require(dtype)

    def edit(model):
        model.hidden.weight.grad[:, 3] *= 1.5

    with pytest.raises(UnexplainedError, match=r"hidden\.weight"):
        train(tmp_path / "run", dtype, lambda p: torch.optim.SGD(p, lr=0.1), edit=edit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_questions_are_answered(tmp_path, dtype):
    require(dtype)
    model = train(tmp_path / "run", dtype, lambda p: torch.optim.SGD(p, lr=0.1))
    dual = dualform.open(tmp_path / "run", model)
    x = torch.arange(5).unsqueeze(0)
    target = lambda output: output[:, -1, 3].float()  # noqa: E731
    assert dual.attend(x)["head"].top(2).height
    assert dual.contributions(x, target=target)["head"].top(2).height
    assert dual.influence(x, target=target).top(2, by="sample_id").height == 2
    assert next(dual.masked(drop="sample_id = 1").parameters()).dtype == dtype


def test_parts_show_what_rounding_wrote(tmp_path):
    require(torch.bfloat16)
    model = train(tmp_path / "run", torch.bfloat16, lambda p: torch.optim.AdamW(p, lr=1e-3))
    dual = dualform.open(tmp_path / "run", model)
    x = torch.arange(5).unsqueeze(0)
    parts = dual.contributions(x, target=lambda output: output[:, -1, 3].float())["head"].parts().to_dicts()[0]
    # In the last layer, the remainder is rounding: that of training, and that of this forward pass in bfloat16
    assert abs(parts["rounding"]) > 1e-4
    assert abs(parts["remainder"] - parts["rounding"]) < 0.02 * abs(parts["target"]) + 0.01


def test_resuming_goes_on(tmp_path):
    require(torch.bfloat16)
    model = train(tmp_path / "run", torch.bfloat16, lambda p: torch.optim.SGD(p, lr=0.1), steps=3)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, made, tmp_path / "run", resume=True) as recorder:
        x = torch.arange(8).reshape(2, 4)
        recorder.batch(sample_id=range(2))
        F.cross_entropy(model(x).float().flatten(0, 1), x.flatten()).backward()
        made.step()
    assert dualform.open(tmp_path / "run", model).verify().passed


@pytest.mark.filterwarnings("ignore:not recorded:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_normalisation_with_frozen_statistics_is_recorded_and_asked(tmp_path, dtype):
    require(dtype)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)
    model[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(4, 5, dtype=dtype)
    labels = torch.tensor([0, 1, 2, 0])
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(3):
            recorder.batch(label=labels)
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels).backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert dual.verify().passed
    assert dual.contributions(x, target=0)["1"].top(2).height == 2 * len(x)
    assert dual.influence(x, target=0).top(2).height == 2 * len(x)
