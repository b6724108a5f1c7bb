"""Layer rules: what the slots of a module say of its parameters' gradients is what autograd says, in float64."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dualform.layers.convolution import geometry_of
from dualform.layers.keys import OneHot, Patches, Vectors
from dualform.layers.layer import Geometry, joined
from dualform.layers.row_proof import BatchAxes
from dualform.layers.rows import RowAxis
from dualform.layers.rules import RULES, queries_of, rule_for, why_left_out
from dualform.layers.slot_source import SlotSource, map_tensors
from dualform.layers.unroll import outputs
from dualform.layers.written import sum_written
from dualform.record.columns import read_batch
from dualform.record.forward_pass import RowFinder
from dualform.record.passes import PendingPasses
from dualform.record.recorded import StoreAs
from dualform.store.memory import Pool

EXACT = {"rtol": 1e-9, "atol": 1e-12}
MODES = ("zeros", "reflect", "replicate", "circular")


@dataclass
class Call:
    """One call of a module. `axes`: for each of its outputs, the axis that holds the rows; None: there is none."""

    module: nn.Module
    args: tuple
    kwargs: dict = field(default_factory=dict)
    rows: int = 1
    axes: tuple = (0,)
    lead: tuple | None = None
    """For modules that leave it open: which axis of what comes in holds the rows."""

    def __post_init__(self):
        self.module.double()
        with torch.no_grad():  # weights of one would hide a factor
            for parameter in self.module.parameters():
                parameter.copy_(torch.randn_like(parameter))


class Conv1D(nn.Module):
    """As Hugging Face writes it: a linear map with its weight the other way round."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        size = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(size)


Conv1D.__module__ = "transformers.pytorch_utils"


class EmbeddingAdapter(nn.Module):
    """As PEFT writes it: an embedding with products of low rank beside it, one for each adapter."""

    disable_adapters = merged = False

    def __init__(self, base_layer, ranks, scaling):
        super().__init__()
        tokens, width = base_layer.weight.shape
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_embedding_A = nn.ParameterDict({name: torch.zeros(r, tokens) for name, r in ranks.items()})
        self.lora_embedding_B = nn.ParameterDict({name: torch.zeros(width, r) for name, r in ranks.items()})
        self.active_adapters, self.scaling = list(ranks), dict.fromkeys(ranks, scaling)

    def get_base_layer(self):
        return self.base_layer

    def forward(self, x):
        base, result = self.base_layer, self.base_layer(x)
        if self.disable_adapters or self.merged:
            return result
        for name in self.active_adapters:
            table, outward = self.lora_embedding_A[name], self.lora_embedding_B[name]
            inner = nn.functional.embedding(
                x, table.T, padding_idx=base.padding_idx, scale_grad_by_freq=base.scale_grad_by_freq
            )
            result = result + inner @ outward.T * self.scaling[name]
        return result


# One strategy for each type of module


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


booleans, counts, batch = st.booleans(), st.integers(1, 4), st.integers(0, 3)


@st.composite
def leading(draw):
    """A leading shape, and its axis that holds the rows: another length than the others, so that it is found."""
    rows, others = draw(st.sampled_from([0, 1, 4])), draw(st.lists(st.integers(2, 3), max_size=3))
    axis = draw(st.integers(0, len(others)))
    return (*others[:axis], rows, *others[axis:]), axis


@st.composite
def linears(draw, make=lambda d_in, d_out, bias: nn.Linear(d_in, d_out, bias)):
    (lead, axis), d_in = draw(leading()), draw(counts)
    module = make(d_in, draw(counts), draw(booleans))
    return Call(module, (normal(*lead, d_in),), rows=lead[axis], axes=(axis,))


@st.composite
def embeddings(draw):
    (lead, axis), count = draw(leading()), draw(st.integers(1, 5))
    settings = {"scale_grad_by_freq": draw(booleans)}
    if draw(booleans):
        settings["padding_idx"] = draw(st.integers(-count, count - 1))
    numbers = torch.randint(0, count, lead, dtype=draw(st.sampled_from([torch.int64, torch.int32])))
    return Call(nn.Embedding(count, draw(counts), **settings), (numbers,), rows=lead[axis], axes=(axis,))


