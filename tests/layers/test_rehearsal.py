"""Running a copy of a model has no consequences for the training."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from dualform.layers.rehearsal import WouldChangeTrainingError, rehearse


def inputs_of(model, *arguments, evaluating=False, **named):
    recorded = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return rehearse(model, (arguments, named), recorded, 4, evaluating=evaluating).by_layer


class Model(nn.Module):
    """A linear map after something that a subclass does to its input."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(3, 2)

    def forward(self, x):
        return self.map(self.prepare(x))

    def prepare(self, x):
        return x


def test_the_inputs_of_layers_are_noted():
    [given] = inputs_of(Model(), torch.randn(4, 5, 3))["map"]
    assert given.lead == (4, 5)
    assert given.numbers.shape == (4, 5)


def test_the_arguments_stay_as_they_were():
    class InPlace(Model):
        def prepare(self, x):
            return x.mul_(2)

    x = torch.ones(4, 3)
    inputs_of(InPlace(), x)
    assert torch.equal(x, torch.ones(4, 3))


@pytest.mark.parametrize("attribute", ["weight", "bias"])
def test_a_write_to_a_parameter_is_refused_before_it_happens(attribute):
    class Clamps(Model):
        def prepare(self, x):
            getattr(self.map, attribute).data.clamp_(-0.1, 0.1)
            return x

    model = Clamps()
    before = getattr(model.map, attribute).clone()
    with pytest.raises(WouldChangeTrainingError, match=r"writes to a parameter or buffer \(aten.clamp_"):
        inputs_of(model, torch.randn(4, 3))
    assert torch.equal(getattr(model.map, attribute), before)


def test_a_call_of_an_original_module_is_refused_before_it_happens():
    """Here by a class attribute, which is shared by all copies."""
    norm = nn.BatchNorm1d(3)

    class Hidden(Model):
        elsewhere = norm

        def __init__(self):
            super().__init__()
            self.norm = norm

        def prepare(self, x):
            return norm(x)

    with pytest.raises(WouldChangeTrainingError, match="calls a BatchNorm1d by a reference that cannot be copied"):
        inputs_of(Hidden(), torch.randn(4, 3))
    assert norm.num_batches_tracked == 0


def test_a_write_to_an_original_buffer_is_refused_before_it_happens():
    """A functional batch normalisation does not say that it writes to its running statistics."""
    norm = nn.BatchNorm1d(3)

    class Functional(Model):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def prepare(self, x):
            return nn.functional.batch_norm(x, norm.running_mean, norm.running_var, training=True)

    with pytest.raises(WouldChangeTrainingError, match="batch_norm"):
        inputs_of(Functional(), torch.randn(4, 3))
    assert torch.equal(norm.running_mean, torch.zeros(3))


def test_random_states_are_put_back():
    class Draws(Model):
        def prepare(self, x):
            return x + torch.randn(3) + random.random() + float(np.random.rand())

    model = Draws()
    x = torch.randn(4, 3)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    inputs_of(model, x)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), str(np.random.get_state()))


TORCH_GENERATOR = torch.Generator()
NUMPY_GENERATOR = np.random.default_rng(0)
NUMPY_STATE = np.random.RandomState(0)
PYTHON_GENERATOR = random.Random(0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda self: torch.rand(3, generator=TORCH_GENERATOR),
        lambda self: torch.randn(3, generator=TORCH_GENERATOR),
        lambda self: torch.zeros(3).bernoulli_(0.5, generator=TORCH_GENERATOR),
        lambda self: torch.randperm(3, generator=TORCH_GENERATOR),
        lambda self: NUMPY_GENERATOR.random(),
        lambda self: NUMPY_STATE.rand(),
        lambda self: PYTHON_GENERATOR.random(),
        lambda self: self.shared.random(),
    ],
)
def test_generators_that_the_model_does_not_hold_are_put_back(draw):
    """Global variables and class attributes, which a copy of the model uses too."""

    class Draws(Model):
        shared = np.random.default_rng(1)

        def prepare(self, x):
            return x + draw(self)

    def states():
        generators = NUMPY_GENERATOR, Draws.shared
        numpy_states = [str(one.bit_generator.state) for one in generators]
        return [
            TORCH_GENERATOR.get_state().tolist(),
            *numpy_states,
            str(NUMPY_STATE.get_state()),
            PYTHON_GENERATOR.getstate(),
        ]

    model = Draws()
    before = states()
    inputs_of(model, torch.randn(4, 3))
    assert states() == before


