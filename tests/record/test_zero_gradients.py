"""Gradients that are zero but for rounding do not end a training; wrong slots in the same networks still do."""

import math

import polars as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform import projection
from dualform.errors import UnexplainedError
from dualform.layers import rules
from dualform.record import begin
from dualform.record.recorded import RecordedLayer

CHANNELS, CLASSES, STEPS = 4, 3, 5
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
}


class Mean(nn.Module):
    """The mean over all positions of a map."""

    def forward(self, x):
        return x.flatten(2).mean(2)


class Largest(nn.Module):
    """The largest of all positions of a map."""

    def forward(self, x):
        return x.flatten(2).amax(2)


class Attention(nn.Module):
    """Attention with weights of its own for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True)

    def forward(self, x):
        return self.inner(x[..., :4], x[..., 4:7], x[..., :5])[0].mean(1)


def on_maps(norm, pool=Mean):
    return lambda: nn.Sequential(nn.Conv2d(2, CHANNELS, 3), norm(), pool(), nn.Linear(CHANNELS, CLASSES))


def on_vectors(width, norm):
    return lambda: nn.Sequential(nn.Linear(3, width), norm(), nn.Linear(width, CLASSES))


def convolution_of_normalised_channels():
    norm = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Unflatten(1, (4, 1, 1)))
    return nn.Sequential(*norm, nn.Conv2d(4, 20, 1), nn.Flatten(1), nn.Linear(20, CLASSES))


MAP, VECTOR, TOKENS = (2, 5, 5), (3,), (3, 7)
NETWORKS = {
    "LayerNorm(1)": (on_vectors(1, lambda: nn.LayerNorm(1)), VECTOR),
    "LayerNorm(1) of the data": (lambda: nn.Sequential(nn.Identity(), nn.LayerNorm(1), nn.Linear(1, CLASSES)), (1,)),
    "LayerNorm(2)": (on_vectors(2, lambda: nn.LayerNorm(2)), VECTOR),
    "LayerNorm(8)": (on_vectors(8, lambda: nn.LayerNorm(8)), VECTOR),
    "RMSNorm(1)": (on_vectors(1, lambda: nn.RMSNorm(1)), VECTOR),
    "BatchNorm1d": (on_vectors(CHANNELS, lambda: nn.BatchNorm1d(CHANNELS)), VECTOR),
    "BatchNorm2d, mean": (on_maps(lambda: nn.BatchNorm2d(CHANNELS)), MAP),
    "BatchNorm2d, largest": (on_maps(lambda: nn.BatchNorm2d(CHANNELS), Largest), MAP),
    "GroupNorm(4, 4), mean": (on_maps(lambda: nn.GroupNorm(4, CHANNELS)), MAP),
    "GroupNorm(2, 4), mean": (on_maps(lambda: nn.GroupNorm(2, CHANNELS)), MAP),
    "GroupNorm(1, 4), largest": (on_maps(lambda: nn.GroupNorm(1, CHANNELS), Largest), MAP),
    "convolution of normalised channels": (convolution_of_normalised_channels, VECTOR),
}
BATCHES = {
    "one row": lambda shape: torch.randn(1, *shape),
    "repeated rows": lambda shape: torch.randn(1, *shape).expand(4, *shape).contiguous(),
    "different rows": lambda shape: torch.randn(4, *shape),
}


def train(
    path,
    make,
    inputs,
    *,
    optimizer="sgd",
    dtype=torch.float32,
    passes=1,
    clip=None,
    steps=STEPS,
    extra_loss=None,
    edit=None,
):
    """Train and record; gives the dual.

    inputs: a function that gives one batch. clip: a function of the model. extra_loss: a function of the model, its layers' inputs and the
    batch. edit: a function of the model, called before each update.
    """  # fmt: skip
    torch.manual_seed(0)
    model = make().to(dtype)
    made = OPTIMIZERS[optimizer](model.parameters())
    with dualform.record(model, made, path) as recorder:
        for _ in range(steps):
            made.zero_grad()
            for _ in range(passes):
                batch = inputs()
                batch = batch.to(dtype) if batch.is_floating_point() else batch
                recorder.batch(sample_id=range(len(batch)))
                loss = F.cross_entropy(model(batch), torch.arange(len(batch)) % CLASSES)
                if extra_loss is not None:
                    loss = loss + extra_loss(model, batch)
                loss.backward()
            if clip is not None:
                clip(model)
            if edit is not None:
                edit(model)
            made.step()
    return dualform.open(path, model)


def clip_all(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clip_head(model):
    nn.utils.clip_grad_norm_(model[-1].parameters(), 1e-3)


def distance(dual):
    """How far weights are from what the slots say, relative to their size."""
    frame = dual.verify().frame
    sizes = {name: float(p.detach().double().norm()) for name, p in dual.model().named_parameters()}
    return max(row["distance"] / max(sizes[row["parameter"]], row["movement"]) for row in frame.to_dicts())


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("network", NETWORKS)
def test_rounding_is_no_unexplained_gradient(tmp_path, network, dtype, batch):
    if network == "BatchNorm1d" and batch == "one row":
        pytest.skip("PyTorch needs more than one value per channel")
    make, shape = NETWORKS[network]
    cases = [("sgd", 1, None), ("sgd", 3, clip_all), ("sgd", 1, clip_head), ("adam", 3, clip_all)]
    for number, (optimizer, passes, clip) in enumerate(cases):
        settings = {"optimizer": optimizer, "passes": passes, "clip": clip}
        path = tmp_path / str(number)
        dual = train(path, make, lambda: BATCHES[batch](shape), dtype=dtype, **settings)
        if optimizer == "sgd":  # Adam divides rounding by rounding
            assert distance(dual) <= (1e-5 if dtype is torch.float32 else 1e-13), settings


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_queries_over_equal_tokens(tmp_path, optimizer, dtype):
    """Whatever a query is, the answer is the same: its error signal is rounding, and computed again it is another rounding."""
    dual = train(
        tmp_path / "run",
        lambda: nn.Sequential(Attention(), nn.Linear(4, CLASSES)),
        lambda: torch.randn(3, 1, 7).expand(3, *TOKENS).contiguous(),
        optimizer=optimizer,
        dtype=dtype,
        steps=12,
    )
    assert dual.verify().passed


@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_before_batch_normalisation_with_accumulation_and_clipping(tmp_path, dtype, scale):
    """Inputs make the deviation far smaller, or far larger, than the mean."""
    dual = train(
        tmp_path / "run",
        lambda: nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES)),
        lambda: scale * torch.randn(8, 3),
        dtype=dtype,
        passes=3,
        clip=clip_all,
        steps=20,
    )
    assert distance(dual) <= (1e-4 if dtype is torch.float32 else 1e-13)


def all_ones(inputs, outputs, dtype, generator):
    return torch.ones(1, inputs, dtype=dtype).T


@pytest.mark.parametrize("make", [
    on_vectors(4, lambda: nn.LayerNorm(4)),
    convolution_of_normalised_channels,
    lambda: nn.Sequential(nn.Embedding(20, 4), nn.LayerNorm(4), nn.Flatten(1), nn.Linear(12, CLASSES)),
])  # fmt: skip
def test_what_cancels_in_the_random_matrix_is_not_refused(tmp_path, monkeypatch, make):
    """What comes out of a LayerNorm sums to zero, and so do the error signals of what goes in."""
    monkeypatch.setattr(projection, "random_columns", all_ones)
    takes_words = isinstance(make()[0], nn.Embedding)
    inputs = (lambda: torch.randint(0, 20, (6, 3))) if takes_words else (lambda: torch.randn(6, 3))
    for number, passes in enumerate([1, 3]):
        dual = train(tmp_path / str(number), make, inputs, passes=passes, steps=1)
        assert dual.verify().passed


@pytest.mark.parametrize("inputs", [2, 3, 8])
def test_the_random_matrix_shows_rows_that_sum_to_zero(inputs):
    for seed in range(200):
        values = torch.randn(16, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        values -= values.mean(1, keepdim=True)
        one = projection.Projection.of("weight", (16, inputs), torch.float64, seed, vector=False)
        seen = math.sqrt(float((one.project(values) ** 2).sum()))
        assert seen > 1e-3 * float(values.norm())


def factors(dual, name):
    """(updates, backward passes)"""
    number = [p.name for p in dual.store.manifest.parameters].index(name)
    return dual.store.updates.filter(pl.col("parameter") == number)["factors"].to_list()


@pytest.mark.parametrize("passes", [1, 3])
def test_a_gradient_that_hardly_shows_takes_the_factor_of_the_others(tmp_path, monkeypatch, passes):
    """Its own signs nearly cancel in R, so it says 1 only to within a part in a thousand."""
    monkeypatch.setattr(projection, "random_columns", all_ones)
    make, shape = NETWORKS["LayerNorm(2)"]
    dual = train(tmp_path / "run", make, lambda: torch.randn(4, *shape), passes=passes)
    for of_step in factors(dual, "2.weight"):
        assert of_step == pytest.approx([1.0] * passes, rel=1e-5)


# The same networks with something wrong

FAULTY = {
    **{name: NETWORKS[name] for name in NETWORKS if "RMSNorm" not in name},
    "attention": (lambda: nn.Sequential(Attention(), nn.LayerNorm(4), nn.Linear(4, CLASSES)), TOKENS),
}
SINGLE = ("LayerNorm(1)", "LayerNorm(1) of the data")
"""The bias is one number, and one number is always a multiple of another."""


def assert_refused(tmp_path, network, *, batch="different rows", **settings):
    make, shape = FAULTY[network]
    with pytest.raises(UnexplainedError, match="has a gradient that its recorded slots do not explain"):
        train(tmp_path / "run", make, lambda: BATCHES[batch](shape), steps=1, **settings)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("network", FAULTY)
def test_a_slot_changed_by_a_tenth_is_refused(tmp_path, monkeypatch, network, passes):
    read = RecordedLayer.read

    def changed(layer, task, visit, found, layout):
        found.keys = found.keys.clone()
        found.keys[0] *= 1.1
        found.errors = found.errors.clone()
        found.errors[0] *= 1.1
        return read(layer, task, visit, found, layout)

    monkeypatch.setattr(RecordedLayer, "read", changed)
    assert_refused(tmp_path, network, passes=passes)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("network", [name for name in FAULTY if name not in SINGLE])
def test_a_call_without_slots_is_refused(tmp_path, network, batch):
    """A second call of the normalisation, past its hooks."""
    if network == "BatchNorm1d" and batch == "one row":
        pytest.skip("PyTorch needs more than one value per channel")

    def extra_loss(model, batch):
        normal = model[1].forward(model[0].forward(batch))
        weights = torch.linspace(0.1, 0.2, normal.numel()).reshape(normal.shape)
        return (normal * weights).sum()

    assert_refused(tmp_path, network, batch=batch, extra_loss=extra_loss)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("network", FAULTY)
def test_a_parameter_used_outside_its_module_is_refused(tmp_path, network, name):
    if network in SINGLE and name == "bias":
        pytest.skip("one number is always a multiple of another")
    assert_refused(tmp_path, network, extra_loss=lambda model, _: model[1].get_parameter(name).mean())


@pytest.mark.parametrize("place", [1, -1])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("network", FAULTY)
def test_a_gradient_added_by_hand_is_refused(tmp_path, network, passes, place):
    """A tenth of the size of the bias's gradient, added to that of the weight, even if that is zero."""

    def edit(model):
        module = model[place]
        module.weight.grad.view(-1)[0] += 0.1 * module.bias.grad.norm()

    assert_refused(tmp_path, network, passes=passes, edit=edit)