@st.composite
def embedding_adapters(draw):
    call = draw(embeddings())
    ranks = {name: draw(counts) for name in draw(st.sampled_from(["a", "ab"]))}
    module = EmbeddingAdapter(call.module, ranks, draw(st.sampled_from([1.0, 0.3])))
    return Call(module, call.args, rows=call.rows, axes=call.axes)


@st.composite
def convolutions(draw, kind, axes):
    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    mode, groups, single = (
        draw(st.sampled_from(MODES)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([False] * 4 + [1])),
    )
    kernel, dilation, size = each(1, 3), each(1, 2), each(5, 7 - axes // 2)
    if draw(booleans):
        padding, stride = draw(st.sampled_from(["same", "valid"])), 1
    else:
        padding, stride = each(0, 3), each(1, 3)
    module = kind(
        groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), kernel, stride, padding, dilation, groups,
        bias=draw(booleans), padding_mode=mode,
    )  # fmt: skip
    rows = 1 if single else draw(batch)
    maps = normal(*(() if single else (rows,)), module.in_channels, *size)
    return Call(module, (maps,), rows=rows, axes=(None if single else 0,))


@st.composite
def over_last_axes(draw, kind):
    (lead, axis), shape = draw(leading()), tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    options = {"bias": draw(booleans)} if kind is nn.LayerNorm else {"eps": draw(st.sampled_from([None, 1e-3]))}
    return Call(kind(shape, **options), (normal(*lead, *shape),), rows=lead[axis], axes=(axis,), lead=(axis, len(lead)))


