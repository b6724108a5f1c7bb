import polars as pl
import pytest
import torch
from torch import nn

import dualform
from dualform.dual import weights
from dualform.dual.coefficients import updates_of
from dualform.dual.replay import forward
from dualform.dual.weights import Reached, rebuilt
from dualform.query.conditions import Condition


def recorded(path, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
    with dualform.record(model, optimizer, path) as recorder:
        for _ in range(6):
            labels = torch.randint(3, (8,))
            recorder.batch(label=labels)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.rand(8, 5).double()), labels).backward()
            optimizer.step()
    return model, dualform.open(path, model).store


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD])
def test_later_moments_go_on_from_earlier_ones(tmp_path, kind):
    model, store = recorded(tmp_path / "run", kind)
    for name, _ in model.named_parameters():
        reached, found = Reached(), {}
        for step in (2, 3, 3, 6, 1, 5):  # an earlier one begins anew
            found[step] = rebuilt(store, name, begin=0, end=step, reached=reached)
        for step, weight in found.items():
            assert torch.equal(weight, rebuilt(store, name, begin=0, end=step)), (name, step)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])  # decay beside the gradient, and in it
def test_a_masked_weight_alone_is_the_one_beside_the_trained_weight(tmp_path, kind):
    model, store = recorded(tmp_path / "run", kind)
    keep = Condition(store, pl.col("label") == 1, 6)
    for name, trained in model.named_parameters():
        updates = updates_of(store, name, end=6)
        both, alone = forward(store, updates, keep), forward(store, updates, keep, only_masked=True)
        assert torch.equal(both[1].weight, alone[1].weight)
        torch.testing.assert_close(both[0].weight, trained.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_before_a_snapshot_a_mask_replays_once(tmp_path, monkeypatch, kind):
    """What is replayed with a mask is not put together without it first."""
    model, store = recorded(tmp_path / "run", kind)
    then = dualform.open(store.location, model).at(4)
    expected = {
        name: rebuilt(store, name, begin=0, end=4, keep=Condition(store, "label = 1", 4))
        for name in then.model().state_dict()
    }
    walks = []
    monkeypatch.setattr(weights, "forward", lambda *args, **more: (walks.append(args), forward(*args, **more))[1])
    for read in ("fewest", "kept"):
        for name, value in then.masked(only="label = 1", read=read).state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)
    assert len(walks) == (8 if kind is torch.optim.AdamW else 0)
