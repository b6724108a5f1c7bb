import polars as pl
import pytest
import torch
from torch import nn

import dualform
from dualform.dual import gradients, replay, weights
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


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.Adamax])
@pytest.mark.parametrize(("tile", "slots"), [(1, 1 << 20), (100, 1), (1 << 20, 1)])
def test_rows_walk_one_after_the_other_as_they_do_together(tmp_path, monkeypatch, kind, tile, slots):
    """However many rows, and however many steps, are taken at a time."""
    model, store = recorded(tmp_path / "run", kind)
    keeps = [None, *(Condition(store, where, 6) for where in ("label = 1", "true", "false", "step < 3 OR label = 0"))]
    walks = [(updates_of(store, name, end=6), keep) for name, _ in model.named_parameters() for keep in keeps]
    expected = [forward(store, *walk) for walk in walks]
    monkeypatch.setattr(gradients, "TILE_BYTES", tile)
    monkeypatch.setattr(replay, "SLOT_BYTES", slots)
    tiles = {updates.parameter: len(gradients.Replayed(store, updates).tiles()) for updates, _ in walks}
    assert tiles == {
        "0.weight": {1: 7, 100: 3}.get(tile, 1),
        "2.weight": {1: 3, 100: 2}.get(tile, 1),
        "0.bias": 1,
        "2.bias": 1,
    }
    for walk, together in zip(walks, expected, strict=True):
        for one, other in zip(forward(store, *walk), together, strict=True):
            torch.testing.assert_close(one.weight, other.weight, rtol=1e-13, atol=1e-14)
            torch.testing.assert_close(one.average, other.average, rtol=1e-13, atol=1e-14)


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


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adamax])
def test_rows_walk_side_by_side_as_they_do_one_after_the_other(tmp_path, monkeypatch, kind):
    model, store = recorded(tmp_path / "run", kind)
    monkeypatch.setattr(gradients, "TILE_BYTES", 1)
    monkeypatch.setattr(replay, "SLOT_BYTES", 1)
    walks = [(updates_of(store, name, end=6), Condition(store, "label = 1", 6)) for name, _ in model.named_parameters()]
    expected, before = [forward(store, *walk) for walk in walks], torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = [forward(store, *walk) for walk in walks]
        assert torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError):
            replay._each(iter([[], []]), [slice(0, 1), slice(1, 2)], lambda rows, steps: 1 // 0)
    finally:
        torch.set_num_threads(before)
    for side_by_side, apart in zip(found, expected, strict=True):
        for one, other in zip(side_by_side, apart, strict=True):
            torch.testing.assert_close(one.weight, other.weight, rtol=1e-13, atol=1e-14)
