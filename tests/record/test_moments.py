"""The checkpoints of a collection come into the model."""

from pathlib import Path

import pytest
import torch
from torch import nn

from dualform.errors import RecordingError
from dualform.record.moments import moments_of


def names(checkpoints):
    return [moment.name for moment in moments_of(checkpoints)]


def test_names():
    state = {"weight": torch.zeros(2)}
    assert names(None) == ["the model as it is"]
    assert names(state) == names([state]) == ["checkpoint 0"]
    assert names(Path("/home/someone/runs/step-7/model.pt")) == ["step-7/model.pt"]
    assert names(lambda model: None) == ["checkpoint 0"]
    assert names({"early": state, 7: state}) == ["early", "7"]


def test_names_differ():
    with pytest.raises(RecordingError, match="several have one name"):
        moments_of(["a/w.pt", "b/a/w.pt"])


def load(model, weights):
    moments_of([weights])[0].load(model)


def test_a_frozen_weight_may_be_missing_or_as_it_is():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    new = {"weight": torch.ones(2, 3)}
    load(model, new)
    assert torch.equal(model.weight, torch.ones(2, 3))
    load(model, {**new, "bias": model.bias.detach().clone()})
    with pytest.raises(RecordingError, match="another 'bias' than the model, where it is frozen"):
        load(model, {**new, "bias": model.bias + 1})


def test_a_tied_weight_is_saved_under_one_of_its_names():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    load(model, {"0.weight": torch.ones(3, 3)})
    assert torch.equal(model[1].weight, torch.ones(3, 3))


def test_statistics_must_be_there():
    model = nn.BatchNorm1d(2)
    with pytest.raises(RecordingError, match="lacks 'running_mean'"):
        load(model, {"weight": torch.ones(2), "bias": torch.ones(2)})


def test_shapes_must_fit():
    with pytest.raises(RecordingError, match=r"'weight' has shape \(3, 2\) there and \(2, 3\) in the model"):
        load(nn.Linear(3, 2, bias=False), {"weight": torch.ones(3, 2)})
