"""The user's samples in each of the forms they come in."""

import pytest
import torch
from torch.utils.data import TensorDataset

from dualform.errors import QuestionError
from dualform.explorer.collection import Part, TestSet, TrainingSet

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6) % 3
FORMS = {
    "pair": (X, Y),
    "arrays": (X.numpy(), Y.numpy()),
    "dataset": TensorDataset(X, Y),
    "list of pairs": [(x, int(y)) for x, y in zip(X, Y, strict=True)],
}


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
def test_inputs_and_labels(data):
    part = Part(data)
    assert len(part) == 6
    assert torch.equal(torch.as_tensor(part.input(4)), X[4])
    assert part.label(4) == 1
    assert type(part.label(4)) is int
    assert torch.equal(part.batch([1, 3]), X[[1, 3]])


@pytest.mark.parametrize("data", [X, X.numpy(), list(X)])
def test_inputs_alone(data):
    part = Part(data)
    assert part.label(0) is None
    assert torch.equal(part.batch([5]), X[[5]])


def test_several_test_sets_follow_each_other():
    test = TestSet({"one": (X, Y), "two": (X[:2], Y[:2])})
    assert len(test) == 8
    part, place = test.place(6)
    assert (part.name, place) == ("two", 0)
    assert [(part.name, list(places)) for part, places in test.batches(4, 7)] == [
        ("one", [0, 1, 2, 3]),
        ("one", [4, 5]),
        ("two", [0]),
    ]
    with pytest.raises(QuestionError, match="there are 8"):
        test.place(8)


def test_training_samples_by_key():
    train = TrainingSet({"one": X, "two": X + 100})
    assert torch.equal(train.input(("two", 3)), X[3] + 100)
    assert TrainingSet(X).input((99,)) is None
    assert TrainingSet(X).input((-1,)) is None
    assert train.input(("three", 3)) is None
    assert not TrainingSet(None)


def test_what_holds_no_samples():
    with pytest.raises(QuestionError, match="expected an array"):
        Part(iter([1]))
