import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.errors import ModelMismatchError, RecordingError


class Adapter(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it, named as PEFT names them."""

    def __init__(self, base_layer, rank=2):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Quantised(nn.Module):
    """A frozen linear layer whose weights are whole numbers."""

    in_features = 5
    out_features = 7

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 127, (7, 5), dtype=torch.int8), requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) / 127).T


def with_adapter(base=None):
    torch.manual_seed(0)
    first = Adapter(nn.Linear(5, 7) if base is None else base)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(7, 4).requires_grad_(False))


def train(model, path, steps=4, **settings):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    y = torch.arange(6) % 4
    with dualform.record(model, optimizer, path, **settings) as recorder:
        for _ in range(steps):
            recorder.batch(sample_id=range(6))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return x, y


def stored(path, step):
    snapshot = dualform.open(path).store.snapshot(step)
    return {name.removeprefix("model.") for name in snapshot if name.startswith("model.")}


def test_the_base_under_adapters_is_neither_stored_nor_listed(tmp_path):
    model = with_adapter()
    train(model, tmp_path / "run")
    dual = dualform.open(tmp_path / "run", model)
    adapters = {"0.lora_A.weight", "0.lora_B.weight"}
    assert stored(tmp_path / "run", 0) == adapters
    assert stored(tmp_path / "run", 4) == adapters
    assert dual.store.manifest.left_out == {}
    assert set(dual.store.manifest.base) == {"0.base_layer.weight", "0.base_layer.bias", "2.weight", "2.bias"}
    assert dual.verify().passed


def test_questions_share_the_memory_of_the_base_and_leave_the_model_alone(tmp_path):
    model = with_adapter()
    x, y = train(model, tmp_path / "run")
    before = copy.deepcopy(model.state_dict())
    dual = dualform.open(tmp_path / "run", model)
    without = dual.masked(drop="sample_id = 2")
    assert without[0].base_layer.weight.data_ptr() == model[0].base_layer.weight.data_ptr()
    assert not torch.equal(without[0].lora_B.weight, model[0].lora_B.weight)
    assert dual.influence(x[:1], target=y[:1]).top(3, by="sample_id").height == 3
    assert not model[0].base_layer.weight.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_another_base_is_refused(tmp_path):
    model = with_adapter()
    train(model, tmp_path / "run")
    with torch.no_grad():
        model[0].base_layer.weight[0, 0] += 1
    with pytest.raises(ModelMismatchError, match=r"'0\.base_layer\.weight' is not the one that training ran on"):
        dualform.open(tmp_path / "run", model)


def test_resuming_with_another_base_is_refused(tmp_path):
    model = with_adapter()
    train(model, tmp_path / "run")
    with torch.no_grad():
        model[0].base_layer.weight[0, 0] += 1
    with pytest.raises(RecordingError, match="has other base"):
        train(model, tmp_path / "run", resume=True)


def test_a_quantised_base_is_recorded_and_asked_about(tmp_path):
    model = with_adapter(Quantised())
    x, y = train(model, tmp_path / "run")
    dual = dualform.open(tmp_path / "run", model)
    assert dual.verify().passed
    assert dual.attend(x[:1])["0.lora_A"].top(2).height == 2
    assert dual.influence(x[:1], target=y[:1]).top(3, by="sample_id").height == 3
    assert dual.contributions(x[:1], target=1)["0.lora_B"].top(2).height == 2


def test_a_frozen_layer_that_could_not_be_recorded_is_not_listed(tmp_path):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Doubled(5, 7).requires_grad_(False), nn.Tanh(), nn.Linear(7, 4))
    train(model, tmp_path / "run")
    assert dualform.open(tmp_path / "run", model).info()["left_out"] == {}
    model[0].requires_grad_()
    with pytest.warns(UserWarning, match="not recorded: '0': its type Doubled has a forward of its own"):
        train(model, tmp_path / "other")


def test_a_frozen_backbone_is_in_the_first_snapshot_alone(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7).requires_grad_(False), nn.Tanh(), nn.Linear(7, 4))
    train(model, tmp_path / "run")
    dual = dualform.open(tmp_path / "run", model)
    head = {"2.weight", "2.bias"}
    assert stored(tmp_path / "run", 0) == {*head, "0.weight", "0.bias"}
    assert stored(tmp_path / "run", 4) == head
    assert dual.store.manifest.left_out == {}
    # Opened with any weights, the model at any step is the one that was trained
    with torch.no_grad():
        model[0].weight.zero_()
    assert not torch.equal(dualform.open(tmp_path / "run", model).at(4).model()[0].weight, model[0].weight)
    assert dual.at(2).model()[0].weight.any()


def test_a_model_with_nothing_to_train_says_that_it_is_frozen(tmp_path):
    model = nn.Sequential(nn.Linear(5, 4)).requires_grad_(False)
    other = nn.Parameter(torch.zeros(3))
    with pytest.raises(RecordingError, match="All its layers are frozen"):
        dualform.record(model, torch.optim.SGD([other], lr=0.1), tmp_path / "run")


@pytest.mark.parametrize("resume", [False, True])
def test_frozen_weights_that_are_changed_by_hand_are_in_later_snapshots(tmp_path, resume):
    """A momentum encoder follows the trained network, through .data, which PyTorch does not count as a change."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"online": nn.Linear(5, 4), "target": nn.Linear(5, 4).requires_grad_(False)})
    optimizer = torch.optim.SGD(model["online"].parameters(), lr=0.1)
    x = torch.randn(6, 5)
    recorder = dualform.record(model, optimizer, tmp_path / "run")
    for step in range(4):
        recorder.batch(sample_id=range(6))
        F.mse_loss(model["online"](x), model["target"](x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for slow, fast in zip(model["target"].parameters(), model["online"].parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        recorder.seal()
        if resume and step == 1:
            recorder.close()
            recorder = dualform.record(model, optimizer, tmp_path / "run", resume=True)
    recorder.close()
    trained = dualform.open(tmp_path / "run", model).at(4).model()
    assert torch.equal(trained["target"].weight, model["target"].weight)