EDITED = [
    ("LayerNorm(8)", "1.weight"),
    ("LayerNorm(8)", "1.bias"),
    ("BatchNorm1d", "1.weight"),
    ("BatchNorm2d, largest", "1.weight"),
    ("GroupNorm(1, 4), largest", "1.weight"),
    ("GroupNorm(2, 4), mean", "1.bias"),
    ("attention", "0.inner.q_proj_weight"),
    ("attention", "0.inner.k_proj_weight"),
    ("attention", "0.inner.in_proj_bias"),
]


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(("dtype", "by"), [(torch.float32, 1e-2), (torch.float64, 1e-9)])
@pytest.mark.parametrize(("network", "parameter"), EDITED)
def test_one_edited_entry_of_a_gradient_is_refused(tmp_path, network, parameter, dtype, by, passes):
    def edit(model):
        gradient = model.get_parameter(parameter).grad.view(-1)
        gradient[gradient.abs().argmax()] *= 1 + by

    assert_refused(tmp_path, network, dtype=dtype, passes=passes, edit=edit)


@pytest.mark.parametrize("make", [
    lambda: nn.LayerNorm(4),
    lambda: nn.BatchNorm1d(4),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.RMSNorm(4),
    lambda: nn.BatchNorm1d(4).eval(),
])  # fmt: skip
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_bounds_are_above_the_absolute_terms(make, offset):
    """Σ |error| · (|input| + |mean|) / deviation, for each element of the weight, by its definition."""
    torch.manual_seed(0)
    module = make().double()
    given = torch.randn(6, 4, dtype=torch.float64) + offset
    error = torch.randn(6, 4, dtype=torch.float64)
    axes, groups = {
        nn.LayerNorm: ((1,), given),
        nn.RMSNorm: ((1,), given),
        nn.BatchNorm1d: ((0,), given),
        nn.GroupNorm: ((2,), given.reshape(6, 2, 2)),
    }[type(module)]
    mean = groups.mean(axes, keepdim=True)
    deviation = (groups.var(axes, correction=0, keepdim=True) + 1e-5).sqrt()
    if isinstance(module, nn.RMSNorm):
        mean = torch.zeros_like(mean)
        deviation = groups.square().mean(axes, keepdim=True).sqrt()
    if not module.training:
        mean = torch.zeros(1)
        deviation = torch.full((1,), 1 + 1e-5).sqrt()
    terms = error.abs() * ((groups.abs() + mean.abs()) / deviation).reshape(6, 4)
    source = rules.rule_for(module).slot_source(module, ((given,), {}), module(given), None)
    [found] = source.slots([error])
    root_of_count = math.sqrt(6)
    error_terms = max(found.error_terms, float(found.errors.norm()))  # 0: the error signals are no sums
    assert terms.sum(0).norm() <= root_of_count * found.key_terms <= 20 * terms.sum(0).norm()
    assert error.abs().sum(0).norm() <= root_of_count * error_terms <= 3 * error.abs().sum(0).norm()


