"""The audit at every scale of gradients: loss scales, clipping, 16-bit autocast, accumulation."""

from contextlib import nullcontext

import polars as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
import halves
from dualform.errors import UnexplainedError

LOSS_SCALES = [2.0**-20, 2.0**-10, 1.0, 2.0**16, 2.0**24]
CLIP_NORMS = [1e-8, 1e-4, 1.0, 1e8]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FACTOR_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""How far a factor may be from the truth, relatively. Under autocast it is seen through 16-bit gradients."""


def train_scaled(path, *, loss_scale, clip_norm, dtype, passes, steps=2):
    """Train as a loss scaler does: scale the loss, accumulate, unscale, clip, step. Gives the true factors by step."""
    torch.manual_seed(0)
    autocast = dtype in (torch.float16, torch.bfloat16)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 4))
    inputs, labels = torch.randn(30, 6), torch.arange(30) % 4
    if not autocast:
        model, inputs = model.to(dtype), inputs.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    factors = []
    with dualform.record(model, optimizer, path) as recorder:
        for step in range(steps):
            optimizer.zero_grad()
            for ids in (torch.arange(10 * passes) + 7 * step).remainder(30).split(10):
                recorder.batch(sample_id=ids)
                with torch.autocast("cpu", dtype=dtype) if autocast else nullcontext():
                    output = model(inputs[ids])
                (F.cross_entropy(output.to(model[0].weight.dtype), labels[ids]) * loss_scale).backward()
            for parameter in model.parameters():
                parameter.grad.mul_(1 / loss_scale)
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip_norm))
            factors.append(min(1.0, clip_norm / (norm + 1e-6)) / loss_scale)
            optimizer.step()
    return factors


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clip_norm", CLIP_NORMS)
@pytest.mark.parametrize("loss_scale", LOSS_SCALES)
def test_factors_are_right_at_any_scale(tmp_path, loss_scale, clip_norm, dtype, passes):
    halves.require(dtype)
    true_factors = train_scaled(
        tmp_path / "run", loss_scale=loss_scale, clip_norm=clip_norm, dtype=dtype, passes=passes
    )
    store = dualform.open(tmp_path / "run").store
    if dtype is torch.float16 and not (store.updates["residual"].is_finite()).all():
        assert loss_scale == 2.0**24, "only the largest scale may overflow float16"
        return
    underflows = dtype is torch.float16 and loss_scale < 1
    for number, parameter in enumerate(store.manifest.parameters):
        updates = store.updates.filter(pl.col("parameter") == number)
        assert updates.height == len(true_factors)
        for factors, truth in zip(updates["factors"].to_list(), true_factors, strict=True):
            if underflows:  # 16 bits do not hold enough of the gradient to tell its factor; where it has vanished, it counts as thrown away
                assert len(factors) in (0, passes), parameter.name
            else:
                assert len(factors) == passes, parameter.name
                assert factors == pytest.approx([truth] * passes, rel=FACTOR_TOLERANCE[dtype]), parameter.name


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("loss_scale", [2.0**-100, 2.0**-70, 2.0**70, 2.0**100])
def test_squares_that_leave_float32_do_not_matter(tmp_path, loss_scale, dtype, passes):
    """Norms are sums of squares: those of such error signals are 0 or infinite in float32."""
    truth = train_scaled(tmp_path / "run", loss_scale=loss_scale, clip_norm=1e8, dtype=dtype, passes=passes)
    updates = dualform.open(tmp_path / "run").store.updates
    for factors, step in zip(updates["factors"].to_list(), updates["step"].to_list(), strict=True):
        assert factors == pytest.approx([truth[step]] * passes, rel=FACTOR_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gradient_scaler_with_its_defaults(tmp_path, dtype):
    halves.require(dtype)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    inputs, labels = torch.randn(20, 6), torch.arange(20) % 4
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for ids in torch.arange(20).repeat(3).split(10):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype) if dtype is not torch.float32 else nullcontext():
                loss = F.cross_entropy(model(inputs[ids]).float(), labels[ids])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
            scaler.step(optimizer)
            scaler.update()
    assert dualform.open(tmp_path / "run").verify().passed


@pytest.mark.parametrize("clip_norm", [1e-6, 1e8])
@pytest.mark.parametrize("loss_scale", [2.0**-6, 2.0**8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_from_outside_the_module_is_still_found(tmp_path, dtype, loss_scale, clip_norm):
    halves.require(dtype)
    torch.manual_seed(0)
    autocast = dtype in (torch.float16, torch.bfloat16)
    kind = torch.float32 if autocast else dtype
    model = nn.Linear(6, 4).to(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(10, 6).to(kind)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.batch(sample_id=range(10))
        with torch.autocast("cpu", dtype=dtype) if autocast else nullcontext():
            output = model(inputs) + 0.3 * F.linear(inputs.roll(1, 0), model.weight)
        (output.square().mean() * loss_scale).backward()
        model.weight.grad.mul_(1 / loss_scale)
        nn.utils.clip_grad_norm_([model.weight], clip_norm)
        with pytest.raises(UnexplainedError, match="'weight' has a gradient that its recorded slots do not explain"):
            optimizer.step()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("exponent", [-130, -140, -145])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_lose_their_digits_are_not_refused(tmp_path, optimizer, exponent, passes):
    """A confident network has gradients below 1e-38, where float32 has fewer digits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))
    optimizer = optimizer(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(passes):
                recorder.batch(sample_id=range(4))
                loss = F.cross_entropy(model(torch.randn(4, 20)), torch.tensor([0, 1, 2, 0]))
                (loss * 2.0**exponent).backward()
            optimizer.step()
    assert dualform.open(tmp_path / "run", model).verify().passed