@st.composite
def group_norms(draw):
    groups, rows, more = draw(counts), draw(batch), draw(st.lists(st.integers(1, 3), max_size=3))
    channels = groups * draw(counts)
    assume(rows * channels // groups * math.prod(more) != 1)  # PyTorch refuses it
    return Call(nn.GroupNorm(groups, channels), (normal(rows, channels, *more),), rows=rows)


@st.composite
def batch_norms(draw, kind, sizes):
    channels, rows, more = draw(counts), draw(batch), [draw(st.integers(1, 3)) for _ in range(draw(sizes))]
    module = kind(channels, track_running_stats=draw(booleans), momentum=draw(st.sampled_from([0.1, None])))
    module.train(draw(booleans))
    assume(rows * math.prod(more) != 1 or not (module.training or module.running_mean is None))
    call = Call(module, (normal(rows, channels, *more),), rows=rows)
    if module.running_mean is not None:
        module.running_mean.normal_()
        module.running_var.uniform_(0.5, 2)
    return call


@st.composite
def attentions(draw):
    heads, rows, single, first = draw(st.integers(1, 2)), draw(batch), draw(booleans), draw(booleans)
    width, rows = heads * draw(st.integers(1, 3)), 1 if single else rows
    before, after = draw(counts), draw(counts)
    inputs = draw(st.sampled_from(["self", "cross", "separate"]))
    after = before if inputs == "self" else after
    sizes = {"kdim": draw(counts), "vdim": draw(counts)} if inputs == "separate" else {}
    module = nn.MultiheadAttention(
        width, heads, batch_first=first, bias=draw(booleans), dropout=draw(st.sampled_from([0.0, 0.4])),
        add_bias_kv=draw(booleans), add_zero_attn=draw(booleans), **sizes,
    )  # fmt: skip
    module.train(draw(booleans))

    def entry(time, features):
        return normal(*((time,) if single else (rows, time) if first else (time, rows)), features)

    query = entry(before, width)
    key = query if inputs == "self" else entry(after, sizes.get("kdim", width))
    value = key if inputs != "separate" else entry(after, sizes["vdim"])
    named = {"need_weights": draw(booleans), "average_attn_weights": draw(booleans)}
    masked = rows > 0 or named["need_weights"]  # else PyTorch itself fails
    mask = draw(st.sampled_from([None, "float", "bool", "every head", "causal"])) if masked else None
    causal = torch.ones(before, after, dtype=torch.bool).triu(1)
    if mask == "causal":
        named |= {"attn_mask": causal.double().masked_fill(causal, -math.inf), "is_causal": draw(booleans)}
    elif mask is not None:
        shape = (rows * heads, before, after) if mask == "every head" else (before, after)
        random = torch.rand(shape) < 0.3
        random[..., 0] = False  # a row without any key gives nan, in PyTorch itself
        named["attn_mask"] = random if mask == "bool" else torch.randn(shape, dtype=torch.float64)
    if masked and draw(booleans):
        padding = torch.rand((after,) if single else (rows, after)) < 0.3
        padding[..., 0] = False
        typed = isinstance(named.get("attn_mask"), torch.Tensor) and named["attn_mask"].dtype == torch.float64
        named["key_padding_mask"] = padding.double().masked_fill(padding, -math.inf) if typed else padding
    axis = None if single else 0 if first else 1
    return Call(module, (query, key, value), named, rows, (axis, None if single else 0))


@st.composite
def recurrents(draw, kind):
    rows, time, first = draw(batch), draw(counts), draw(booleans)
    layers, sides = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    module = kind(
        2, 3, layers, batch_first=first, bidirectional=sides == 2, bias=draw(booleans), dropout=0.3 * (layers > 1)
    )
    lstm, args = kind is nn.LSTM, (normal(*((rows, time) if first else (time, rows)), 2),)
    if draw(booleans):
        states = tuple(normal(layers * sides, rows, 3) for _ in range(2))
        args = (*args, states if lstm else states[0])
    return Call(module, args, rows=rows, axes=(0 if first else 1, 1, 1)[: 2 + lstm])


@st.composite
def cells(draw, kind):
    rows = draw(batch)
    states = tuple(normal(rows, 3) for _ in range(2))
    return Call(
        kind(2, 3, bias=draw(booleans)),
        (normal(rows, 2), states if kind is nn.LSTMCell else states[0]),
        rows=rows,
        axes=(0, 0)[: 1 + (kind is nn.LSTMCell)],
    )


CALLS = {
    nn.Linear: linears(),
    Conv1D: linears(lambda d_in, d_out, bias: Conv1D(d_out, d_in)),
    nn.Embedding: embeddings(),
    EmbeddingAdapter: embedding_adapters(),
    nn.Conv1d: convolutions(nn.Conv1d, 1),
    nn.Conv2d: convolutions(nn.Conv2d, 2),
    nn.Conv3d: convolutions(nn.Conv3d, 3),
    nn.LayerNorm: over_last_axes(nn.LayerNorm),
    nn.RMSNorm: over_last_axes(nn.RMSNorm),
    nn.GroupNorm: group_norms(),
    nn.BatchNorm1d: batch_norms(nn.BatchNorm1d, st.integers(0, 1)),
    nn.BatchNorm2d: batch_norms(nn.BatchNorm2d, st.just(2)),
    nn.BatchNorm3d: batch_norms(nn.BatchNorm3d, st.just(3)),
    nn.MultiheadAttention: attentions(),
    nn.LSTM: recurrents(nn.LSTM),
    nn.GRU: recurrents(nn.GRU),
    nn.RNN: recurrents(nn.RNN),
    nn.LSTMCell: cells(nn.LSTMCell),
    nn.GRUCell: cells(nn.GRUCell),
    nn.RNNCell: cells(nn.RNNCell),
}
SEEDS = st.integers(0, 2**20)
every_type = pytest.mark.parametrize("kind", CALLS, ids=lambda kind: kind.__name__)
# PyTorch pads once more then; so do we
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def test_every_type_in_the_table_is_tested():
    assert set(CALLS) == {*RULES, Conv1D, EmbeddingAdapter}


# Running a call


@dataclass
class Ran:
    layers: dict
    found: list
    """(layer, what the rule found)"""
    source: SlotSource
    errors: tuple
    """The gradients of its outputs."""


def run(call, reached=None, only=None):
    """Call the module, with a random loss. reached: the outputs it depends on; only: the one row it depends on."""
    module, rule = call.module, rule_for(call.module)
    assert why_left_out(module) is None
    layers = {layer.name: layer for layer in rule.layers(module, "name", lambda short: short)}
    begun = rule.begin(module) if rule.begin else None
    output = map_tensors(module(*call.args, **call.kwargs), Tensor.clone)
    source = rule.slot_source(module, (call.args, call.kwargs), output, begun)
    tensors = outputs([tensor for tensor in (output if isinstance(output, tuple) else [output]) if tensor is not None])
    loss = torch.zeros((), dtype=torch.float64)
    for place, (tensor, axis) in enumerate(zip(tensors, call.axes, strict=False)):
        weights = torch.randn_like(tensor)
        if only is not None and axis is not None:
            weights[(slice(None),) * axis + (torch.arange(call.rows) != only,)] = 0
        if reached is None or place in reached:
            loss = loss + (tensor * weights).sum()
    errors = torch.autograd.grad(loss, source.outputs, retain_graph=True, allow_unused=True)
    module.zero_grad()
    loss.backward()
    is_reached = any(error is not None for error in errors)
    slots = source.slots(list(errors)) if is_reached else []
    found = [(layers[joined("name", one.layer)], one) for one in slots]
    return Ran(layers, found, source, errors)


def slots(layer, found, call):
    """(keys, errors, layout) in the order of rows and positions, as the recorder puts them."""
    count = found.keys.dim() - 1 if found.lead is None else found.lead
    lead = tuple(found.keys.shape[:count])
    told = call.lead[0] if call.lead is not None and len(lead) == call.lead[1] else found.axis
    fits = [axis for axis, length in enumerate(lead) if length == call.rows]
    layout = RowAxis(fits[0] if told is None and fits else told or 0).layout(lead, call.rows)
    keys, errors = found.keys.detach(), found.errors.detach()
    if layer.geometry is None:
        keys, errors = layout.slots(keys), layout.slots(errors)
        return (OneHot(keys, layer.d_in, errors.dtype) if layer.form == "numbers" else Vectors(keys)), errors, layout
    maps = Patches(layout.slots(keys.flatten(1)).reshape(-1, *keys.shape[1:]), layer.geometry)
    return maps, layout.slots(errors.flatten(1)).reshape(-1, errors.shape[-1]), layout


def gradients(call, ran):
    """Σ over slots of each use, by parameter."""
    parameters = dict(call.module.named_parameters())
    total = {name: torch.zeros_like(parameters[name]) for layer in ran.layers.values() for name in layer.parameters}
    for layer, one in ran.found:
        keys, errors, _ = slots(layer, one, call)
        assert len(keys) == len(errors)
        for use in layer.uses:
            own = total[use.parameter].detach()
            own = own[use.rows[0] : use.rows[1]] if use.rows else own
            own += sum_written(use, keys, errors).reshape(own.shape)
    return total


@every_type
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=40)
def test_slots_add_up_to_the_gradient(kind, data, seed):
    torch.manual_seed(seed)
    call = data.draw(CALLS[kind])
    reached = data.draw(st.sets(st.integers(0, len(call.axes) - 1), min_size=1))
    if call.kwargs.get("need_weights") is False:
        reached = {0}
    ran = run(call, reached)
    found, parameters = gradients(call, ran), dict(call.module.named_parameters())
    uncovered = {name for name in parameters if name not in found}
    assert uncovered <= {"bias_k", "bias_v", "base_layer.weight"}
    for name, gradient in found.items():
        expected = parameters[name].grad
        expected = torch.zeros_like(gradient) if expected is None else expected
        torch.testing.assert_close(gradient, expected, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def test_a_loss_of_the_attention_weights_alone():
    """What comes out had no part in it: the last projection gets error signals of zero, the first ones get theirs."""
    for shape in ((4, 2), (4, 3, 2)):
        torch.manual_seed(0)
        axis = None if len(shape) == 2 else 1
        call = Call(
            nn.MultiheadAttention(2, 1), (normal(*shape),) * 3, rows=1 if axis is None else 3, axes=(axis, axis)
        )
        found = gradients(call, run(call, {1}))
        assert not found["out_proj.weight"].any()
        for name in ("in_proj_weight", "in_proj_bias"):
            torch.testing.assert_close(found[name], call.module.get_parameter(name).grad, **EXACT)


@every_type
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=12)
def test_a_slot_belongs_to_the_row_that_it_comes_from(kind, data, seed):
    """With a loss that depends on one row, the slots of all others have no error signal."""
    torch.manual_seed(seed)
    call = data.draw(CALLS[kind].filter(lambda call: call.rows > 1))
    row = data.draw(st.integers(0, call.rows - 1))
    for layer, one in run(call, only=row).found:
        keys, errors, layout = slots(layer, one, call)
        others = torch.arange(len(errors)) // (len(errors) // layout.rows) != row
        assert not errors[others].any(), layer.name
        if layer.form == "parts":
            assert not keys.vectors()[others].any(), layer.name


