"""Influence with each row's gradient at unit length, beside lengths that are asked for as influence of a row on itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import QuestionError

ROWS, TIME, WIDTH, CLASSES = 6, 4, 6, 3


class Sequences(nn.Module):
    """Embedding, a grouped convolution, a normalisation and a head: every kind of linear map."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, WIDTH)
        self.mix = nn.Conv1d(WIDTH, 4, 2, groups=2)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, tokens):
        mixed = self.mix(self.words(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(mixed.tanh()).sum(1))


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """Weights that never move: the gradient of a row is the same in training and when it is asked about."""
    torch.manual_seed(0)
    model = Sequences().double()
    tokens = torch.randint(0, 7, (ROWS, TIME))
    labels = torch.arange(ROWS) % CLASSES
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    path = tmp_path_factory.mktemp("still") / "run"
    with dualform.record(model, optimizer, path) as recorder:
        for rows in (torch.arange(4), torch.arange(4, 6), torch.arange(1, 5)):
            recorder.batch(sample_id=rows)
            F.cross_entropy(model(tokens[rows]), labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()

    def loss(output):
        return F.cross_entropy(output, labels, reduction="none")

    return dualform.open(path, model), tokens, loss


def totals(answer):
    """(examples, samples): the mean over the visits of each sample, samples ascending."""
    sums = answer.sums("sample_id")
    assert sums.values["sample_id"].to_list() == list(range(ROWS))
    return sums.totals / sums.visits


@pytest.mark.parametrize("layers", [None, "words", "mix", "norm", "head"])
def test_lengths_are_those_of_each_rows_own_gradient(still, layers):
    dual, tokens, loss = still
    asked = {"target": loss, "segments": [(0, 3)], "layers": layers}
    plain = totals(dual.influence(tokens, **asked))
    own = -plain.diagonal()  # what a row does to its own loss: minus its squared length
    assert (own > 0).all()
    found = totals(dual.influence(tokens, **asked, normalised=True))
    torch.testing.assert_close(found, plain / own.sqrt(), rtol=1e-9, atol=1e-12)


def test_a_layer_is_its_part_of_the_whole(still):
    dual, tokens, loss = still
    whole = dual.influence(tokens, target=loss, segments=[(0, 3)], normalised=True)
    parts = [whole[layer].sums("sample_id").totals for layer in whole]
    torch.testing.assert_close(sum(parts), whole.sums("sample_id").totals)


def test_what_it_does_not_go_together_with(still):
    dual, tokens, loss = still
    with pytest.raises(QuestionError, match="normalised=True goes together with method=\"whitened\", not 'sketch'"):
        dual.influence(tokens, target=loss, method="sketch", normalised=True)
    with pytest.raises(QuestionError, match="rows have no position"):
        dual.influence(tokens, target=loss, segments=[(0, 3)], normalised=True).total("position")
