"""The names proof on models of many kinds."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dualform.layers.row_proof import BatchAxes, prove
from dualform.layers.rows import FIRST, ROWS_INSIDE, ROWS_OUTSIDE, SHARED, RowAxis
from dualform.layers.rules import parts_of, rule_for


def proof_of(model, *args, rows, axes=None, **kwargs):
    """Prove where the rows are in every layer of a model."""
    inside = {id(inner) for module in model.modules() for inner in parts_of(module)}
    recorded = {n: m for n, m in model.named_modules() if rule_for(m) is not None and id(m) not in inside}
    owners = {layer.name: n for n, m in recorded.items() for layer in rule_for(m).layers(m, n, lambda short: short)}
    torch.manual_seed(0)
    return prove(model, (args, kwargs), rows, replace(axes or BatchAxes(), modules=owners), recorded, list(recorded))


def where(proof):
    """By layer: the places of its calls, if all are proved."""
    for layer, decisions in proof.decisions.items():
        for decision in decisions:
            assert decision.is_proved, (layer, decision)
    return {layer: [one.where for one in decisions] for layer, decisions in proof.decisions.items()}


class Gpt(nn.Module):
    """Token and position embeddings, one block, a head: positions are one vector for all rows, as in nanoGPT or as in GPT-2."""

    def __init__(self, positions="(T,)", width=8):
        super().__init__()
        self.words, self.places = nn.Embedding(11, width), nn.Embedding(16, width)
        self.mix, self.norm, self.head = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 11)
        self.positions = positions

    def forward(self, tokens):
        time = torch.arange(tokens.shape[1])
        x = self.words(tokens) + self.places(time if self.positions == "(T,)" else time.unsqueeze(0))
        x = x + torch.cumsum(self.mix(x), 1)
        return self.head(self.norm(x))


@pytest.mark.parametrize("positions", ["(T,)", "(1, T)"])
@pytest.mark.parametrize("rows", [5, 7])  # 5: sequences as long as the batch
def test_position_embeddings_are_shared_by_all_rows(positions, rows):
    tokens = torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(0))
    found = where(proof_of(Gpt(positions), tokens, rows=rows))
    assert found == {"words": [FIRST], "places": [SHARED], "mix": [FIRST], "norm": [FIRST], "head": [FIRST]}


class Arranged(nn.Module):
    def __init__(self, arrange):
        super().__init__()
        self.arrange, self.map = arrange, nn.Linear(6, 6)

    def forward(self, x):
        return self.map(self.arrange(x))


@pytest.mark.parametrize(
    ("arrange", "expected"),
    [
        (lambda x: x.transpose(0, 1), RowAxis(1)),
        (lambda x: x.flatten(0, 1), RowAxis(0, ROWS_OUTSIDE)),
        (lambda x: x.transpose(0, 1).flatten(0, 1), RowAxis(0, ROWS_INSIDE)),
        (lambda x: torch.cat([x, -x]), RowAxis(0, ROWS_INSIDE)),
        (lambda x: x.repeat_interleave(2, 0), RowAxis(0, ROWS_OUTSIDE)),
        (lambda x: x.unflatten(1, (2, 2)).transpose(1, 2).flatten(0, 1), RowAxis(0, ROWS_OUTSIDE)),
        (lambda x: torch.eye(6), SHARED),
    ],
)
@pytest.mark.parametrize("rows", [4, 3])
def test_wherever_the_model_puts_the_rows(arrange, expected, rows):
    x = torch.randn(rows, 4, 6, generator=torch.Generator().manual_seed(0))
    assert where(proof_of(Arranged(arrange), x, rows=rows)) == {"map": [expected]}


def test_vectors_in_an_order_of_their_own_are_not_named():
    """As a mixture of experts hands them out."""

    def sorted_vectors(x):
        flat = x.flatten(0, 1)
        return flat[flat[:, 0].argsort()]

    proof = proof_of(Arranged(sorted_vectors), torch.randn(4, 4, 6), rows=4)
    assert [one.where for one in proof.decisions["map"]] == [None]


# Randomness, modes and state


class Noisy(nn.Module):
    """Draws noise in every forward pass, evaluation or not, as a variational autoencoder does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.second(self.first(x) + torch.randn(x.shape))


def test_noise_in_the_forward_pass_does_not_hide_the_rows():
    assert where(proof_of(Noisy(), torch.randn(5, 6), rows=5)) == {"first": [FIRST], "second": [FIRST]}


class OnlyInTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head, self.extra = nn.BatchNorm1d(6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        x = self.norm(x)
        return self.head(x) + self.extra(x) if self.training else self.head(x)


def test_a_layer_that_is_called_in_training_only():
    found = where(proof_of(OnlyInTraining(), torch.randn(5, 6), rows=5))
    assert found == {"norm": [FIRST], "head": [FIRST], "extra": [FIRST]}


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_two_rows_behind_a_batch_normalisation(order):
    """A row that the ReLU makes zero stays what it is when the other row takes its place; the other row changes then."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU(), nn.Linear(2, 3), nn.Linear(3, 2))
    rows = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])[order]
    assert where(proof_of(model, rows, rows=2)) == {"0": [FIRST], "2": [FIRST], "3": [FIRST]}


def test_two_swapped_rows_are_not_named():
    proof = proof_of(Arranged(lambda x: x.flip(0)), torch.randn(2, 3, 6), rows=2)
    assert [one.where for one in proof.decisions["map"]] == [None]


def test_a_model_that_raises_proves_nothing():
    class NeedsGradients(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(3, 1)

        def forward(self, x):
            return torch.autograd.grad(self.map(x).sum(), x)[0]

    proof = proof_of(NeedsGradients(), torch.randn(4, 3, requires_grad=True), rows=4)
    assert "raised RuntimeError" in proof.problem


def test_random_states_are_put_back():
    class Draws(Noisy):
        def forward(self, x):
            return super().forward(x) + random.random() + float(np.random.rand())

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    expected = random.random(), np.random.rand(), torch.rand(())
    random.seed(0)
    np.random.seed(0)
    model = Draws()
    x = torch.randn(4, 6)
    torch.manual_seed(0)
    prove(model, ((x,), {}), 4, BatchAxes(), dict(model.named_children()), [])
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


# Modules that name the axis of their batch


@pytest.mark.parametrize("rows", [3, 5])  # 5: sequences as long as the batch
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers_and_their_states(batch_first, rows):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.LSTM(4, 6, batch_first=batch_first), nn.Linear(6, 2)

        def forward(self, x, state):
            return self.head(self.body(x, state)[0])

    state = (torch.randn(1, rows, 6), torch.randn(1, rows, 6))
    x = torch.randn(rows, 5, 4) if batch_first else torch.randn(5, rows, 4)
    found = where(proof_of(Recurrent(), x, state, rows=rows))
    assert found == {"body": [RowAxis(1)], "head": [FIRST if batch_first else RowAxis(1)]}


def test_packed_sequences():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 2)

        def forward(self, packed):
            return self.head(pad_packed_sequence(self.body(packed)[0], batch_first=True)[0])

    packed = pack_padded_sequence(
        torch.randn(4, 6, 4), torch.tensor([3, 6, 2, 5]), batch_first=True, enforce_sorted=False
    )
    assert where(proof_of(Packed(), packed, rows=4)) == {"body": [RowAxis(1)], "head": [FIRST]}


@pytest.mark.parametrize("rows", [3, 5])
def test_a_transformer_with_a_mask_over_positions(rows):
    """A mask of (T, T) looks like rows where sequences are as long as the batch."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    found = where(proof_of(model, torch.randn(rows, 5, 8), src_mask=mask, rows=rows))
    assert found["linear1"] == found["linear2"] == found["norm1"] == [FIRST]
    assert found["self_attn.q"] == found["self_attn.out_proj"] == [FIRST]


def test_a_sequence_first_transformer():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=False)
    found = where(proof_of(model, torch.randn(5, 3, 8), rows=3))
    assert found["linear1"] == found["self_attn.q"] == [RowAxis(1)]


# What the user says


def test_the_axis_of_the_inputs():
    found = where(proof_of(Arranged(lambda x: x.flatten(0, 1)), torch.randn(5, 3, 6), rows=3, axes=BatchAxes(inputs=1)))
    assert found == {"map": [RowAxis(0, ROWS_INSIDE)]}


def test_an_axis_other_than_the_first_is_not_taken_by_its_length():
    proof = proof_of(Arranged(lambda x: x), torch.randn(5, 3, 6), rows=3)
    assert not proof.decisions
    assert proof.rows_differ


def test_what_is_said_of_one_layer_tells_the_inputs_of_all():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.second(self.first(x).mean(0))

    found = where(proof_of(Two(), torch.randn(3, 3, 6), rows=3, axes=BatchAxes({"fir*": 1})))
    assert found == {"first": [RowAxis(1)], "second": [FIRST]}


def test_arguments_without_rows():
    assert "no tensors" in proof_of(Arranged(lambda x: torch.randn(3, 6)), 7, rows=3).problem