@every_type
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=12)
def test_the_audit_sees_the_gradient_in_the_slots(kind, data, seed):
    """What a pass adds up, call by call, is the gradient seen through R."""
    torch.manual_seed(seed)
    call = data.draw(CALLS[kind])
    ran = run(call)
    named = {n: p for n, p in call.module.named_parameters() if any(n in y.parameters for y in ran.layers.values())}
    task, ended = -1, []
    passes = PendingPasses(
        store_as=StoreAs("float64", "slots", Pool()),
        rows=RowFinder(BatchAxes(), {}, check=False, on_unclear="leave out"),
        seed=seed,
        graph_task=lambda: task,
        when_ended=ended.append,
    )
    module = passes.enter("name", call.module, list(ran.layers.values()), named)
    passes.begin(read_batch(0, {"sample_id": torch.arange(call.rows)}, None))
    forward = passes.begin_forward(call.module)
    visit = passes.forward(
        module, ran.source.key, forward, lambda saved, errors: ran.source.slots(errors), is_data=True
    )
    task = 1
    if any(error is not None for error in ran.errors):
        passes.backward(visit, ran.errors, ())
    for parameter in passes.parameters.values():
        passes.counted(parameter)
    for settle in ended:
        settle()
    for parameter in passes.parameters.values():
        gradient = parameter.tensor.grad
        assert not any(layer.problems for layer in module.layers)
        torch.testing.assert_close(
            torch.from_numpy(parameter.share(1).added),
            torch.from_numpy(parameter.project(gradient)),
            **EXACT,
            msg=lambda text, parameter=parameter: f"{parameter.name}: {text}",
        )