@pytest.mark.parametrize(
    "make", [lambda: nn.BatchNorm2d(4), lambda: nn.BatchNorm2d(4).eval(), lambda: nn.GroupNorm(2, 4)]
)
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_bounds_of_summed_positions_are_above_the_absolute_terms(make, offset):
    torch.manual_seed(0)
    module = make().double()
    given = torch.randn(6, 4, 3, 5, dtype=torch.float64) + offset
    error = torch.randn(6, 4, 3, 5, dtype=torch.float64)
    if isinstance(module, nn.GroupNorm):
        groups = given.reshape(6, 2, -1)
        mean = groups.mean(2).repeat_interleave(2, 1)[:, :, None, None]
        deviation = groups.std(2, correction=0).repeat_interleave(2, 1)[:, :, None, None]
    elif module.training:
        mean = given.mean((0, 2, 3), keepdim=True)
        deviation = given.std((0, 2, 3), correction=0, keepdim=True)
    else:
        mean, deviation = torch.zeros(1), torch.ones(1)
    terms = error.abs() * (given.abs() + mean.abs()) / deviation
    source = rules.rule_for(module).slot_source(module, ((given,), {}), module(given), None)
    [slots] = source.slots([error])
    root_of_rows = math.sqrt(6)
    of_keys = terms.sum((0, 2, 3)).norm()
    of_errors = error.abs().sum((0, 2, 3)).norm()
    assert (
        of_keys <= root_of_rows * slots.key_terms * (1 + 1e-5) <= 20 * of_keys
    )  # 1e-5: eps, which is not in the deviation here
    assert of_errors <= root_of_rows * slots.error_terms <= 3 * of_errors


