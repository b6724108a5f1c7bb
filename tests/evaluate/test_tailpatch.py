import copy
import sys

import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import dualform
from dualform.cli import app
from dualform.errors import QuestionError
from dualform.evaluate import evaluation
from dualform.evaluate.bm25 import bm25
from dualform.evaluate.study import LogLikelihood, Study
from dualform.evaluate.tailpatch import tail_patch

WORDS, LENGTH, PASSAGES, QUERIES = 12, 5, 20, 6


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """Passages that walk through the vocabulary with a stride of their own; queries are such walks, too."""
    generator = torch.Generator().manual_seed(0)
    first, stride = torch.randint(0, WORDS, (2, PASSAGES + QUERIES, 1), generator=generator)
    told = (first + (stride % 3 + 1) * torch.arange(LENGTH + 1)) % WORDS
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    folder = tmp_path_factory.mktemp("language") / "run"
    with dualform.record(model, optimizer, folder) as recorder:
        for _ in range(5):
            for ids in torch.randperm(PASSAGES).split(4):
                recorder.batch(sample_id=ids)
                optimizer.zero_grad()
                F.cross_entropy(model(told[ids, :-1]).flatten(0, 1), told[ids, 1:].flatten()).backward()
                optimizer.step()
    inputs, words = told[:, :-1], told[:, 1:]
    study = Study(
        model=model,
        train=lambda ids, seed: model,
        inputs=inputs[PASSAGES:],
        target=LogLikelihood(words[PASSAGES:]),
        samples=lambda ids: (inputs[ids], words[ids]),
    )
    return folder, study, model


def test_one_step_on_the_best_passages(language):
    folder, study, model = language
    frame = tail_patch(folder, study, 3, lr=0.2, views=["whitened"])
    assert frame["view"].to_list() == ["random", "bm25", "whitened"]
    inputs, words = study.samples(torch.arange(PASSAGES))
    rises = []
    for query, places in enumerate(bm25(study.inputs, inputs).topk(3).indices):
        other = copy.deepcopy(model)
        other.zero_grad()
        loss = F.cross_entropy(other(inputs[places]).flatten(0, 1), words[places].flatten())
        loss.backward()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter -= 0.2 * parameter.grad
        rises.append(float(study.judge(other)[query] - study.judge(model)[query]))
    assert frame["rise"][1] == pytest.approx(sum(rises) / len(rises), abs=1e-6)
    assert frame["share"][1] == pytest.approx(sum(rise > 0 for rise in rises) / len(rises))
    assert frame["rise"][2] > frame["rise"][0]


def test_refusals(language, recorded):
    folder, study, _ = language
    with pytest.raises(QuestionError, match="from 1 to 20"):
        tail_patch(folder, study, 21)
    with pytest.raises(QuestionError, match="for language runs"):
        tail_patch(recorded, tiny.study())
    with pytest.raises(QuestionError, match="give the study samples="):
        tail_patch(recorded, tiny.study(samples=None))


def test_the_command_says_at_once_that_bm25s_is_missing(recorded, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)  # importing it fails
    monkeypatch.setattr(evaluation, "prepare", lambda *_, **__: pytest.fail("began"))
    answer = CliRunner().invoke(app, ["evaluate", str(recorded), "--study", "tiny:study", "--tail-patch", "3"])
    assert answer.exit_code == 2
    assert answer.stderr == "error: this command needs bm25s: pip install 'dualform[evaluate]'.\n"
