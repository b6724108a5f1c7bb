"""Settings of optimizers, schedules, parameter groups, accumulation and clipping."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from recorded_networks import (
    CLASSES,
    LABELS,
    ROWS,
    SAMPLES,
    STEPS,
    WIDTH,
    Encoder,
    Recurrent,
    assert_close,
    assert_exact,
    everything,
    parameters,
    train,
    vectors,
)


def groups(model):
    """No decay for biases and normalisations, and another learning rate for the head."""
    small = [p for name, p in model.named_parameters() if p.dim() < 2 and not name.startswith("head")]
    large = [p for name, p in model.named_parameters() if p.dim() > 1 and not name.startswith("head")]
    return [
        {"params": small, "weight_decay": 0.0},
        {"params": large, "betas": (0.8, 0.95)},
        {"params": list(model.head.parameters()), "lr": 0.05},
    ]


SETTINGS = {
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "coupled and decoupled decay": (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "loops": (torch.optim.AdamW, {"foreach": False, "amsgrad": True}),
    "foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "fused": (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    "fused adam": (torch.optim.Adam, {"fused": True, "weight_decay": 0.1}),
    "fused sgd": (torch.optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "fused adagrad": (torch.optim.Adagrad, {"fused": True}),
    "maximize": (torch.optim.AdamW, {"maximize": True}),
    "maximize with decay": (torch.optim.Adam, {"maximize": True, "weight_decay": 0.1, "foreach": True}),
    "a tensor as learning rate": (torch.optim.AdamW, {"lr": torch.tensor(0.01, dtype=torch.float64)}),
    "rmsprop": (torch.optim.RMSprop, {"foreach": True, "momentum": 0.9, "maximize": True}),
    "nadam": (torch.optim.NAdam, {"foreach": True, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (torch.optim.RAdam, {"foreach": False, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0, "foreach": True}),
    "adamax": (torch.optim.Adamax, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_of_optimizers(path, settings):
    kind, options = SETTINGS[settings]
    if not options.keys() <= inspect.signature(kind).parameters.keys():
        pytest.skip("this version of PyTorch has no such setting")
    run = train("encoder", lambda p: kind(p, **{"lr": 0.01, **options}), path)
    assert_exact(run.dual)
    assert_close(parameters(run.dual.at(4).model()), run.checkpoints[4])


def loop(path, *, make=Encoder, optimizer=None, schedule=None, parts=1, clip=None, steps=STEPS):
    """A training loop with everything people put into it."""
    torch.manual_seed(0)
    model = make().double()
    made = torch.optim.AdamW(groups(model), lr=0.02, weight_decay=0.1) if optimizer is None else optimizer(model)
    scheduler = None if schedule is None else schedule(made)
    x, checkpoints = vectors(SAMPLES, 0), []
    with dualform.record(model, made, path) as recorder:
        for step in range(steps):
            made.zero_grad()
            for part in range(parts):
                ids = (torch.arange(ROWS) + 2 * step + part) % SAMPLES
                recorder.batch(sample_id=ids, label=LABELS[ids])
                ((1 + part) / parts * F.cross_entropy(model(x[ids]), LABELS[ids])).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            made.step()
            if scheduler is not None:
                scheduler.step()
            checkpoints.append(copy.deepcopy(model.state_dict()))
    dual = dualform.open(path, model)
    assert_exact(dual)
    assert_close(parameters(dual.at(4).model()), checkpoints[3])
    return dual, x


SCHEDULES = {
    "warm-up, then cosine": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 2), torch.optim.lr_scheduler.CosineAnnealingLR(o, 4)],
        milestones=[2],
    ),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS),  # betas move too
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # PyTorch 2.6 warns about its own SequentialLR
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_and_parameter_groups_under_adamw(path, schedule):
    loop(path, schedule=SCHEDULES[schedule])


@pytest.mark.parametrize("clip", [None, 1e-2, 1e9])
def test_accumulation_and_clipping_under_adamw(path, clip):
    dual, x = loop(path, parts=3, clip=clip)
    parts = dual.contributions(x, target=1)["head"].parts()
    assert parts["remainder"].abs().max() <= 1e-12
    assert dual.store.slots("head") == STEPS * 3 * ROWS


def test_two_kinds_of_optimizers_for_one_layer(path):
    """The weights by AdamW, the biases by SGD: some coefficients are matrices, others numbers."""
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM, states=True).double()
    weights = torch.optim.AdamW([p for p in model.parameters() if p.dim() > 1], lr=0.02)
    biases = torch.optim.SGD([p for p in model.parameters() if p.dim() < 2], lr=0.1, momentum=0.9)
    x = vectors(SAMPLES, 0)
    with dualform.record(model, [weights, biases], path) as recorder:
        for _ in range(STEPS):
            recorder.batch(label=LABELS)
            model.zero_grad()
            F.cross_entropy(model(x), LABELS).backward()
            weights.step()
            biases.step()
    dual = dualform.open(path, model)
    assert_exact(dual)
    parts = dual.contributions(x, target=1)["head"].parts()
    assert parts["remainder"].abs().max() <= 1e-12
    assert everything(dual.contributions(x, target=1)["body"]).sum() != 0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("overflow", [None, 3])
def test_a_loss_scaler_that_leaves_unscaling_to_a_fused_optimizer(path, kind, unscale, overflow):
    """Then .grad is scaled when the optimizer sees it: it divides by itself, and skips by itself what is not finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    optimizer = kind(model.parameters(), lr=0.02, fused=True, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = vectors(SAMPLES, 0)[:, 0].float()
    with dualform.record(model, optimizer, path) as recorder:
        for step in range(STEPS):
            recorder.batch(label=LABELS)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), LABELS) * (float("inf") if step == overflow else 1.0)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert all(p.isfinite().all() for p in model.parameters())
    certificate = dualform.open(path, model).verify()
    assert certificate.passed, str(certificate)