@pytest.mark.parametrize("seed", [23, 136, 190, 310])
def test_columns_that_hide_a_gradient_are_no_reason_to_refuse_it(tmp_path, monkeypatch, seed):
    """With these seeds, random signs make the error signals of the embedding cancel, so that only rounding was left to look at."""
    monkeypatch.setattr(begin, "private_seed", lambda: seed)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for length in range(2, 17):
            recorder.batch(sample_id=range(4))
            model(torch.randint(0, 9, (4, length))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    verdicts = dualform.open(tmp_path / "run").verify().frame["verdict"]
    assert set(verdicts) == {"pass"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the loops in C are for float32
def test_single_rows_that_nearly_cancel_in_the_random_matrix_are_not_refused(tmp_path, dtype):
    """In a wide layer R has one column, and one random key in a hundred is nearly orthogonal to it."""
    inputs, outputs = 100, 20
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh(), nn.Linear(outputs, CLASSES)).to(dtype)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        [column] = next(iter(recorder._recording._passes.parameters.values())).random.T
        for seen in (0.0, 1e-6, 1e-4, 1e-2):
            row = torch.randn(1, inputs, dtype=dtype)
            row += (seen - row @ column) * column / (column @ column)
            recorder.batch(sample_id=[0])
            optimizer.zero_grad()
            F.cross_entropy(model(row), torch.zeros(1, dtype=torch.long)).backward()
            optimizer.step()
    assert dualform.open(tmp_path / "run", model).verify().passed


def test_a_bias_before_batch_normalisation_in_another_optimizer_than_its_weight(tmp_path):
    """The bias has no true gradient, so its update stores no slots; the weight's update, which comes later, still has them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
    parameters = dict(model.named_parameters())
    weight = parameters.pop("0.weight")
    optimizers = [torch.optim.Adam(parameters.values()), torch.optim.Adam([weight])]
    inputs = torch.randn(6, 4)
    with dualform.record(model, optimizers, tmp_path / "run") as recorder:
        for ids in torch.arange(6).split(3):
            recorder.batch(sample_id=ids)
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.cross_entropy(model(inputs[ids]), ids % CLASSES).backward()
            for optimizer in optimizers:
                optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert dual.store.slots("0") == 6
    assert dual.verify().passed


def train_bias_alone(folder, optimizer, *, loss_scale, added=0.0):
    """Train nothing but a bias before a batch normalisation: no other gradient tells by what its rounding was scaled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).double().requires_grad_(False)
    bias = model[0].bias.requires_grad_(True)
    inputs = torch.randn(6, 4, dtype=torch.float64)
    optimizer = OPTIMIZERS[optimizer]([bias])
    with dualform.record(model, optimizer, folder, layers=["0"]) as recorder:
        for ids in torch.arange(6).split(3):
            recorder.batch(sample_id=ids)
            optimizer.zero_grad()
            (loss_scale * F.cross_entropy(model(inputs[ids]), ids % CLASSES)).backward()
            bias.grad.div_(loss_scale).add_(added)
            optimizer.step()
    return dualform.open(folder, model)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("loss_scale", [1e-3, 1.0, 65536.0])
