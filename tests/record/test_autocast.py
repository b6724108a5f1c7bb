import polars as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.dual.masked import masked_by_groups
from dualform.dual.totals import find


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_under_autocast_the_key_is_recorded_as_it_was_cast(tmp_path, kind):
    torch.manual_seed(0)
    first = (
        nn.Linear(16, 6)
        if kind == "linear"
        else nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 3), nn.Flatten())
    )
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(6 if kind == "linear" else 12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = torch.randn(20, 16), torch.randint(0, 4, (20,))
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for ids in torch.arange(20).repeat(3).split(5):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(inputs[ids]).float(), labels[ids])
            loss.backward()
            optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    certificate = dual.verify()
    assert certificate.passed, certificate
    assert (
        certificate.frame.filter(pl.col("parameter").str.ends_with("weight"))["reason"].str.contains("autocast").all()
    )
    key = next(iter(dual.store.chunks(dual.layers[0]))).keys(torch.float32).vectors()
    assert torch.equal(key, key.half().float())


def test_without_autocast_nothing_is_said_of_it(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=[0, 1])
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    assert not dualform.open(tmp_path / "run").verify().frame["reason"].str.contains("autocast").any()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_autocast_may_come_and_go_beside_totals(tmp_path, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 4))
    optimizer = kind(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(20, 16), torch.arange(20) % 4
    with dualform.record(model, optimizer, tmp_path / "run", totals=["label"]) as recorder:
        for step, ids in enumerate(torch.arange(20).split(5)):
            recorder.batch(sample_id=ids, label=labels[ids])
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=step % 2 == 0):
                loss = F.cross_entropy(model(inputs[ids]).float(), labels[ids])
            loss.backward()
            optimizer.step()
    view = find(dualform.open(tmp_path / "run").store, ["label"], 4, deltas=True)
    torch.testing.assert_close(masked_by_groups(view, "0.weight").float(), model[0].weight.detach(), rtol=0, atol=1e-5)
