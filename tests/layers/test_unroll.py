"""Recurrent layers: error signals × keys are autograd's gradients, and both are those of a plain loop."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from dualform.layers.rules import why_left_out
from dualform.layers.slot_source import map_tensors
from dualform.layers.unroll import names, outputs, shown_keys, unroll

D_INPUT, D_HIDDEN = 3, 2
SEQUENCES = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **settings: nn.RNN(*sizes, nonlinearity="relu", **settings),
}
CELLS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "tanh": nn.RNNCell,
    "relu": lambda *sizes, **settings: nn.RNNCell(*sizes, nonlinearity="relu", **settings),
}


@dataclass(frozen=True)
class Case:
    kind: str
    cell: bool = False
    form: str = "dense"  # dense, unbatched, sorted, unsorted
    layers: int = 1
    bidirectional: bool = False
    batch_first: bool = False
    bias: bool = True
    dropout: float = 0.0
    lengths: tuple[int, ...] = (3, 3)
    state: str | None = None  # positional, keyword
    reached: tuple[bool, ...] = ()  # which outputs the loss depends on; all, if not said
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def module(self):
        if self.cell:
            return CELLS[self.kind](D_INPUT, D_HIDDEN, bias=self.bias, dtype=self.dtype)
        return SEQUENCES[self.kind](
            D_INPUT,
            D_HIDDEN,
            num_layers=self.layers,
            bidirectional=self.bidirectional,
            batch_first=self.batch_first,
            bias=self.bias,
            dropout=self.dropout if self.layers > 1 else 0.0,
            dtype=self.dtype,
        )

    def arguments(self):
        time, rows = max(self.lengths, default=3), len(self.lengths)
        lead = (time,) if self.form == "unbatched" else (rows, time) if self.batch_first else (time, rows)
        if self.cell:
            lead = () if self.form == "unbatched" else (rows,)
        entry = torch.randn(*lead, D_INPUT, dtype=self.dtype, requires_grad=True)
        if self.form in ("sorted", "unsorted"):
            lengths = torch.tensor(sorted(self.lengths, reverse=True) if self.form == "sorted" else self.lengths)
            entry = pack_padded_sequence(entry, lengths, self.batch_first, enforce_sorted=self.form == "sorted")
        if self.state is None:
            return (entry,), {}
        stack = [] if self.cell else [self.layers * (1 + self.bidirectional)]
        shape = stack + ([] if self.form == "unbatched" else [rows])
        state = [torch.randn(*shape, D_HIDDEN, dtype=self.dtype) for _ in range(2)]
        state = tuple(state) if self.kind == "lstm" else state[0]
        return ((entry, state), {}) if self.state == "positional" else ((entry,), {"hx": state})


@st.composite
def cases(draw, dropout=(0.0, 0.5, 1.0), **fixed):
    kind, cell = draw(st.sampled_from(sorted(SEQUENCES))), draw(st.booleans())
    form = draw(st.sampled_from(["dense", "unbatched"] + ["sorted", "unsorted"] * (not cell)))
    time, rows = draw(st.integers(1, 5)), 1 if form == "unbatched" else draw(st.integers(0, 4))
    count = 2 - cell + (kind == "lstm")
    lengths = (time,) * rows
    if form in ("sorted", "unsorted"):
        lengths = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    return Case(
        kind=kind,
        cell=cell,
        form=form,
        layers=1 if cell else draw(st.integers(1, 3)),
        bidirectional=not cell and draw(st.booleans()),
        batch_first=draw(st.booleans()),
        bias=draw(st.booleans()),
        dropout=draw(st.sampled_from(dropout)),
        lengths=lengths,
        state=draw(st.sampled_from([None, "positional", "keyword"])),
        reached=draw(st.tuples(*[st.booleans()] * count).filter(any)),
        seed=draw(st.integers(0, 2**20)),
        **fixed,
    )


@dataclass(frozen=True)
class Ran:
    module: nn.Module
    arguments: tuple
    rng: torch.Tensor
    weights: list  # of the outputs in the loss
    errors: tuple
    unrolled: list


def aliases(value):
    """What a module returned, as its caller sees it: gradients are those of what is done with it outside the module."""
    return [tensor.clone() for tensor in outputs(value)]


def run(case):
    """Call the module, and unroll the call; the module's parameters have their gradients."""
    torch.manual_seed(case.seed)
    module, arguments = case.module(), case.arguments()
    rng = torch.get_rng_state()
    found = aliases(module(*arguments[0], **arguments[1]))
    weights = [torch.randn_like(value) for value in found]
    terms = [(weight * value).sum() for weight, value in zip(weights, found, strict=True)]
    loss = sum(term for term, reached in zip(terms, case.reached or [True] * 3, strict=False) if reached)
    errors = torch.autograd.grad(loss, found, retain_graph=True, allow_unused=True)
    loss.backward()
    return Ran(module, arguments, rng, weights, errors, unroll(module, arguments, errors, rng))