def test_rounding_of_unknown_scale_is_not_refused(tmp_path, optimizer, loss_scale):
    assert train_bias_alone(tmp_path / "run", optimizer, loss_scale=loss_scale).verify().passed


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_more_than_scaled_rounding_is_refused(tmp_path, optimizer):
    with pytest.raises(UnexplainedError):
        train_bias_alone(tmp_path / "run", optimizer, loss_scale=1e-3, added=1e-6)


def test_a_micro_batch_whose_gradients_are_zero_keeps_its_rows(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for sample, weight in ((7, 0.0), (8, 1.0)):
            recorder.batch(sample_id=[sample])
            (weight * model(torch.ones(1, 2)).sum()).backward()
        optimizer.step()
    dual = dualform.open(tmp_path / "run", model)
    assert dual.rows["sample_id"].to_list() == [7, 8]
    assert dual.verify().passed


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_of_a_step_without_any_gradient_are_named_all_the_same(tmp_path, optimizer):
    """A ReLU that is closed for every row: the normalisation before it gets a gradient of exactly zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(3), nn.ReLU(), nn.Linear(3, CLASSES))
    model[2].requires_grad_(False)
    made = OPTIMIZERS[optimizer](model[0].parameters())
    with dualform.record(model, made, tmp_path / "run") as recorder:
        for step in range(2):
            recorder.batch(sample_id=[7, 8])
            x = torch.ones(2, 3) if step else -torch.ones(2, 3)
            F.cross_entropy(model(x), torch.tensor([0, 1])).backward()
            made.step()
            made.zero_grad()
    dual = dualform.open(tmp_path / "run", model)
    assert dual.rows.select("step", "sample_id").rows() == [(0, 7), (0, 8), (1, 7), (1, 8)]
    assert dual.verify().passed
