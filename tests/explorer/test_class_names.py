"""Labels that are names: the page's accuracy, its examples and its report."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.errors import QuestionError
from dualform.explorer.report import _units
from dualform.explorer.session import Session
from dualform.explorer.subject import subject

NAMES = ["cat", "dog", "fox"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A network that tells three clusters apart: its dual, inputs and labels as numbers."""
    folder = tmp_path_factory.mktemp("names") / "run"
    torch.manual_seed(0)
    labels = torch.arange(30) % 3
    inputs = F.one_hot(labels, 3) * 4.0 + torch.randn(30, 3)
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with dualform.record(model, optimizer, folder) as recorder:
        for _ in range(20):
            recorder.batch(sample_id=range(30), label=[NAMES[label] for label in labels.tolist()])
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    right = float((model(inputs).argmax(1) == labels).double().mean())
    assert right > 0.9
    return dualform.open(folder, model), inputs, labels, right


def session(run, labels, class_names):
    dual, inputs, _, _ = run
    return Session(subject(dual, inputs, (inputs, labels), class_names=class_names))


def as_names(labels):
    return [NAMES[label] for label in labels.tolist()]


LABELS = {
    "numbers": (lambda labels: labels, NAMES),
    "numbers as floats": (lambda labels: labels.double(), NAMES),
    "names": (as_names, NAMES),
    "names by number": (as_names, dict(enumerate(NAMES))),
    "names of the dataset": (as_names, {"": NAMES, "other": NAMES[::-1]}),
}


@pytest.mark.parametrize("kind", LABELS)
def test_accuracy_is_that_of_the_model(run, kind):
    make, class_names = LABELS[kind]
    opened = session(run, make(run[2]), class_names)
    assert opened.run().accuracy == pytest.approx(run[3])
    assert opened.predictions.examples(right=False).found == round(30 * (1 - run[3]))
    told = opened.edits.accuracy("label = 'cat'")
    assert told.before == pytest.approx(run[3])
    assert told.examples == told.of == 30
    assert sum(one.before * one.examples for one in told.classes) == pytest.approx(30 * run[3])


def test_a_label_has_the_colour_of_its_output(run):
    opened = session(run, as_names(run[2]), NAMES)
    example = opened.predictions.example(2)
    assert (example.label.name, example.label.colour) == ("fox", 2)
    groups = {value.name: value.colour for value in opened.run().groups[0].values}
    assert groups == {"cat": 0, "dog": 1, "fox": 2}


def test_the_report_shows_the_output_of_the_label(run):
    opened = session(run, as_names((run[2] + 1) % 3), NAMES)
    assert opened.run().accuracy < 0.1
    number = int(opened.predictions.right.argmin())
    answer = int(opened.predictions.answers[0][number])
    assert _units(opened, number, 3) == sorted([answer, int((run[2][number] + 1) % 3)])


@pytest.mark.parametrize("class_names", [None, ["Cat", "dog", "fox"], ["cat", "dog", "cat"], {"cat": "a cat"}])
def test_names_without_an_output_are_refused(run, class_names):
    with pytest.raises(QuestionError, match=r"'cat' of a test example names no output.*class_names="):
        session(run, as_names(run[2]), class_names)


def test_a_dataset_is_refused_when_the_label_is_read(run):
    """Its labels are not read before: that may be slow."""
    dual, inputs, labels, _ = run
    pairs = [*zip(inputs, as_names(labels), strict=True)]
    pairs[7] = (inputs[7], "wolf")
    opened = Session(subject(dual, inputs, pairs, class_names=NAMES))
    with pytest.raises(QuestionError, match="'wolf' of a test example names no output"):
        opened.run()


def test_without_labels_there_is_no_accuracy(run):
    dual, inputs, _, _ = run
    opened = Session(subject(dual, inputs, inputs, class_names=NAMES))
    assert opened.run().accuracy is None
    with pytest.raises(QuestionError, match="have no labels"):
        opened.edits.accuracy("label = 'cat'")
