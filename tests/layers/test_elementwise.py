import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualform
import halves
from dualform.layers import elementwise
from dualform.layers.rules import rule_for


class LlamaNorm(nn.Module):
    """As Llama, Mistral and Qwen have it: rounded to the input's type before the weight."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(dtype)


class GemmaNorm(LlamaNorm):
    """As Gemma has it: 1 is added to the weight, and the product is rounded."""

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class LayerScale(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.lambda1 = nn.Parameter(torch.full((size,), 0.1))

    def forward(self, hidden_state):
        return hidden_state * self.lambda1


class Squared(LayerScale):
    def forward(self, x):
        return x * self.lambda1**2


class Mixing(LayerScale):
    """Every output depends on every entry."""

    def forward(self, x):
        return x * (x @ self.lambda1).unsqueeze(-1)


class Softmaxed(LayerScale):
    def forward(self, x):
        return x * self.lambda1.softmax(0)


class TwoInputs(LayerScale):
    def forward(self, x, y):
        return (x + y) * self.lambda1


class WithBuffer(LayerScale):
    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("mean", torch.zeros(size))


class AddsOnly(LayerScale):
    """Its gradient does not depend on the input: it is a bias."""

    def forward(self, x):
        return x.sum(-1, keepdim=True) * 0 + self.lambda1.sum() + x


class Raises(LayerScale):
    def forward(self, x):
        raise RuntimeError("not today")


ELEMENTWISE = [LlamaNorm, GemmaNorm, LayerScale]


@pytest.mark.parametrize("kind", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_that_multiply_by_a_vector_are_recognised(kind, dtype):
    assert elementwise.is_elementwise(kind(8).to(dtype))


@pytest.mark.parametrize("kind", [Squared, Mixing, Softmaxed, TwoInputs, WithBuffer, AddsOnly, Raises])
def test_other_modules_with_one_vector_are_not(kind):
    assert not elementwise.is_elementwise(kind(8))
    assert rule_for(kind(8)) is None


def test_a_patched_forward_is_not_trusted():
    module = LlamaNorm(8)
    module.forward = lambda x: x
    assert not elementwise.is_elementwise(module)


def test_recognising_leaves_random_state_and_module_as_they_were():
    module = LlamaNorm(8)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    elementwise.is_elementwise(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.weight.grad is None


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_parts_add_up_to_the_gradient(kind):
    module = kind(8)
    name = elementwise.name_of_vector(module)
    given = torch.randn(3, 5, 8)
    error = torch.randn(3, 5, 8)
    [parts] = elementwise.slots(module, [given], [error])
    module(given).backward(error)
    torch.testing.assert_close(parts.keys.sum((0, 1)), module.get_parameter(name).grad)


class Network(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = norm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


@pytest.mark.parametrize("kind", ELEMENTWISE)
@pytest.mark.parametrize("cast", [None, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # the compiler about itself
@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_training_with_such_a_module_is_recorded_whole(tmp_path, kind, cast, compiled):
    if cast is not None:
        halves.require(cast)
    torch.manual_seed(0)
    model = Network(kind)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(6):
            x = torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(step))
            recorder.batch(sample_id=range(4))
            with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None):
                loss = F.cross_entropy(run(x).flatten(0, 1), x.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dual = dualform.open(tmp_path / "run", model)
    assert "norm" in dual.layers
    assert not dual.store.manifest.left_out
    assert dual.verify().passed
    without = dual.masked(drop="sample_id = 2")
    assert not torch.equal(next(without.norm.parameters()), next(model.norm.parameters()))
