"""Leave few out: train again without the samples that a view says support a test example most. Does its target fall?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl
import torch
from torch import Tensor

from dualform.errors import QuestionError
from dualform.evaluate.lds import mean_interval
from dualform.evaluate.retrain import Estimate, Job, Retrained, trainings_folder
from dualform.evaluate.scored import chosen, scored
from dualform.evaluate.study import Study
from dualform.evaluate.views import samples_of
from dualform.progress import Progress
from dualform.query.dual import Dual, open

RANDOM = "random"
"""The view that knows nothing."""
SEED = 7_000_000_000
"""Of the first repetition: other seeds than those of the subsets."""


@dataclass(frozen=True)
class FewOut:
    """What is left out for each view and example; `estimate()` says how long training again takes, `run()` does it."""

    retrained: Retrained
    ids: Tensor
    out: dict[str, Tensor]
    """For each view the places of the samples left out, (examples, k)."""
    repeats: int

    def estimate(self) -> Estimate:
        """How many trainings are still to do, and about how long they take. Does one or two of them."""
        return self.retrained.estimate(self._jobs())

    def run(self, progress: Progress | None = None) -> pl.DataFrame:
        """One line for each view: by how much the target falls, a mean over examples with its 95 % bootstrap interval."""
        examples = len(self.out[RANDOM])
        found = self.retrained.outcomes(self._jobs(), progress)
        whole, *without = found.reshape(1 + len(self.out) * examples, self.repeats, -1).mean(1)
        falls = torch.stack([whole[n % examples] - one[n % examples] for n, one in enumerate(without)])
        lines = []
        for name, mine in zip(self.out, falls.reshape(len(self.out), examples), strict=True):
            fall = mean_interval(mine)
            lines.append({"view": name, "fall": fall.value, "low": fall.low, "high": fall.high})
        return pl.DataFrame(lines)

    def _jobs(self) -> list[Job]:
        """On all samples, then view by view and example by example without some; each repetition with its own seed."""
        sets = [self.ids] + [self._without(places) for of_view in self.out.values() for places in of_view]
        return [Job(ids, SEED + repeat) for ids in sets for repeat in range(self.repeats)]

    def _without(self, places: Tensor) -> Tensor:
        kept = torch.ones(len(self.ids), dtype=torch.bool)
        kept[places] = False
        return self.ids[kept]


def leave_few_out(
    run: str | os.PathLike[str] | Dual,
    study: Study,
    k: int,
    *,
    out: str | os.PathLike[str] | None = None,
    examples: int = 10,
    repeats: int = 2,
    views: Sequence[str] | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> FewOut:
    """For each of the first test examples and each view, leave out the k samples that support it most; beside random ones."""
    dual = run if isinstance(run, Dual) else open(run, study.model)
    ids, tests = samples_of(dual, study), len(study.judge(dual.model()))
    if not 1 <= k < len(ids) or not 1 <= examples <= tests or repeats < 1:
        raise QuestionError(
            f"{k} of {len(ids)} samples out for {examples} of {tests} test examples, {repeats} trainings each: expected at least "
            f"one of each, fewer than all samples, and no more examples than the study has."
        )
    folder = trainings_folder(dual.store.location, out)
    scores = {RANDOM: torch.rand(tests, len(ids), generator=torch.Generator().manual_seed(0))}
    for one in scored(chosen(views, study), dual, study, progress):
        if one.scores is not None:
            scores[one.view] = one.scores
    best = {name: found[:examples].topk(k, dim=1).indices for name, found in scores.items()}
    return FewOut(Retrained(study, folder, workers), ids, best, repeats)
