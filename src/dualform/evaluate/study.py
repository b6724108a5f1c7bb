"""What a user gives to have a run evaluated: how to train it again, and on what to judge it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.errors import StudyError
from dualform.query.targets import logits_of


@dataclass(frozen=True)
class Margin:
    """The logit of each example's label less the log of the summed exponentials of all others: log(p / (1 − p))."""

    labels: Tensor
    """(examples,)"""

    def __call__(self, output: Any) -> Tensor:
        """(examples, classes) → (examples,). output: logits, or what holds them."""
        logits: Tensor = logits_of(output)
        mine = logits.gather(1, self.labels.unsqueeze(1))
        others = logits.scatter(1, self.labels.unsqueeze(1), -torch.inf)
        return mine[:, 0] - others.logsumexp(1)


@dataclass(frozen=True)
class LogLikelihood:
    """The mean log-likelihood of each passage's words, where the model's output at a position is about words[position]."""

    words: Tensor
    """(examples, positions)"""

    def __call__(self, output: Any) -> Tensor:
        """(examples, positions, vocabulary) → (examples,). output: logits, or what holds them."""
        logits = logits_of(output)
        return -F.cross_entropy(logits.transpose(1, 2), self.words, reduction="none").mean(1)


@dataclass(frozen=True)
class Study:
    """How to train again on some of the samples, and the test examples that the outcome is judged by.

    With several processes, `train` and `target` travel to each of them: functions at the top of a module do.
    """

    model: nn.Module
    """The architecture that was recorded."""
    train: Callable[[Tensor, int], nn.Module]
    """Sample ids (n,), ascending, and a seed → the model trained on these samples alone, as the recorded one was on all."""
    inputs: Any
    """The test examples: a tensor, a tuple of the model's arguments, or a dictionary of them."""
    target: Callable[[Any], Tensor]
    """The model's output → one number for each test example, e.g. dualform.Margin(labels)."""
    samples: Callable[[Tensor], tuple[Any, Tensor]] | None = None
    """Sample ids → their inputs and labels, in this order. Peers and the tail-patch test look at the samples themselves."""
    column: str = "sample_id"
    """The column of the recording that has the sample ids, which are whole numbers."""

    def judge(self, model: nn.Module) -> Tensor:
        """What a model says of the test examples, (examples,) float64."""
        with torch.no_grad():
            found = self.target(call(model.eval(), self.inputs))
        if not isinstance(found, Tensor) or found.dim() != 1:
            came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise StudyError(f"target(output) gave {came}; expected a tensor with one number for each test example.")
        return found.double()


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's output for a tensor, a tuple of arguments or a dictionary of them."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
