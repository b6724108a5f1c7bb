"""dtype="bfloat16": what autocast has made is stored in half the disk, without loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.store.encoding import decode, encode
from halves import require


def train(path, dtype, *, autocast, totals=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    with dualform.record(model, optimizer, path, dtype=dtype, totals=totals) as recorder:
        for step in range(8):
            x = torch.randn(6, 20, generator=generator)
            y = torch.randint(0, 5, (6,), generator=generator)
            recorder.batch(sample_id=torch.arange(6) + 6 * (step % 3), label=y)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path, model)


def test_what_autocast_made_is_stored_without_loss(tmp_path):
    require(torch.bfloat16)
    exact = train(tmp_path / "float32", "float32", autocast=True)
    half = train(tmp_path / "bfloat16", "bfloat16", autocast=True)
    for layer in ("0", "2"):
        assert torch.equal(half.layer(layer).keys, exact.layer(layer).keys)
        assert torch.equal(half.layer(layer).values, exact.layer(layer).values)
    slots = [
        sum(chunk.stat().st_size for chunk in (tmp_path / name).glob("chunk-*/slots*"))
        for name in ("float32", "bfloat16")
    ]
    assert slots[1] < 0.7 * slots[0]
    assert half.verify().passed


def test_float32_training_is_rounded_to_eight_bits_and_verify_knows(tmp_path):
    dual = train(tmp_path / "run", "bfloat16", autocast=False)
    verified = dual.verify()
    assert verified.passed
    assert verified.frame["gap"].max() > 1e-6


@pytest.mark.parametrize("autocast", [False, True])
def test_all_questions_are_answered(tmp_path, autocast):
    require(torch.bfloat16)
    dual = train(tmp_path / "run", "bfloat16", autocast=autocast, totals=["label"])
    exact = train(tmp_path / "exact", "float32", autocast=autocast, totals=["label"])
    x = torch.randn(2, 20, generator=torch.Generator().manual_seed(2))
    tolerance = {"rtol": 0.02, "atol": 0.02}
    for ask in (
        lambda one: one.attend(x)["0"].total("label")["total"],
        lambda one: one.attend(x)["2"].top(3)["weight"],
        lambda one: one.contributions(x, target=1)["2"].total("label")["total"],
        lambda one: one.influence(x, target=1).top(3, by="sample_id")["influence"],
    ):
        found, expected = (torch.tensor(ask(one).to_list()) for one in (dual, exact))
        torch.testing.assert_close(found, expected, **tolerance)
    masked, reference = (one.masked(drop="label = 2") for one in (dual, exact))
    for a, b in zip(masked.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_any_number_comes_back_as_bfloat16_has_it():
    vectors = torch.tensor([[1.0, -2.5, 3e38, 1e-38, 0.0, float("inf")]])
    stored = encode(vectors, "bfloat16")
    assert torch.equal(decode(stored.data, stored.exponents, torch.float32), vectors.to(torch.bfloat16).float())