def gradients(module, unrolled):
    """Σ error ⊗ key, by parameter name."""
    found = {}
    for one in unrolled:
        keys, errors = one.keys.flatten(0, 1), one.errors.flatten(0, 1)
        into, onto = errors, errors
        if isinstance(module, nn.GRU | nn.GRUCell):
            r, z, n_input, n_hidden = errors.chunk(4, dim=1)
            into, onto = torch.cat([r, z, n_input], dim=1), torch.cat([r, z, n_hidden], dim=1)
        suffix = f"_{one.name}" if one.name else ""
        found[f"weight_ih{suffix}"] = into.T @ keys[:, : -module.hidden_size]
        found[f"weight_hh{suffix}"] = onto.T @ keys[:, -module.hidden_size :]
        if module.bias:
            found[f"bias_ih{suffix}"], found[f"bias_hh{suffix}"] = into.sum(0), onto.sum(0)
    return found


def assert_gradients(module, found, **tolerance):
    assert found.keys() == dict(module.named_parameters()).keys()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.grad, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@given(cases())
@settings(max_examples=300)
def test_errors_times_keys_are_the_gradients(case):
    ran = run(case)
    assert_gradients(ran.module, gradients(ran.module, ran.unrolled), rtol=1e-9, atol=1e-10)


@given(cases(dtype=torch.float32))
@settings(max_examples=100)
def test_errors_times_keys_are_the_gradients_in_float32(case):
    """There torch runs other code, for nn.LSTM oneDNN's; the masks of dropout are the same."""
    ran = run(case)
    assert_gradients(ran.module, gradients(ran.module, ran.unrolled), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["dense", "unsorted"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_many_masks_of_dropout(kind, form, dtype):
    """More numbers than torch draws in one go."""
    lengths = tuple(40 - 3 * (row % 7) for row in range(60)) if form == "unsorted" else (40,) * 60
    shape = {"form": form, "lengths": lengths, "layers": 3, "bidirectional": True, "batch_first": True}
    ran = run(Case(kind, dropout=0.5, dtype=dtype, **shape))
    exact = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-3}
    assert_gradients(ran.module, gradients(ran.module, ran.unrolled), **exact)


def plain_step(kind, w_ih, w_hh, b_ih, b_hh, probe, x, h, c):
    """One row at one time; the probe is added to the pre-activations, so that its gradient is theirs."""
    by_x, by_h = w_ih @ x + b_ih, w_hh @ h + b_hh
    if kind == "lstm":
        i, f, g, o = (by_x + by_h + probe).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if kind == "gru":
        (r_x, z_x, n_x), (r_h, z_h, n_h), (r, z, n_input, n_hidden) = by_x.chunk(3), by_h.chunk(3), probe.chunk(4)
        r, z = (r_x + r_h + r).sigmoid(), (z_x + z_h + z).sigmoid()
        n = (n_x + n_input + r * (n_h + n_hidden)).tanh()
        return (1 - z) * n + z * h, c
    pre = by_x + by_h + probe
    return (pre.relu() if kind == "relu" else pre.tanh()), c


def plainly(module, kind, sequences, start, by_output, by_last):
    """{(name, time, row): (key, error)}, with a loop over layers, directions, rows and times.

    sequences: for each row (time, d_input). start: (h, c), each (layers × directions, rows, d_hidden). The loss is
    linear, with weights by_output for each row (time, directions × d_hidden), and by_last like start.
    """
    parameters, slots, loss = dict(module.named_parameters()), {}, 0
    sides = 2 if getattr(module, "bidirectional", False) else 1
    found = names(module)
    for layer in range(len(found) // sides):
        above = [[] for _ in sequences]
        for place in range(layer * sides, (layer + 1) * sides):
            suffix = f"_{found[place]}" if found[place] else ""
            w_ih, w_hh = parameters[f"weight_ih{suffix}"], parameters[f"weight_hh{suffix}"]
            nothing = w_ih.new_zeros(len(w_ih))
            b_ih, b_hh = parameters.get(f"bias_ih{suffix}", nothing), parameters.get(f"bias_hh{suffix}", nothing)
            for row, sequence in enumerate(sequences):
                h, c = start[0][place, row], start[1][place, row]
                hidden = {}
                for time in sorted(range(len(sequence)), reverse=place % sides == 1):
                    probe = w_ih.new_zeros(4 * D_HIDDEN if kind in ("lstm", "gru") else D_HIDDEN).requires_grad_()
                    slots[found[place], time, row] = (torch.cat([sequence[time], h]), probe)
                    h, c = plain_step(kind, w_ih, w_hh, b_ih, b_hh, probe, sequence[time], h, c)
                    hidden[time] = h
                above[row].append(torch.stack([hidden[time] for time in range(len(sequence))]))
                loss = loss + by_last[0][place, row] @ h + by_last[1][place, row] @ c
        sequences = [torch.cat(both, dim=1) for both in above]
    loss = loss + sum((weight * sequence).sum() for weight, sequence in zip(by_output, sequences, strict=True))
    errors = torch.autograd.grad(loss, [probe for _, probe in slots.values()])
    return {slot: (key.detach(), error) for (slot, (key, _)), error in zip(slots.items(), errors, strict=True)}


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("form", ["dense", "unbatched", "sorted", "unsorted", "cell"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_keys_and_errors_are_those_of_a_plain_loop(kind, form, bidirectional, bias):
    torch.manual_seed(0)
    cell = form == "cell"
    lengths = {"dense": [4, 4, 4], "unbatched": [4], "sorted": [4, 3, 1], "unsorted": [2, 4, 1, 3], "cell": [1, 1]}[
        form
    ]
    case = Case(kind, cell=cell, layers=1 if cell else 2, bidirectional=bidirectional and not cell, bias=bias)
    module, rows = case.module(), len(lengths)
    places, width = len(names(module)), D_HIDDEN * (1 + case.bidirectional)

    sequences = [torch.randn(n, D_INPUT, dtype=torch.float64) for n in lengths]
    by_output = [torch.randn(n, width, dtype=torch.float64) * (not cell) for n in lengths]
    start, by_last = torch.randn(2, 2, places, rows, D_HIDDEN, dtype=torch.float64)
    if kind != "lstm":
        by_last[1] = 0
    expected = plainly(module, kind, sequences, start, by_output, by_last)

    def laid_out(values):
        if form in ("sorted", "unsorted"):
            return pack_sequence(values, enforce_sorted=form == "sorted")
        return {"dense": torch.stack(values, 1), "unbatched": values[0], "cell": torch.cat(values)}[form]

    def state(values):
        values = {"unbatched": values[:, :, 0], "cell": values[:, 0]}.get(form, values)
        return list(values) if kind == "lstm" else list(values[:1])

    initial = tuple(state(start)) if kind == "lstm" else state(start)[0]
    arguments = (laid_out(sequences), initial), {}
    weights = ([] if cell else outputs(laid_out(by_output))) + state(by_last)
    values = aliases(module(*arguments[0]))
    loss = sum((weight * value).sum() for weight, value in zip(weights, values, strict=True))
    unrolled = unroll(module, arguments, torch.autograd.grad(loss, values))

    assert [one.name for one in unrolled] == names(module)
    for one in unrolled:
        assert one.keys.shape[:2] == one.errors.shape[:2] == (max(lengths), rows)
        for time in range(max(lengths)):
            for row in range(rows):
                nothing = torch.zeros_like(one.keys[time, row]), torch.zeros_like(one.errors[time, row])
                key, error = expected.get((one.name, time, row), nothing)
                where = f"{one.name} at time {time} in row {row}: "
                torch.testing.assert_close(
                    one.keys[time, row], key, msg=lambda text, where=where: f"key of {where}{text}"
                )
                torch.testing.assert_close(
                    one.errors[time, row], error, msg=lambda text, where=where: f"error of {where}{text}"
                )


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("cell", [False, True])
def test_states_carried_from_call_to_call(kind, cell):
    """Each call has its own slots; what it does to later calls arrives as the errors of its last state."""
    torch.manual_seed(0)
    case = Case(kind, cell=cell, layers=1 if cell else 2)
    module, state, calls, loss = case.module(), None, [], 0
    for _ in range(3):
        (entry,), _ = case.arguments()
        value = map_tensors(module(entry, state), Tensor.clone)
        state = value if cell else value[1]
        calls.append((((entry,), {"hx": calls[-1][1]} if calls else {}), state, outputs(value)))
        loss = loss + sum((torch.randn_like(tensor) * tensor).sum() for tensor in outputs(value))
    errors = [torch.autograd.grad(loss, found, retain_graph=True) for _, _, found in calls]
    loss.backward()
    parts = [
        gradients(module, unroll(module, arguments, error))
        for (arguments, _, _), error in zip(calls, errors, strict=True)
    ]
    assert_gradients(module, {name: sum(part[name] for part in parts) for name in parts[0]})


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("cell", [False, True])
def test_in_the_middle_of_a_backward_pass(kind, cell):
    """As a recorder would call it: from a hook, where gradients are off."""
    torch.manual_seed(0)
    case = Case(kind, cell=cell, layers=1 if cell else 2)
    module, arguments = case.module(), case.arguments()
    values = aliases(module(*arguments[0]))
    weights = [torch.randn_like(value) for value in values]
    errors, unrolled = {}, []

    def seen(number, error):
        errors[number] = error
        if len(errors) == len(values):
            unrolled.extend(unroll(module, arguments, [errors[n] for n in range(len(values))]))

    for number, value in enumerate(values):
        value.register_hook(lambda error, number=number: seen(number, error))
    sum((weight * value).sum() for weight, value in zip(weights, values, strict=True)).backward()
    assert_gradients(module, gradients(module, unrolled))


@given(cases())
def test_nothing_is_changed(case):
    ran = run(case)
    tensors = [*outputs(ran.arguments[0]), *outputs(ran.arguments[1].values()), *ran.module.parameters()]
    tensors += [tensor for tensor in ran.errors if tensor is not None]
    tensors = [tensor for tensor in tensors if tensor.is_leaf] + [tensor.detach() for tensor in tensors]
    before = [(tensor.detach().clone(), tensor.requires_grad, tensor.grad) for tensor in tensors]
    copies = [None if grad is None else grad.clone() for _, _, grad in before]
    torch.rand(1)
    state = torch.get_rng_state()
    unrolled = unroll(ran.module, ran.arguments, ran.errors, ran.rng)
    assert torch.equal(torch.get_rng_state(), state)
    for tensor, (values, requires, grad), copy in zip(tensors, before, copies, strict=True):
        assert torch.equal(tensor, values)
        assert tensor.requires_grad is requires
        assert tensor.grad is grad
        assert grad is None or torch.equal(grad, copy)
    for one, other in zip(unrolled, ran.unrolled, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.errors, other.errors)
        for tensor in (one.keys, one.errors):
            assert not tensor.requires_grad
            assert tensor.grad_fn is None


@given(cases())
def test_without_errors_the_keys_are_the_same(case):
    ran = run(case)
    for one, other in zip(unroll(ran.module, ran.arguments, rng=ran.rng), ran.unrolled, strict=True):
        assert one.name == other.name
        assert one.errors is None
        torch.testing.assert_close(one.keys, other.keys)
        assert not one.keys.requires_grad


@given(cases())
def test_keys_that_the_output_shows_are_the_same(case):
    ran = run(case)
    output = outputs(ran.module(*ran.arguments[0], **ran.arguments[1]))[0]
    keys = shown_keys(ran.module, ran.arguments, output)
    plain = not case.cell and case.layers == 1 and not case.bidirectional and case.form in ("dense", "unbatched")
    assert (keys is not None) == plain
    if keys is not None:
        torch.testing.assert_close(keys, ran.unrolled[0].keys)
        assert not keys.requires_grad


@pytest.mark.parametrize("cell", [False, True])
def test_no_output_was_reached(cell):
    ran = run(Case("lstm", cell=cell))
    found = unroll(ran.module, ran.arguments, [None] * len(ran.errors))
    assert all(not one.errors.any() for one in found)


def test_dropout_needs_the_random_state():
    case = Case("gru", layers=2, dropout=0.5)
    ran = run(case)
    with pytest.raises(RuntimeError, match=r"Dropout between layers needs rng.*just before the forward"):
        unroll(ran.module, ran.arguments, ran.errors)
    ran.module.eval()
    assert len(unroll(ran.module, ran.arguments, ran.errors)) == 2


def test_inputs_are_computed_in_the_dtype_of_the_weights():
    torch.manual_seed(0)
    module, entry = nn.LSTM(D_INPUT, D_HIDDEN), torch.randn(4, 2, D_INPUT)
    exact = unroll(module, ((entry,), {}))[0].keys
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = unroll(module, ((entry.double(),), {}))[0].keys
    assert found.dtype == torch.float32
    assert torch.equal(found, exact)


def test_names():
    assert names(nn.LSTM(3, 2, num_layers=2)) == ["l0", "l1"]
    assert names(nn.GRU(3, 2, num_layers=2, bidirectional=True)) == ["l0", "l0_reverse", "l1", "l1_reverse"]
    assert names(nn.RNNCell(3, 2)) == [""]


def test_outputs():
    output, h, c = torch.zeros(3, 2), torch.zeros(1, 2), torch.ones(1, 2)
    packed = PackedSequence(output, torch.tensor([2, 1]))
    for value, expected in [
        (h, [h]),
        ((h, c), [h, c]),
        ((output, h), [output, h]),
        ((output, (h, c)), [output, h, c]),
        ((packed, (h, c)), [packed.data, h, c]),
    ]:
        found = outputs(value)
        assert all(one is other for one, other in zip(found, expected, strict=True))


class Own(nn.LSTM):
    def forward(self, input, hx=None):
        return super().forward(2 * input, hx)


class Renamed(nn.LSTM):
    pass


class OwnCell(nn.GRUCell):
    def forward(self, input, hx=None):
        return super().forward(2 * input, hx)


def unparametrised():
    module = nn.LSTM(3, 2)
    weight = module.weight_hh_l0
    del module.weight_hh_l0
    module.weight_hh_l0 = weight.detach()
    return module


@pytest.mark.parametrize("module", [*(make(3, 2) for make in [*SEQUENCES.values(), *CELLS.values()]), Renamed(3, 2)])
def test_what_can_be_recorded(module):
    assert why_left_out(module) is None


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda: Own(3, 2), "its type Own has a forward of its own"),
        (lambda: OwnCell(3, 2), "its type OwnCell has a forward of its own"),
        (lambda: nn.LSTM(3, 2, proj_size=1), "it projects its hidden states (proj_size)"),
        (lambda: parametrizations.weight_norm(nn.GRU(3, 2), "weight_hh_l0"), "its weight is parametrised"),
        (unparametrised, "one of its weights is no parameter"),
        (lambda: nn.RNN(3, 2, dtype=torch.bfloat16), "its weights are bfloat16; float32 and float64 can be recorded"),
        (lambda: nn.LSTM(3, 2, num_layers=2, dropout=0.1, device="meta"), "its dropout runs on meta"),
    ],
)
def test_what_cannot_be_recorded(module, why):
    assert why_left_out(module()).startswith(why)
