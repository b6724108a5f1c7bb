"""What a method is given: rows of some segments, and what is asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dualform.curvature.loss_mean import LossMean
from dualform.layers.layer import Layer
from dualform.progress import Progress
from dualform.query.influence.products import Question
from dualform.query.influence.segments import Segment
from dualform.store.reader import Store


@dataclass(frozen=True)
class Problem:
    """The rows that a method scores, the questions it scores them for, and its settings (`Dual.influence` says what each means)."""

    store: Store
    layers: Sequence[Layer]
    segments: Sequence[Segment]
    questions: Sequence[Question]
    """What is asked at the weights of each segment."""
    dtype: torch.dtype
    loss_mean: LossMean
    damping: float | None
    size: int
    memory: int
    progress: Progress | None

    @property
    def examples(self) -> int:
        """How many test inputs there are."""
        queries = self.questions[0][self.layers[0].name]
        return len(queries[0].slopes)
