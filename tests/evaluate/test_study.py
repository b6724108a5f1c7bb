import pytest
import tiny
import torch
from torch.nn import functional as F

import dualform
from dualform.errors import QuestionError
from dualform.evaluate.study import LogLikelihood, Margin
from dualform.named import find


def test_margin_is_the_logit_of_the_probability():
    logits, labels = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    p = F.softmax(logits, 1)[torch.arange(5), labels]
    torch.testing.assert_close(Margin(labels)(logits), torch.log(p / (1 - p)))


def test_margin_has_a_gradient():
    logits = torch.randn(5, 4, requires_grad=True)
    Margin(torch.zeros(5, dtype=torch.int64))(logits).sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_log_likelihood_is_the_mean_over_a_passage():
    logits, words = torch.randn(2, 3, 7, dtype=torch.float64), torch.randint(0, 7, (2, 3))
    expected = [sum(float(F.log_softmax(logits[i, j], 0)[words[i, j]]) for j in range(3)) / 3 for i in range(2)]
    assert LogLikelihood(words)(logits).tolist() == pytest.approx(expected)


def test_a_study_by_its_name():
    assert find("tiny:study", dualform.Study, "a dualform.Study").train is tiny.train
    for named, why in {
        "tiny": "expected MODULE:NAME",
        "tiny:nothing": "cannot be found",
        "no_such:study": "cannot be found",
        "tiny:SAMPLES": "of type int; expected a dualform.Study",
    }.items():
        with pytest.raises(QuestionError, match=why):
            find(named, dualform.Study, "a dualform.Study")