def test_modes_are_those_of_the_model_or_of_evaluation():
    class Adds(Model):
        def prepare(self, x):
            return x + 1 if self.training else x

    model = Adds()
    x = torch.zeros(4, 3)
    assert inputs_of(model, x, evaluating=True)["map"][0].numbers.any() == 0
    assert inputs_of(model, x)["map"][0].numbers.any()
    assert model.training


def test_the_autocast_cache_keeps_no_weight_without_gradients():
    """A layer that only the rehearsal has run would otherwise get no gradient in the same autocast region."""
    model = Model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inputs_of(model, torch.randn(4, 3))
        assert torch.is_autocast_cache_enabled()
        assert model.map(torch.randn(4, 3)).requires_grad


@pytest.mark.parametrize(
    ("prepare", "operator"),
    [
        (lambda x: x[x[:, 0].argsort()], "sort"),
        (lambda x: x[x[:, 0].topk(4, largest=False).indices], "topk"),
        (lambda x: x[x[:, 0] > -9], "index"),
        (lambda x: x[(x[:, 0] > -9).nonzero()[:, 0]], "nonzero"),
        (lambda x: x + x.sort(1).values, ""),
        (lambda x: x[(-x[:, 0]).argsort()], ""),
        (lambda x: x[torch.tensor([3, 1, 0, 2])], ""),
    ],
)
def test_operators_that_may_order_other_rows_by_content_are_noted(prepare, operator):
    """These rows are in order already, so that sorting them shows nothing."""

    class Ordered(Model):
        def prepare(self, x):
            return prepare(x)

    assert inputs_of(Ordered(), torch.arange(12.0).reshape(4, 3))["map"][0].ordered_by == operator


def test_packing_sequences_orders_no_rows():
    """It sorts by length, but the recurrent layer and unpacking undo that."""

    class Packs(Model):
        def prepare(self, x):
            packed = pack_padded_sequence(x, torch.tensor([1, 3, 2, 5]), batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(packed, batch_first=True)[0]

    assert inputs_of(Packs(), torch.randn(4, 5, 3))["map"][0].ordered_by == ""


SHUFFLES = {
    "torch": lambda rows: torch.randperm(rows).tolist(),
    "numpy": lambda rows: np.random.permutation(rows).tolist(),
    "python": lambda rows: random.sample(range(rows), rows) if rows > 2 else _shuffled(rows),
}


def _shuffled(rows):
    order = list(range(rows))
    random.shuffle(order)
    return order


@pytest.mark.parametrize("rows", range(2, 9))
@pytest.mark.parametrize("shuffle", SHUFFLES.values(), ids=SHUFFLES)
def test_random_orders_are_never_the_trivial_one(shuffle, rows):
    """Otherwise a model that shuffles its rows would now and then look as if it did not."""
    orders = []

    class Shuffles(Model):
        def prepare(self, x):
            orders.append(shuffle(rows))
            return x

    inputs_of(Shuffles(), torch.randn(rows, 3))
    assert sorted(orders[0]) == list(range(rows))
    assert orders[0] != list(range(rows))


def test_dropout_is_off_in_training_mode_too():
    class Drops(Model):
        def __init__(self):
            super().__init__()
            self.drop, self.attention = nn.Dropout(0.9), nn.MultiheadAttention(3, 1, dropout=0.9)

        def prepare(self, x):
            x = self.drop(x) + nn.functional.dropout(x, 0.9) + x * torch.bernoulli(torch.full_like(x, 0.1))
            return self.attention(x, x, x)[0]

    model, x = Drops(), torch.randn(4, 3)
    first = inputs_of(model, x)["map"][0].numbers
    torch.rand(1)  # other masks would be drawn now
    assert np.array_equal(first, inputs_of(model, x)["map"][0].numbers)


def test_a_guard_that_an_interrupt_has_left_behind_refuses_no_call(monkeypatch):
    def interrupted(handle):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(RemovableHandle, "remove", interrupted)
    model = Model()
    try:
        with pytest.raises(KeyboardInterrupt):
            inputs_of(model, torch.ones(4, 3))
        assert model(torch.ones(4, 3)).shape == (4, 2)
    finally:
        _global_forward_pre_hooks.clear()


def test_an_interrupt_as_the_rehearsal_ends_leaves_no_mode_of_pytorch_behind(monkeypatch):
    def interrupted(mode, *error):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(TorchDispatchMode, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        inputs_of(Model(), torch.ones(4, 3))
    assert _get_current_dispatch_mode_stack() == []
    assert torch.is_grad_enabled()