@every_type
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=6)
def test_finding_slots_changes_nothing(kind, data, seed):
    torch.manual_seed(seed)
    call = data.draw(CALLS[kind])
    ran = run(call)
    before = [(p.detach().clone(), p.grad) for p in call.module.parameters()]
    buffers, state = [b.clone() for b in call.module.buffers()], torch.get_rng_state()
    for errors in (list(ran.errors), None):
        for one in ran.source.slots(errors):
            assert one.errors is None or not one.errors.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    for p, (value, gradient) in zip(call.module.parameters(), before, strict=True):
        assert torch.equal(p, value)
        assert p.grad is gradient
    assert all(torch.equal(b, known) for b, known in zip(call.module.buffers(), buffers, strict=True))


@pytest.mark.parametrize(
    "kind", [kind for kind in CALLS if "Norm" not in kind.__name__], ids=lambda kind: kind.__name__
)
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=6)
def test_without_error_signals_the_keys_are_the_same(kind, data, seed):
    """As a question asks: attention needs no gradients."""
    torch.manual_seed(seed)
    call = data.draw(CALLS[kind])
    ran = run(call)
    found = [(joined("name", one.layer), one) for one in ran.source.slots(None)]
    assert [name for name, _ in found] == [layer.name for layer, _ in ran.found]
    for (name, one), (layer, other) in zip(found, ran.found, strict=True):
        assert one.errors is None
        assert (one.axis, one.lead) == (other.axis, other.lead)
        torch.testing.assert_close(one.keys, other.keys, msg=name)
        assert queries_of(layer, one.keys.detach()).shape[-1] == (1 if layer.form == "numbers" else layer.d_in)


# The forms of keys


@st.composite
def maps(draw):
    """(a convolution, what comes in, its keys)"""
    call = draw(st.sampled_from([nn.Conv1d, nn.Conv2d, nn.Conv3d]).flatmap(lambda kind: CALLS[kind]))
    entry = call.args[0].detach()
    entry = entry.unsqueeze(0) if call.axes == (None,) else entry
    return call.module, entry, Patches(entry, geometry_of(call.module))


