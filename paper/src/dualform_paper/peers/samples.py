"""The training samples as peers want them: a dataset of inputs and labels, a loss, and the network at some moments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dualform import Dual
from dualform.errors import NotRecordedError
from dualform.evaluate import Study, samples_of

BATCH = 256


def dataset(dual: Dual, study: Study) -> TensorDataset:
    """Inputs and labels of all samples, ascending by id."""
    if study.samples is None:
        raise NotRecordedError(
            "peers look at the samples themselves: give the study samples=, a function of sample ids."
        )
    inputs, labels = study.samples(samples_of(dual, study))
    if not isinstance(inputs, Tensor):
        raise NotRecordedError(
            f"peers are run on models with one tensor as input; samples gave {type(inputs).__name__}."
        )
    return TensorDataset(inputs, labels)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Softmax cross-entropy, summed, also over the positions of a passage."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def moments(dual: Dual, count: int) -> list[int]:
    """Steps at equal distances, the last of them the end of training."""
    return sorted({max(1, round(dual.end_step * place / count)) for place in range(1, count + 1)})


class Loss(nn.Module):
    """`loss` as a module that says that it sums."""

    reduction = "sum"

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """One number."""
        return loss(logits, labels)


class Opposite(nn.Module):
    """The summed target of the test examples, all of which are in the batch, with the sign of a loss."""

    reduction = "sum"

    def __init__(self, study: Study):
        super().__init__()
        self._target = study.target

    def forward(self, output: Any, labels: Tensor | None = None) -> Tensor:
        """One number."""
        return -self._target(output).sum()


def standardised(scores: Tensor) -> Tensor:
    """Each test example's scores divided by their deviation, so that moments of training weigh the same in a mean."""
    return scores / scores.std(1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
