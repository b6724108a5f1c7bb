"""Which samples are trained on again: random parts of them, each several times."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.errors import QuestionError
from dualform.evaluate.retrain import Job

REPEAT = 1_000_003
"""Between the seeds of a subset's repetitions, so that more subsets or repetitions leave the earlier ones as they are."""


@dataclass(frozen=True)
class Subsets:
    """Random subsets of the samples, each trained on `repeats` times with fresh seeds."""

    ids: Tensor
    """(samples,) ascending"""
    count: int
    repeats: int
    seed: int = 0
    fraction: float = 0.5

    def __post_init__(self) -> None:
        if self.count < 3 or self.repeats < 1 or not 0 < self.fraction < 1 or round(self.fraction * len(self.ids)) < 1:
            raise QuestionError(
                f"{self.count} subsets of {self.fraction} of {len(self.ids)} samples, {self.repeats} trainings each: expected "
                f"at least 3 subsets, 1 training, and a fraction between 0 and 1 that leaves samples."
            )

    def kept(self) -> Tensor:
        """(subsets, samples) bool: which samples each subset keeps."""
        draws = torch.Generator().manual_seed(self.seed)
        size = round(self.fraction * len(self.ids))
        kept = torch.zeros(self.count, len(self.ids), dtype=torch.bool)
        for row in kept:
            row[torch.randperm(len(self.ids), generator=draws)[:size]] = True
        return kept

    def jobs(self) -> list[Job]:
        """All trainings, repetition by repetition: an interrupted evaluation has all subsets as early as can be."""
        kept = self.kept()
        first = self.seed * REPEAT * 1000
        return [
            Job(self.ids[kept[subset]], first + repeat * REPEAT + subset)
            for repeat in range(self.repeats)
            for subset in range(self.count)
        ]

    def outcomes(self, flat: Tensor) -> Tensor:
        """(jobs, examples) → (repeats, subsets, examples)."""
        return flat.reshape(self.repeats, self.count, -1)