@st.composite
def keys_of_any_form(draw):
    """(keys, how many groups they may fall into)"""
    form = draw(st.sampled_from(["vectors", "numbers", "maps"]))
    if form == "maps":
        module, _, found = draw(maps())
        return found, module.groups
    count, d_in, groups = draw(st.integers(0, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    if form == "vectors":
        return Vectors(torch.randn(count, groups * d_in, dtype=torch.float64)), groups
    return OneHot(torch.randint(0, d_in, (count, 1)), d_in, torch.float64), 1


def test_patches_of_maps_are_those_of_unfold():
    geometry = Geometry(3, (2, 3), (2, 1), (1, 1, 2, 2), (1, 2), "zeros")
    entry = torch.randn(4, 3, 6, 7, dtype=torch.float64)
    expected = nn.functional.unfold(entry, (2, 3), dilation=(1, 2), padding=(1, 2), stride=(2, 1))
    torch.testing.assert_close(
        Patches(entry, geometry).vectors(), expected.transpose(1, 2).reshape(-1, 18), rtol=0, atol=0
    )
    assert math.prod(geometry.positions((6, 7))) == expected.shape[2]


@given(maps())
@settings(max_examples=60)
def test_patches_times_the_weight_are_the_convolution(drawn):
    module, entry, keys = drawn
    weight = module.weight.detach().reshape(module.groups, module.out_channels // module.groups, -1)
    patches = keys.vectors().reshape(len(keys), module.groups, weight.shape[2])
    found = torch.einsum("ngi,goi->ngo", patches, weight).flatten(1)
    expected = module(entry).detach().flatten(2).transpose(1, 2).reshape(-1, module.out_channels)
    torch.testing.assert_close(found if module.bias is None else found + module.bias.detach(), expected, **EXACT)


@given(keys_of_any_form(), st.integers(1, 3), SEEDS)
@settings(max_examples=100)
def test_products_of_keys_are_those_of_their_vectors(drawn, width, seed):
    torch.manual_seed(seed)
    keys, groups = drawn
    vectors = keys.vectors()
    count, d_in = vectors.shape
    assert len(keys) == count
    random = torch.randn(d_in // groups, width, dtype=torch.float64)
    apart = vectors.reshape(count, groups, d_in // groups)
    projected = torch.einsum("ngi,ik->ngk", apart, random)
    torch.testing.assert_close(keys.project(random, (), groups), projected[:, 0] if groups == 1 else projected, **EXACT)
    errors = torch.randn(count, groups * 2, dtype=torch.float64)
    by_group = errors.reshape(count, groups, 2)
    expected = torch.einsum("ngo,ngi->goi", by_group, apart).reshape(groups * 2, d_in // groups)
    torch.testing.assert_close(keys.outer(errors, (), groups), expected, **EXACT)
    queries = torch.randn(width, d_in, dtype=torch.float64)
    if not isinstance(keys, OneHot) or d_in > 1:
        torch.testing.assert_close(keys.dot(queries), queries @ vectors.T, **EXACT)


def test_numbers_meet_numbers():
    keys = OneHot(torch.tensor([2, 0, 2]), 3, torch.float64)
    assert keys.dot(torch.tensor([[2.0], [1.0]])).tolist() == [[1, 0, 1], [0, 0, 0]]
    assert keys.select(slice(1, 2)).vectors().tolist() == [[1, 0, 0]]


@given(st.integers(0, 4), st.integers(0, 4), SEEDS)
def test_a_part_of_vectors_counts_alone(low, more, seed):
    torch.manual_seed(seed)
    high = low + more
    data, queries = torch.randn(5, 8, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    keys, part = Vectors(data), data[:, low:high]
    random, errors = torch.randn(more, 2, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(keys.dot(queries, (low, high)), queries[:, low:high] @ part.T, **EXACT)
    torch.testing.assert_close(keys.project(random, (low, high)), part @ random, **EXACT)
    torch.testing.assert_close(keys.outer(errors, (low, high)), errors.T @ part, **EXACT)
