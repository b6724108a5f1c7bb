"""Taps leave training as it is, and hand over what belongs to each call."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.errors import UnexplainedError
from dualform.record.tap import tap


def trained(make, inputs, path=None, steps=4):
    """Train a model on random labels, recorded if there is a path."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recorder = None if path is None else dualform.record(model, optimizer, path)
    for _ in range(steps):
        if recorder is not None:
            recorder.batch(sample_id=range(len(inputs)))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    if recorder is not None:
        recorder.close()
    return model


class Reversed(nn.Module):
    """An LSTM whose output is changed in place where PyTorch allows it: in its last state."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        _, (hidden, _) = self.lstm(x)
        return self.head(hidden[0].clone().relu_())


NETWORKS = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.ELU(inplace=True)),
    "normalisations": lambda: nn.Sequential(nn.LayerNorm(4), nn.ReLU(inplace=True), nn.RMSNorm(4), nn.SiLU(inplace=True)),
    "convolution": lambda: nn.Sequential(
        nn.Conv1d(6, 4, 3), nn.BatchNorm1d(4), nn.Hardtanh(inplace=True), nn.Flatten(), nn.Dropout(0.5, inplace=True), nn.Linear(8, 2)
    ),
    "recurrent": Reversed,
}  # fmt: skip


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS.keys())
def test_recording_changes_no_bit_of_the_training(tmp_path, make):
    inputs = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(1))
    bare = trained(make, inputs)
    recorded = trained(make, inputs, tmp_path / "run")
    for name, value in bare.state_dict().items():
        assert torch.equal(recorded.state_dict()[name], value), name
    assert dualform.open(tmp_path / "run", recorded).verify().passed


def test_the_output_shares_its_memory_and_can_be_changed_in_place():
    arrived = []
    weight = torch.ones(3, requires_grad=True)
    output = weight * 2
    [tapped] = tap(lambda errors, saved: arrived.append((errors, saved)), [output], [torch.arange(3)])
    assert tapped.data_ptr() == output.data_ptr()
    tapped.mul_(5).sum().backward()
    [([error], [saved])] = arrived
    assert error.tolist() == [5, 5, 5]
    assert saved.tolist() == [0, 1, 2]
    assert weight.grad.tolist() == [10, 10, 10]


def test_an_output_without_a_part_in_the_loss_has_no_error_signal():
    arrived = []
    weight = torch.ones(2, requires_grad=True)
    first, second = tap(lambda errors, saved: arrived.append(errors), [weight * 2, weight * 3], [])
    second.sum().backward()
    [[of_first, of_second]] = arrived
    assert of_first is None
    assert of_second.tolist() == [1, 1]
    assert first.requires_grad


def test_an_output_that_another_hook_keeps_for_the_loss(tmp_path):
    """Other hooks see what came through the tap, also those that were there before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    kept = []
    model[0].register_forward_hook(lambda module, args, output: kept.append(output))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=range(5))
        loss = model(torch.randn(5, 3)).square().sum()
        (loss + kept[0].abs().sum()).backward()
        optimizer.step()
    assert dualform.open(tmp_path / "run", model).verify().passed


def test_a_key_that_was_changed_in_place_is_refused_by_name(tmp_path):
    """The weight is frozen, so PyTorch itself does not need the key."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=range(5))
        hidden = model[0](torch.randn(5, 3))
        hidden += model[1](hidden)
        hidden.sum().backward()
        with pytest.raises(UnexplainedError, match="layer '1': its input was changed in place"):
            optimizer.step()


def test_checkpointing_frees_the_keys(tmp_path):
    """They are saved by autograd, so a checkpoint drops them and computes them again."""
    torch.manual_seed(0)
    keys = []

    def note(module, args):
        keys.append(weakref.ref(args[0]))

    body, head = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 2)
    model = nn.ModuleList([body, head])
    body[2].register_forward_pre_hook(note)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", batch_axis={"*": 0}) as recorder:
        recorder.batch(sample_id=range(5))
        hidden = checkpoint(body, torch.randn(5, 3), use_reentrant=False)
        gc.collect()
        assert keys[0]() is None
        head(hidden).sum().backward()
        optimizer.step()
    assert dualform.open(tmp_path / "run", model).verify().passed


def test_gradients_by_torch_func_are_not_recorded(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(5, 3)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=range(5))
        parameters = dict(model.named_parameters())
        gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, inputs).sum())(parameters)
        torch.testing.assert_close(gradients["bias"], torch.full((2,), 5.0))
        model(inputs).sum().backward()
        optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert dual.verify().passed
    assert len(dual.attend(inputs[:1])[""].top(100)) == 5
