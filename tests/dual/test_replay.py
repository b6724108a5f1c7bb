import polars as pl
import pytest
import torch
from torch import nn

import dualform
from dualform.dual.gradients import updates_of
from dualform.dual.replay import forward
from dualform.dual.weights import Reached, rebuilt
from dualform.query.masks import Mask


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
    keep = Mask(store, pl.col("label") == 1, 6)
    for name, trained in model.named_parameters():
        updates = updates_of(store, name, end=6)
        both, alone = forward(store, updates, keep), forward(store, updates, keep, only_masked=True)
        assert torch.equal(both[1].weight, alone[1].weight)
        torch.testing.assert_close(both[0].weight, trained.detach(), rtol=1e-12, atol=1e-12)
